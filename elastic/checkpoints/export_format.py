"""Format of exported checkpoints, chosen by the file name's suffix. Pure: no I/O, no clock."""

from __future__ import annotations

import enum
from pathlib import PurePath

from elastic.errors import Invalid


class ExportFormat(enum.Enum):
    """Format of an exported checkpoint. The values are the accepted suffixes."""

    TORCH = (".pt", ".pth", ".bin", ".ckpt")  # suffixes of files written by torch.save
    SAFETENSORS = (".safetensors",)


def format_of(file: str) -> ExportFormat:
    """Return the format in which to write a file.

    Raises:
        Invalid: the suffix is not supported.
    """
    suffix = PurePath(file).suffix
    for each in ExportFormat:
        if suffix.lower() in each.value:
            return each
    raise Invalid(
        f"{file} has {f'the suffix {suffix}' if suffix else 'no suffix'}, which does not select an export"
        f" format: use {', '.join(ExportFormat.TORCH.value)} for torch.load, or .safetensors"
    )
