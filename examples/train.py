"""Two minutes of trouble: four workers train a small GPT, one is killed, its slot comes back, a fifth slot is added.

    make train                                # or: python examples/train.py --out out

Starts elasticrun with examples/gpt.py and does to it from outside what a cluster does: at a third of the run SIGKILLs a
worker, at two thirds makes host discovery list one more slot. Ends with what happened, as `elasticrun explain` says it,
and OUT/report.html.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console

import journal

HERE = Path(__file__).parent
console = Console(highlight=False)


def main() -> int:
    args = arguments()
    hosts = prepare(args.out)
    job = subprocess.Popen(command(args, hosts))
    try:
        trouble(job, args, hosts)
        code = job.wait()
    except KeyboardInterrupt:
        code = stop(job)  # the job got Ctrl-C too, and ends by itself
    except BaseException:
        job.terminate()
        stop(job)
        raise
    if code == 0:
        explained = [*journal.elasticrun(), "explain", str(args.out / "journal.jsonl")]
        subprocess.run(explained, check=True)
        console.print(f"\nThe report: {args.out / 'report.html'}")
    return code


def prepare(out: Path) -> Path:
    """An empty folder for the run, with a discovery script that prints the file this returns."""
    out.mkdir(parents=True, exist_ok=True)
    for name in ("metrics.jsonl", "journal.jsonl", "report.html"):
        (out / name).unlink(missing_ok=True)
    hosts = out.resolve() / "hosts"
    hosts.write_text("localhost:4\n")
    script = out / "discover.sh"
    script.write_text(f"#!/bin/sh\ncat {shlex.quote(str(hosts))}\n")
    script.chmod(0o755)
    return hosts


def command(args: argparse.Namespace, hosts: Path) -> list[str]:
    out: Path = args.out
    return [
        *journal.elasticrun(),
        *("-np", "4", "--min-np", "2", "--max-np", "5"),
        *("--host-discovery-script", str(hosts.with_name("discover.sh"))),
        *("--journal", str(out / "journal.jsonl"), "--report", str(out / "report.html")),
        *(sys.executable, str(HERE / "gpt.py"), "--out", str(out), "--steps", str(args.steps)),
    ]


def trouble(job: subprocess.Popen[bytes], args: argparse.Namespace, hosts: Path) -> None:
    """Returns when both have happened, or the job has ended."""
    if not reached(args.steps // 3, job, args.out):
        return
    pids = journal.pids(args.out / "journal.jsonl")
    rank = min(args.kill_rank, len(pids) - 1)
    announce(f"SIGKILL to rank {rank} of {len(pids)}, process {pids[rank]}; its slot may come back")
    os.kill(pids[rank], signal.SIGKILL)
    if not reached(2 * args.steps // 3, job, args.out):
        return
    announce("host discovery lists a fifth slot from now on")
    fresh = hosts.with_suffix(".new")
    fresh.write_text("localhost:5\n")
    fresh.replace(hosts)  # at once: the script never sees half a file


def reached(step: int, job: subprocess.Popen[bytes], out: Path) -> bool:
    """Waits until the training has come so far; False if it ended first."""
    while job.poll() is None:
        steps = [line["step"] for line in journal.lines(out / "metrics.jsonl") if "step" in line]
        if steps and steps[-1] >= step:
            return True
        time.sleep(0.1)
    return False


def stop(job: subprocess.Popen[bytes]) -> int:
    """Gives the job a while to end by itself."""
    try:
        return job.wait(timeout=30)
    except subprocess.TimeoutExpired:
        job.kill()
        return job.wait()


def announce(text: str) -> None:
    console.print(f"[bold yellow]>>> {text}[/]")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument(
        "--kill-rank", type=int, default=0, help="rank 0 is a worker like any other"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
