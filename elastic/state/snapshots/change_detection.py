"""Detection of operations that may change tensors without incrementing their ``_version``.

Fused optimizers, ``p.data.add_`` and BatchNorm's running statistics change values but not ``_version``. A commit
therefore relies on ``_version`` only if no operation was recorded here, that is, no step of a torch optimizer and no
collective. The record does not identify the changed tensors. (Models are not hooked, since ``torch.jit.script``
compiles a model's hooks and would reject these. `snapshot` and `model_state` check for the effects of forward and
backward passes.)
"""

from __future__ import annotations

from elastic.runtime import lifecycle

_noticed = False
_count = 0
_watching_optimizers = False

Moment = tuple[int, int, int]


def notice(*_: object) -> None:
    """Record that tensors may have changed. Also used as a hook of optimizer steps."""
    # Only store a constant, because torch.compile compiles this without a guard or a graph break.
    global _noticed
    _noticed = True


def moment() -> Moment:
    """Return a marker. If two markers are equal, no operation was recorded between the calls."""
    global _noticed, _count
    if _noticed:
        _noticed = False
        _count += 1
    rt = lifecycle.active()
    return (_count, 0, 0) if rt is None else (_count, id(rt), rt.activity)


def watch_optimizers() -> None:
    """Start recording all steps of all torch optimizers. Idempotent."""
    global _watching_optimizers
    if _watching_optimizers:
        return
    from torch.optim.optimizer import (
        register_optimizer_step_post_hook,
        register_optimizer_step_pre_hook,
    )

    # Also record a change before the step, because a step that raises midway may have changed tensors.
    register_optimizer_step_pre_hook(notice)
    register_optimizer_step_post_hook(notice)
    _watching_optimizers = True
