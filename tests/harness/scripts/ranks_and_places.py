"""Every rank prints its place, from the library and from the environment, and takes part in a collective."""

from __future__ import annotations

import json
import os
from pathlib import Path

import light  # type: ignore[import-not-found]  # noqa: F401
import torch

import elastic

QUERIES = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")


def main() -> None:
    elastic.init()
    total = elastic.allreduce(torch.tensor([float(elastic.rank())]), op=elastic.Sum, name="ranks")
    seen = {query: getattr(elastic, query)() for query in QUERIES}
    told = {query: int(os.environ[f"HOROVOD_{query.upper()}"]) for query in QUERIES}
    more = {
        "sum": float(total),
        "host": os.environ["HOROVOD_HOSTNAME"],
        "homogeneous": elastic.is_homogeneous(),
        "secret in arguments": os.environ["ELASTIC_SECRET"]
        in Path("/proc/self/cmdline").read_text(),
    }
    print("place", json.dumps({"seen": seen, "told": told} | more), flush=True)
    elastic.shutdown()


if __name__ == "__main__":
    main()
