"""``DistributedDataParallel`` models over all ranks, with the generation in which each got its present reducer.

The reducer of a model in a state is rebuilt in each world. Another model's reducer keeps the gradient counts and
buckets of the world in which it was built, so that ranks which have just joined would disagree with the others.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from elastic.sharding import unsupported_sharding
from elastic.torch_backend.following_group import FollowingGroup
from elastic.torch_backend.group_names import names

_ddp: Any = DistributedDataParallel
_build: Any = _ddp._ddp_init_helper
# Generation in which the reducer was built, or 0 before elastic.run.
_built: weakref.WeakKeyDictionary[DistributedDataParallel, int] = weakref.WeakKeyDictionary()


def replace() -> None:
    """Patch DDP to record each model whose reducer is built later. Idempotent."""
    _ddp._ddp_init_helper = _build_reducer


@functools.wraps(_build)
def _build_reducer(model: DistributedDataParallel, *args: Any, **options: Any) -> None:
    _build(model, *args, **options)
    group = model.process_group
    if isinstance(group, FollowingGroup) and group.ranks is None:
        _built[model] = names.generation


def unfollowed() -> list[DistributedDataParallel]:
    """Return the models that are in no state, and whose reducers were not built in the current world."""
    return [
        model
        for model, generation in list(_built.items())
        if generation != names.generation and not unsupported_sharding.is_replica_followed(model)
    ]
