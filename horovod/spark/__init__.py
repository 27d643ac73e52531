"""Horovod's API for Spark, such as ``horovod.spark.run``.

Names are imported when they are first used. Importing this package starts nothing.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if find_spec("pyspark") is None:
    raise ImportError(
        "horovod.spark needs Spark: run pip install 'hvd-elastic[spark]', and install Java 17 or later",
        name="pyspark",
    )

if TYPE_CHECKING:
    from horovod.spark.runner import run as run
    from horovod.spark.runner import run_elastic as run_elastic

__all__ = ["run", "run_elastic"]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(
                f"module 'horovod.spark' has no attribute {name!r}: see dir(horovod.spark)"
            )
        from horovod.spark import runner

        return getattr(runner, name)
