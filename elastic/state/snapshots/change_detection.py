"""Notices work that may change tensors without leaving a trace in their ``_version``.

Fused optimizers, ``p.data.add_`` and BatchNorm's running statistics change values and leave ``_version`` alone. So a
commit trusts ``_version`` only while nothing was noticed here: no step of any torch optimizer, no collective. It never
says what changed, only that something may have. (Models are not hooked: ``torch.jit.script`` compiles a model's hooks
and would refuse ours. What a forward or backward pass leaves behind is looked for in `snapshot` and `model_state`.)
"""

from __future__ import annotations

from elastic.runtime import lifecycle

_noticed = False
_count = 0
_watching_optimizers = False

Moment = tuple[int, int, int]


def notice(*_: object) -> None:
    """Something may have changed tensors. Also a hook for optimizer steps."""
    # A plain store of a constant: compiled into a graph, it is replayed without a guard or a graph break.
    global _noticed
    _noticed = True


def moment() -> Moment:
    """Equal moments: nothing was noticed in between."""
    global _noticed, _count
    if _noticed:
        _noticed = False
        _count += 1
    rt = lifecycle.active()
    return (_count, 0, 0) if rt is None else (_count, id(rt), rt.activity)


def watch_optimizers() -> None:
    """From now on every step of every torch optimizer is noticed. Idempotent."""
    global _watching_optimizers
    if _watching_optimizers:
        return
    from torch.optim.optimizer import (
        register_optimizer_step_post_hook,
        register_optimizer_step_pre_hook,
    )

    # Before as well: a step that raises half-way has changed something too.
    register_optimizer_step_pre_hook(notice)
    register_optimizer_step_post_hook(notice)
    _watching_optimizers = True
