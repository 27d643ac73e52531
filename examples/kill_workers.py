"""Start a script with elasticrun and kill random workers with SIGKILL.

    python examples/kill_workers.py -- python examples/digits.py
    python examples/kill_workers.py --every 2 --seed 7 --workers 4 -- python examples/digits.py

The script needs no changes. The exit code is that of the job.
"""

from __future__ import annotations

import argparse
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import journal


def main() -> int:
    args = arguments()
    chance = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        story = Path(folder) / "journal.jsonl"
        flags = f"-np {args.workers} --min-np 1 --blacklist-cooldown-range 0.5 2 --journal {shlex.quote(str(story))}"
        job = subprocess.Popen([*journal.elasticrun(), *shlex.split(flags), *args.command])
        kills = 0
        try:
            while job.poll() is None:
                due = time.monotonic() + chance.uniform(0.5, 1.5) * args.every
                while job.poll() is None and time.monotonic() < due:
                    time.sleep(0.05)
                kills += kill_one(journal.pids(story), chance)
        except KeyboardInterrupt:
            pass  # the job was also interrupted and ends by itself
        finally:
            code = finish(job)
        print(f"\n{kills} workers were killed; the job exited with {code}")
        return code


def kill_one(pids: list[int], chance: random.Random) -> int:
    """Kill a worker of a world of at least two and return the number of killed workers."""
    if len(pids) < 2:
        return 0
    rank = chance.randrange(len(pids))
    try:
        os.kill(pids[rank], signal.SIGKILL)
    except ProcessLookupError:
        return 0  # it has just ended
    print(f">>> killed rank {rank} of {len(pids)} (process {pids[rank]})", flush=True)
    return 1


def finish(job: subprocess.Popen[bytes]) -> int:
    """Return the exit code. A job that is still running was interrupted, and gets some time to end by itself."""
    try:
        return job.wait(timeout=30)
    except subprocess.TimeoutExpired:
        job.kill()
        return job.wait()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--every", type=float, default=3.0, help="mean seconds between two kills")
    parser.add_argument("--seed", type=int, default=0, help="which ranks, and when")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- program and its arguments")
    args = parser.parse_args()
    args.command = [word for word in args.command if word != "--"]
    if not args.command:
        parser.error("no program given, as in: -- python examples/digits.py")
    return args


if __name__ == "__main__":
    sys.exit(main())
