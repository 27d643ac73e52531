"""Records of a worker for the case that started it: a line of JSON each, on the clock of the whole machine."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch

WORKER = os.environ.get("ELASTIC_WORKER", "localhost:0#1")
SLOT, START = map(int, WORKER.rpartition(":")[2].split("#"))
SMALL = os.environ.get("SMALL") == "1"


def note(what: str, **fields: Any) -> None:
    """In one write, so that a line is whole or not there, whatever happens to the process next."""
    Path("notes").mkdir(exist_ok=True)
    line = json.dumps({"what": what, "worker": WORKER, "at": time.monotonic(), **fields})
    file = os.open(f"notes/{WORKER}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(file, line.encode() + b"\n")
    os.close(file)


def own_gpu(local_rank: int) -> torch.device:
    """Chooses it. Where ranks share GPUs, each has the one that is its turn."""
    torch.cuda.set_device(local_rank % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())
