"""Which files a script consists of: its own modules, without installed packages and Python's own."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Mapping

MOST = 200  # files


def script_files(modules: Mapping[str, object]) -> list[str]:
    """Of the modules that a process has imported, at most ``MOST``."""
    standard = sysconfig.get_paths()["stdlib"] + os.sep
    found: list[str] = []
    for name, module in list(modules.items()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or name.partition(".")[0] in ("elastic", "horovod"):
            continue
        if not file.endswith(".py") or file.startswith(standard):
            continue
        if not os.path.isabs(file) and not os.path.exists(file):
            continue  # made in memory, as torch.ops, whose file is "_ops.py"
        if not {"site-packages", "dist-packages"} & set(file.split(os.sep)):
            found.append(file)
    return found[:MOST]
