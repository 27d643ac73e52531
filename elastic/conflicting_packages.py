"""Detection of other packages that install into the folders of this package: elastic (crystals) and horovod."""

from __future__ import annotations

import os
import warnings

# Files and folders of the other packages that do not exist in this package.
MARKS = {
    "elastic": ("elastic.py", "_version.py", "cli"),
    "horovod": ("_keras", "common/basics.py", "spark/gloo_run.py"),
}


def warn_of_conflicts(package: str, folder: str) -> None:
    """Issue a RuntimeWarning if the package's folder has files of another package. Called by the driver only."""
    if "ELASTIC_WORKER" in os.environ:
        return
    for mark in MARKS[package]:
        if os.path.exists(f"{folder}/{mark}"):
            warnings.warn(
                f"{folder} holds files of another package named {package} ({mark}) that overwrite those of hvd-elastic;"
                f" {remedy(package)}",
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
