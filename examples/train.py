"""Train a small GPT under faults: one of four workers is killed and replaced, and later a fifth slot is added.

    make train                                # or: python examples/train.py --out out

The script starts elasticrun with examples/gpt.py and injects faults from outside. After a third of the steps, it kills
a worker with SIGKILL. After two thirds, host discovery lists another slot. At the end, the script prints the output of
`elasticrun explain`. The report is OUT/report.html.
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
        code = stop(job)  # the job also received Ctrl-C and ends by itself
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
    """Create an empty folder for the run, and a discovery script that prints the returned file."""
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
    """Inject both faults and return afterwards, or at the end of the job."""
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
    fresh.replace(hosts)  # atomic: the script never reads half a file


def reached(step: int, job: subprocess.Popen[bytes], out: Path) -> bool:
    """Wait until the training has reached a step and return False if it ended first."""
    while job.poll() is None:
        steps = [line["step"] for line in journal.lines(out / "metrics.jsonl") if "step" in line]
        if steps and steps[-1] >= step:
            return True
        time.sleep(0.1)
    return False


def stop(job: subprocess.Popen[bytes]) -> int:
    """Give the job some time to end by itself."""
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
