"""Step counter over all torch optimizers of this process. Loaders use it to detect which batches were trained."""

from __future__ import annotations

_stepped = False
_count = 0
_watching = False


def _note(*_: object) -> None:
    # Only a constant is assigned, which torch.compile can compile without a guard or a graph break.
    global _stepped
    _stepped = True


def count() -> int:
    """Return a number that changes with each step of an optimizer, or 0 before the first step."""
    global _stepped, _count
    if _stepped:
        _stepped = False
        _count += 1
    return _count


def watch() -> None:
    """Start counting optimizer steps. Idempotent."""
    global _watching
    if not _watching:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(_note)
        _watching = True
