"""`elastic.Checkpoints`: a script decides which commits become durable. Acts."""

from __future__ import annotations

from elastic.protocol.messages import Commit
from elastic.runtime import lifecycle


class Checkpoints:
    """Durable commits of the training that runs, for a script that wants to decide when they are made.

    Where they go is the job's: ``--checkpoint-dir``, or ``ELASTIC_CHECKPOINT_DIR``. With ``--checkpoint-every manual``
    nothing but `save` makes one, and the end of the training. A script need not ask whether there is a folder: without
    one, `save` does nothing, and `newest` is None.

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
        """Has the next commit made durable; returns at once. Call it on all ranks, before the same commit.

        Where a checkpoint is still being written then, it is one of the commits that follow. Outside a function under
        ``elastic.run``, and without ``--checkpoint-dir``, it does nothing. Returns whether a checkpoint will follow.
        """
        rt = lifecycle.active()
        if rt is None or rt.commits.durable is None:
            return False
        rt.commits.durable.want()
        return True

    @property
    def newest(self) -> str | None:
        """The newest commit that this rank knows to be durable, as ``elasticrun checkpoints`` lists it: ``3.450``.

        None where none was made yet since this worker has begun to train.
        """
        rt = lifecycle.active()
        if rt is None or rt.commits.durable is None:
            return None
        commit: Commit | None = rt.commits.durable.newest
        return None if commit is None else str(commit)
