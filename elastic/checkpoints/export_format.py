"""Format of an exported checkpoint, determined by the suffix of the file name. Pure: no I/O, no clock."""

from __future__ import annotations

import enum
from pathlib import PurePath

from elastic.errors import Invalid


class ExportFormat(enum.Enum):
    """Format of an exported checkpoint. The values are the accepted suffixes."""

    TORCH = (".pt", ".pth", ".bin", ".ckpt")  # file name suffixes for which torch.save is used
    SAFETENSORS = (".safetensors",)


def format_of(file: str) -> ExportFormat:
    """Return the format that the suffix of a file name selects.

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
