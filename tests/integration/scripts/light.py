"""Imports torch without its compiler, and with one thread. ``import light`` before anything makes an optimizer."""

from __future__ import annotations

import torch

from elastic.chaos.uncompiled import without_compiler

torch.set_num_threads(1)
without_compiler()
