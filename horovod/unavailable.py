"""Errors for imports of modules that this package does not provide, or that need another package."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

# Release series of each framework with which the tests were run.
TESTED = {"tensorflow": ("2.21",), "keras": ("3.15",), "tf_keras": ("2.21",), "mxnet": ("1.9",)}


_LAUNCHER = "this is part of Horovod's launcher; start jobs with horovodrun or horovod.run"
_NATIVE = "no extension is compiled; its functions are those of horovod.torch, horovod.tensorflow or horovod.mxnet"
_PRIVATE = "this is private to Horovod; use the public names of horovod.tensorflow, horovod.keras or horovod.ray"
_SPARK = "this is private to Horovod; use the public names of horovod.spark, horovod.spark.torch or horovod.spark.keras"
_LIGHTNING = "use horovod.spark.torch, or elastic.integrations.lightning in a function under horovod.spark.run_elastic"
# Modules of Horovod 0.28.1 that this package does not provide, and their alternatives. Importing their submodules fails
# as well.
INTERNALS = {
    **dict.fromkeys(
        [
            *("runner.driver", "runner.gloo_run", "runner.http", "runner.js_run", "runner.mpi_run"),
            *("runner.run_task", "runner.task", "runner.task_fn", "runner.util"),
            *("runner.common.service.driver_service", "runner.common.service.task_service"),
            *("runner.common.util.address", "runner.common.util.codec"),
            *("runner.common.util.config_parser", "runner.common.util.host_hash"),
            *("runner.common.util.hosts", "runner.common.util.network"),
            *("runner.common.util.safe_shell_exec", "runner.common.util.settings"),
            *("runner.common.util.tiny_shell_exec", "runner.elastic.constants"),
            *("runner.elastic.driver", "runner.elastic.registration"),
            *("runner.elastic.rendezvous", "runner.elastic.settings"),
        ],
        _LAUNCHER,
    ),
    **dict.fromkeys(
        [
            *("common.basics", "mxnet.mpi_lib", "tensorflow.mpi_lib"),
            *("torch.mpi_lib", "torch.mpi_lib_v2"),
        ],
        _NATIVE,
    ),
    **dict.fromkeys(
        [
            *("_keras", "ray.adapter", "ray.driver_service"),
            *("tensorflow.gradient_aggregation_eager", "tensorflow.util"),
        ],
        _PRIVATE,
    ),
    **dict.fromkeys(
        [
            *("spark.common._namedtuple_fix", "spark.common.cache", "spark.common.constants"),
            *("spark.common.datamodule", "spark.common.serialization", "spark.common.util"),
            *("spark.conf", "spark.data_loaders", "spark.driver", "spark.gloo_run"),
            *("spark.keras.bare", "spark.keras.datamodule", "spark.keras.optimizer"),
            *("spark.keras.remote", "spark.keras.tensorflow", "spark.keras.util"),
            *("spark.mpi_run", "spark.task.gloo_exec_fn", "spark.task.mpirun_exec_fn"),
            *("spark.task.task_info", "spark.task.task_service", "spark.tensorflow"),
            *("spark.torch.datamodule", "spark.torch.remote", "spark.torch.util"),
        ],
        _SPARK,
    ),
    "spark.lightning": _LIGHTNING,
}


def refuse(front_end: str, instead: str) -> ImportError:
    """Return the error for the import of a front end that does not exist.

    The error is an ImportError, because scripts that try several front ends catch ImportError.
    """
    return ImportError(
        f"horovod.{front_end} is not provided by hvd-elastic, which trains models of PyTorch, TensorFlow,"
        f" Keras and MXNet; {instead}",
        name=f"horovod.{front_end}",
    )


class UnavailableModules(MetaPathFinder, Loader):
    """Module finder that refuses to load the modules in INTERNALS."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, rest = fullname.partition(".")
        known = package == "horovod" and rest in INTERNALS
        return ModuleSpec(fullname, self) if known else None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Raise an ImportError that names the alternative to the Horovod module ``spec.name``."""
        name = spec.name.partition(".")[2]
        raise refuse(name, INTERNALS[name])

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing. Required by the loader interface, but never called, because `create_module` raises an error."""


def refuse_internals() -> None:
    """Add a finder that refuses to load INTERNALS and names alternatives. It is consulted after all other finders."""
    if not any(isinstance(finder, UnavailableModules) for finder in sys.meta_path):
        sys.meta_path.append(UnavailableModules())


def need_keras(front_end: str) -> None:
    """Import the Keras package that this process uses. See `need`."""
    from elastic.rendezvous import worker_settings

    need("tf_keras" if worker_settings.legacy_keras() else "keras", front_end)


def need(package: str, front_end: str) -> None:
    """Import a framework, and warn if its release was not tested.

    Raises:
        ImportError: the framework is missing; the message names the extra to install.
    """
    try:
        module = importlib.import_module(package)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != package:
            raise
        what = "tf-keras" if package == "tf_keras" else f"'hvd-elastic[{package}]'"
        raise ImportError(
            f"{front_end} needs {package}, which is not installed: run pip install {what}",
            name=package,
        ) from error
    version = str(module.__version__)
    if not any(version.startswith(f"{series}.") for series in TESTED[package]):
        warnings.warn(
            f"{front_end} was tested with {package} {', '.join(TESTED[package])}, but {version} is installed",
            stacklevel=3,
        )
