"""Imports torch in two thirds of the time: its objects are excluded from garbage collection, now and at exit.

Also omits its compiler, and uses one thread. Import it before anything that imports torch, in scripts that are started
very often.
"""

import gc

gc.disable()

import torch  # noqa: E402

gc.freeze()
gc.enable()

from elastic.chaos.hosts.workers.no_compile import without_compiler  # noqa: E402

torch.set_num_threads(1)
without_compiler()
