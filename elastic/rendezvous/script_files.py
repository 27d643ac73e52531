"""Source files of the script's own modules. Excludes installed packages and the standard library."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Mapping

MOST = 200  # maximum number of files to return
# Frameworks to exclude even outside site-packages, such as a torch that was built from source.
LIBRARIES = frozenset({
    "accelerate", "cloudpickle", "datasets", "elastic", "horovod", "jax", "keras", "lightning", "lightning_fabric",
    "lightning_utilities", "numpy", "pytorch_lightning", "runpy", "tensorflow", "tf_keras", "torch", "transformers",
    "typing_extensions",
})  # fmt: skip


def script_files(modules: Mapping[str, object]) -> list[str]:
    """Return the files of the given modules that belong to the script: at most `MOST` files."""
    standard = sysconfig.get_paths()["stdlib"] + os.sep
    found: list[str] = []
    for name, module in list(modules.items()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or name.partition(".")[0] in LIBRARIES:
            continue
        if not file.endswith(".py") or file.startswith(standard):
            continue
        if not os.path.isabs(file) and not os.path.exists(file):
            continue  # Skip modules created in memory, like torch.ops with the file "_ops.py".
        if not {"site-packages", "dist-packages"} & set(file.split(os.sep)):
            found.append(file)
    return found[:MOST]
