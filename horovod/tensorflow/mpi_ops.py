"""The operations and queries, under the path that some scripts import them from. There is no MPI behind it."""

from __future__ import annotations

from elastic.tensorflow import ops
from elastic.tensorflow.ops import *  # noqa: F403
from horovod.common import door
from horovod.common.door import *  # noqa: F403

__all__: list[str] = []
__all__ += ops.__all__
__all__ += door.__all__
