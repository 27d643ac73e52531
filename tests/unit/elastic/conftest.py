"""Torch computes with one thread here: ranks are threads of this process, and each would have helpers of its own that
keep the processors busy while they wait.
"""

import torch

torch.set_num_threads(1)
