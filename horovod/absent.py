"""What importing a door says that is not there: not provided at all, or not without another package."""

from __future__ import annotations

import importlib
import warnings

from elastic.rendezvous import environment

# Series of releases that the tests were run with.
TESTED = {"tensorflow": ("2.21",), "keras": ("3.15",), "tf_keras": ("2.21",), "mxnet": ("1.9",)}


def refuse(front_end: str, instead: str) -> ImportError:
    """The error to raise: an ImportError, which scripts that try several front ends expect."""
    return ImportError(
        f"horovod.{front_end} is not provided by hvd-elastic, which trains models of PyTorch, TensorFlow,"
        f" Keras and MXNet; {instead}",
        name=f"horovod.{front_end}",
    )


def need_keras(front_end: str) -> None:
    """As `need`, of the Keras that this process has."""
    need("tf_keras" if environment.legacy_keras() else "keras", front_end)


def need(package: str, front_end: str) -> None:
    """Imports a framework. Raises ImportError that says which extra to install; warns of an unknown release."""
    try:
        module = importlib.import_module(package)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != package:
            raise
        what = "tf-keras" if package == "tf_keras" else f"'hvd-elastic[{package}]'"
        raise ImportError(
            f"{front_end} needs {package}, which is not installed; run: pip install {what}",
            name=package,
        ) from error
    version = str(module.__version__)
    if not any(version.startswith(f"{series}.") for series in TESTED[package]):
        warnings.warn(
            f"{front_end} was tested with {package} {', '.join(TESTED[package])}, and not with {version}",
            stacklevel=3,
        )
