"""Dataset and state of the training scripts of the fault matrix."""

from __future__ import annotations

import os
from typing import Any

import torch

import elastic
from elastic.failpoints import failpoint, set_step

SAMPLES = 37  # divisible neither into rounds nor into epochs
BATCH = 2
STEP_S = 0.02  # pause besides the work, so that a machine with few cores has time for imports

inputs = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1))
wanted = inputs.sin() @ torch.ones(6, 3)


class WatchedState(elastic.TorchState):
    """State that writes rank 0's step into the file ``step`` and checks that no commit of its process is undone."""

    committed = -1  # step of this process's last commit

    def __init__(self, **values: Any) -> None:
        self._step_file = os.open("step", os.O_WRONLY | os.O_CREAT, 0o644)
        super().__init__(**values)

    def commit(self) -> None:
        set_step(self.step)
        if elastic.rank() == 0:
            os.pwrite(self._step_file, f"{self.step:9}".encode(), 0)
        failpoint("before-commit")
        try:
            super().commit()
        except elastic.WorldChanging:  # raised after the commit
            self.committed = self.step
            raise
        self.committed = self.step

    def watch(self) -> None:
        assert self.step >= self.committed, f"step {self.step} after {self.committed} was committed"
