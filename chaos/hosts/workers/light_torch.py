"""Imports torch for two thirds of the price: its objects are not searched for garbage, now or at the process's end.
Leaves out its compiler, too, and gives it one thread. Import it before anything that imports torch; for what is started
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
