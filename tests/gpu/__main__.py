"""Tests hvd-elastic on the GPUs of this machine, in ten minutes at most: `python -m tests.gpu --out DIR`.

Each case has a file DIR/NUMBER-NAME.json as soon as it is over, DIR/summary.json holds all of them, and a table is
printed at the end. A case that crashes or hangs is ended with all its processes, and the next one begins. Exit status:
0 where none failed, 1 where one did, 2 where nothing could be tried.

Needs an NVIDIA GPU, a torch built with CUDA, and what hvd-elastic needs; no network, and nothing installed of
hvd-elastic itself. NCCL 2.30 or newer lets two ranks share one GPU; with an older one, what takes two ranks is left
out, and said to be. --nccl names a newer libnccl.so.2.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
if str(ROOT / "tests") not in sys.path:
    sys.path.insert(0, str(ROOT / "tests"))

from gpu import listed, machine, running  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("out/gpu"), help="folder (%(default)s)")
    parser.add_argument("--cases", help="some only, by number or name: 1,4 or killed,frozen")
    parser.add_argument("--ranks", type=int, help="as many as there are GPUs; 2 unless given")
    parser.add_argument("--minutes", type=float, default=9.5, help="in all (%(default)s)")
    parser.add_argument("--nccl", type=Path, help="a libnccl.so.2 to use in place of torch's own")
    small = parser.add_mutually_exclusive_group()
    small.add_argument("--small", action="store_true", default=None, help="small models")
    small.add_argument("--large", dest="small", action="store_false", help="large ones")
    arguments = parser.parse_args()
    began = time.monotonic()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    absent = machine.missing()
    if absent:
        print(
            f"{sys.executable} can't import {', '.join(absent)}: install them, or name them in PYTHONPATH"
        )
        return 2
    if arguments.nccl:
        if not arguments.nccl.is_file():
            print(f"--nccl: there is no file {arguments.nccl}")
            return 2
        os.environ["LD_PRELOAD"] = str(arguments.nccl.resolve())
    try:
        cases = listed.chosen(arguments.cases)
        here = machine.look(arguments.ranks, arguments.small)
    except (ValueError, RuntimeError) as error:
        print(error)
        return 2
    if not here.gpus:
        print(f"torch {here.versions['torch']} of {sys.executable} finds no GPU: nothing was tried")
        return 2
    return running.run_all(cases, here, arguments.out, began + arguments.minutes * 60)


if __name__ == "__main__":
    sys.exit(main())
