"""Collectives and world queries, under Horovod's module name. MPI is not used."""

from __future__ import annotations

from elastic.tensorflow import ops
from elastic.tensorflow.ops import *  # noqa: F403
from horovod.common import common_api
from horovod.common.common_api import *  # noqa: F403

__all__: list[str] = []
__all__ += ops.__all__
__all__ += common_api.__all__
