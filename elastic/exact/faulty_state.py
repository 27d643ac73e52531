"""Save the state with which a rank computed wrong gradients, as evidence for the hardware vendor."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from elastic.exact import arithmetic_probe
from elastic.protocol.messages import Miscomputed

log = logging.getLogger("elastic.exact")


def save(
    folder: str, evidence: Miscomputed, rank: int, seed: int, parts: Sequence[dict[str, Any]]
) -> None:
    """Save the state of one rank to a file that ``torch.load(path, weights_only=True)`` can read.

    The file is ``step-S-shard-K-rank-R.pt``. If the file cannot be written, the error is logged and training continues.

    Args:
        folder: folder of the file. It is created if missing.
        evidence: the report of the wrong gradients.
        rank: the rank of this process. Its gradients were wrong, or were correct and are saved for comparison.
        seed: seed of the shards. The seed, the step and the shard together determine the random generators of the pass.
        parts: weights, buffers and digests of gradients, from the listeners of the shards.
    """
    path = Path(folder) / f"step-{evidence.step}-shard-{evidence.shard}-rank-{rank}.pt"
    state = {
        "evidence": msgspec.to_builtins(evidence),
        "rank": rank,
        "right": rank != evidence.rank,
        "seed": seed,
        "host": socket.gethostname(),
        "arithmetic": arithmetic_probe.lines(),
        "parts": list(parts),
    }
    incomplete = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, incomplete)
        os.replace(incomplete, path)
    except (OSError, RuntimeError) as error:  # torch's writer raises RuntimeError on a full disk.
        log.warning(
            "could not save the faulty state of rank %d: %s; check --keep-faulty", rank, error
        )
        with contextlib.suppress(OSError):
            incomplete.unlink()
        return
    log.warning("saved the faulty state of rank %d to %s", rank, path)
