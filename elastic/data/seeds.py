"""Seeds that depend only on the sample or batch that is loaded, and not on the process or rank that loads it.

Pure: no I/O, no clock.
"""

from __future__ import annotations

import hashlib


def seed_of(purpose: str, *numbers: int) -> int:
    """Return a 64-bit hash, as in ``seed_of("sample", seed, epoch, index)``.

    The result is the same in every process and version. The hash is BLAKE2b (RFC 7693) of the arguments, joined by
    commas.
    """
    text = ",".join((purpose, *map(str, numbers)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def sample_seed(seed: int, epoch: int, index: int) -> int:
    """Return the 64-bit seed for loading one sample.

    Args:
        seed: seed of the loader.
        epoch: number of the epoch, from 0.
        index: index of the sample in the dataset.
    """
    return seed_of("sample", seed, epoch, index)


def batch_seed(seed: int, epoch: int, start: int, part: int) -> int:
    """Return the seed for a part of the step that starts at position ``start`` of an epoch."""
    return seed_of("batch", seed, epoch, start, part)
