"""Runs a script of Keras, and prints when TensorFlow traces its training step: in a world that trains, or before."""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any

import keras

from elastic.runtime import lifecycle
from elastic.runtime.recovery import Phase

train_step: Any = keras.Model.train_step


def saying(*args: Any) -> Any:
    rt = lifecycle.current()
    when = "in a world" if rt.session.recovery.phase is Phase.TRAINING else "ahead of one"
    print(f"process {os.getpid()} traces its step {when}", flush=True)
    return train_step(*args)


if keras.backend.backend() == "tensorflow":  # otherwise, it is called for each batch, or often
    keras.Model.train_step = saying
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
