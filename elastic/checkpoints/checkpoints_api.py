"""`elastic.Checkpoints`, with which a script requests checkpoints."""

from __future__ import annotations

from elastic.protocol.messages import Commit
from elastic.runtime import lifecycle


class Checkpoints:
    """Handle with which a training script requests checkpoints.

    The folder is an option of the job: ``--checkpoint-dir`` or ``ELASTIC_CHECKPOINT_DIR``. With ``--checkpoint-every
    manual``, checkpoints are written only on `save` and at the end of the training. Without a folder, `save` does
    nothing and `newest` is None, so a script need not check for one.

        checkpoints = elastic.Checkpoints()

        @elastic.run
        def train(state):
            for state.epoch in range(state.epoch, 10):
                train_epoch(state)
                if evaluate(model) > best:
                    checkpoints.save()
                state.commit()
    """

    def save(self) -> bool:
        """Request a checkpoint of the next commit, and return immediately.

        Call this method on all ranks, before the same commit.

        If the previous checkpoint is still being written at that commit, a later commit becomes durable instead.
        Outside a function under ``elastic.run``, and without ``--checkpoint-dir``, this method does nothing.

        Returns:
            True if a checkpoint was requested, False if this method had no effect.
        """
        rt = lifecycle.active()
        if rt is None or rt.commits.durable is None:
            return False
        rt.commits.durable.want()
        return True

    @property
    def newest(self) -> str | None:
        """ID of the newest durable commit of which this rank was notified, or None.

        An ID such as ``g3c450`` is also shown by ``elasticrun checkpoints``. The result is None if no checkpoint was
        written since this worker started training.
        """
        rt = lifecycle.active()
        if rt is None or rt.commits.durable is None:
            return None
        commit: Commit | None = rt.commits.durable.newest
        return None if commit is None else str(commit)
