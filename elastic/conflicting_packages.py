"""Detection of other packages that install files into this package's folders.

These are horovod, and the unrelated package elastic (for crystals).
"""

from __future__ import annotations

import os
import warnings

# Files and folders that exist in the other packages but not in this one.
MARKS = {
    "elastic": ("elastic.py", "_version.py", "cli"),
    "horovod": ("_keras", "common/basics.py", "spark/gloo_run.py"),
}


def warn_of_conflicts(package: str, folder: str) -> None:
    """Issue a RuntimeWarning if this package's folder contains files of another package.

    This function is called only by the driver.
    """
    if "ELASTIC_WORKER" in os.environ:
        return
    for mark in MARKS[package]:
        if os.path.exists(f"{folder}/{mark}"):
            warnings.warn(
                f"{folder} contains files of another package named {package} ({mark}), which overwrite those of"
                f" hvd-elastic; {remedy(package)}",
                RuntimeWarning,
                stacklevel=3,
            )
            return


def remedy(package: str) -> str:
    """Return instructions to remove the conflict with a package."""
    return (
        "use separate environments, or run: pip uninstall"
        f" {package}; pip install --force-reinstall --no-deps hvd-elastic"
    )
