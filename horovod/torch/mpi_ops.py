"""Collectives and world queries, under Horovod's module name. MPI is not used."""

from elastic.api import ops
from elastic.api.ops import *  # noqa: F403
from elastic.optimizer.join import join
from horovod.common import common_api
from horovod.common.common_api import *  # noqa: F403
from horovod.common.exceptions import HorovodInternalError

__all__ = ["HorovodInternalError", "join"]
__all__ += ops.__all__
__all__ += common_api.__all__
