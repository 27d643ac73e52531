"""Counts the steps of every torch optimizer of this process, so that a loader knows what has been trained on."""

from __future__ import annotations

_stepped = False
_count = 0
_watching = False


def _note(*_: object) -> None:
    # A plain store of a constant: compiled into a graph, it is replayed without a guard or a graph break.
    global _stepped
    _stepped = True


def count() -> int:
    """Another number than before: some optimizer has stepped since this was last asked. 0: none ever has."""
    global _stepped, _count
    if _stepped:
        _stepped = False
        _count += 1
    return _count


def watch() -> None:
    """From now on steps are counted. Idempotent."""
    global _watching
    if not _watching:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(_note)
        _watching = True
