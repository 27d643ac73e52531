"""The sentence for front ends of Horovod that are not provided here. Importing one of them raises it."""

from __future__ import annotations


def refuse(front_end: str, instead: str) -> ImportError:
    """The error to raise: an ImportError, which scripts that try several front ends expect."""
    return ImportError(
        f"horovod.{front_end} is not provided by hvd-elastic, which trains PyTorch models only; {instead}",
        name=f"horovod.{front_end}",
    )
