"""Dataset of samples stored in several files, of which one is read at a time."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, islice
from typing import Any

import torch
from torch.utils.data import Dataset

from elastic.data.sample_order import kept, sequential, shuffled
from elastic.errors import Invalid


class ShardedFiles(Dataset[Any]):
    """Map-style dataset of the samples in several files, one file after another.

    ``read(file)`` returns the samples of a file: an indexable object (a memory map, a Parquet row group, an array), or
    an iterable, which is read forward from its start. A loader with ``shuffle`` shuffles the files, and the samples
    within each file that can be indexed. Each process keeps one file open.

    Args:
        lengths: number of samples of each file. If omitted, every file is read once to count its samples.

    Raises:
        Invalid: a file has no samples, or the lengths do not match the files.
    """

    def __init__(
        self, files: Sequence[Any], read: Callable[[Any], Any], lengths: Sequence[int] | None = None
    ) -> None:
        if not files:
            raise Invalid("the list of files is empty: pass at least one file")
        if lengths is None:
            lengths = [_length(read(file)) for file in files]
        if len(lengths) != len(files):
            raise Invalid(
                f"the number of lengths ({len(lengths)}) differs from the number of files ({len(files)}): pass"
                " one length per file"
            )
        self.files = list(files)
        self.lengths = [int(length) for length in lengths]
        self._read = read
        self._ends = list(accumulate(self.lengths))
        self._indexed: bool | None = None
        # number of the open file, its samples, and the index of the next sample to read
        self._open: tuple[int, Any, int] | None = None

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(
                f"sample {index} is out of range: pass an index from 0 to {len(self) - 1}"
            )
        number = bisect_right(self._ends, index)
        place = index - (self._ends[number] - self.lengths[number])
        if self.indexed:
            return self._file(number, 0)[1][place]
        samples = self._forward(number, place)
        sample = next(samples, END)
        if sample is END:
            self._open = None
            raise Invalid(
                f"file {self.files[number]} ends before sample {place}, but its length was given as"
                f" {self.lengths[number]}: pass the actual lengths of the files"
            )
        self._open = (number, samples, place + 1)
        return sample

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": None}

    @property
    def indexed(self) -> bool:
        """Whether the samples of a file can be read in any order."""
        if self._indexed is None:
            self._indexed = hasattr(self._opened(0), "__getitem__")
        return self._indexed

    def epoch_order(self, seed: int, epoch: int) -> Any:
        """Return the shuffled order of an epoch's samples, file by file.

        Args:
            seed, epoch: seed of the loader, and number of the epoch. Equal values give equal orders on every rank.

        Returns:
            An int64 array of shape ``[samples]`` with the index of each sample.
        """
        pieces = []
        for number in shuffled(len(self.files), seed, epoch).tolist():
            length = self.lengths[number]
            within = shuffled(length, seed + number, epoch) if self.indexed else sequential(length)
            pieces.append(within + (self._ends[number] - length))
        return torch.cat(pieces).numpy()

    def _opened(self, number: int) -> Any:
        # `kept` restores the random generators, so that a sample draws the same numbers in every process, regardless of
        # skipped samples.
        with kept():
            return self._read(self.files[number])

    def _forward(self, number: int, place: int) -> Iterator[Any]:
        _, samples, following = self._file(number, place)
        if place > following:
            with kept():
                deque(islice(samples, place - following), maxlen=0)
        return iter(samples)

    def _file(self, number: int, place: int) -> tuple[int, Any, int]:
        if self._open is None or self._open[0] != number or self._open[2] > place:
            samples = self._opened(number)
            self._open = (number, samples if self.indexed else iter(samples), 0)
        return self._open


END = object()


def _length(samples: Any) -> int:
    return len(samples) if hasattr(samples, "__len__") else sum(1 for _ in samples)
