"""Gain of reducing on each host first, compared with Gloo over all ranks, between hosts with slow links.

    python benchmarks/hierarchy.py [--hosts 4] [--workers 2] [--rate 1gbit] [--sizes-mb 1 10 100] [--orders hosts dealt]
        [--congestion reno]

Hosts are network namespaces on one switch, and each link has a limited rate in each direction. Requires root.
hvd-elastic's group and torch's ProcessGroupGloo with its defaults alternate in the same processes. Ranks are numbered
host by host, as in a new job; or round-robin over the hosts, as happens after workers have joined and left.

The bound of the links counts bytes only. In a ring of n each rank sends 2 (n-1)/n times the size of the tensor. In our
group only hosts are in the ring, so that much leaves each host. Gloo's ring has all ranks in it: numbered host by host,
one rank of each host sends to another host, so it also fills every link once, and 4 hosts of 2 ranks can gain at most
1.17 by bytes; round-robin, all ranks do, and the gain can be 2.33. Further gains are fewer messages, and fewer bytes
that this machine's few cores must push through sockets. A link passes at once what it would send in 4 ms, so that short
messages can be faster than its rate.

TCP's congestion control is reno, which every kernel allows here, whatever this machine uses: bbr takes the short bursts
of two lanes on one link for a slow link, and sends every fifth 1 MB so slowly that it takes 50 to 100 ms. Both variants
must first compute a correct sum.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import distributed

import groups
import results_output
import tests_on_path  # noqa: F401
from allreduce import gloo_sum, torchs
from elastic.collectives.shared_memory import arena
from elastic.errors import Invalid
from measurements import Mark, Spread, ratio, size_text, spread
from stress.hosts.namespaces import Network, check_possible

MB = 1 << 20
ORDERS = {"hosts": "host by host", "dealt": "dealt out"}
WANTED = 1.5  # limit: factor compared with all ranks at once
OURS_PORT, TORCHS_PORT = 29610, 29611  # ports on the first host, where all ports are free
LONGEST_S = 900.0
# of the network namespace of the process that opens it
CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")
# Otherwise, torch warns for every connection that the address has no name.
QUIET = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}
BITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


@dataclass(frozen=True)
class Answer:
    order: str
    size: int
    carried_by: str  # our group's backend
    ours_ms: Spread
    flat_ms: Spread
    times: Spread  # flat / ours, by rounds
    ours_bound_ms: float
    flat_bound_ms: float


def bound_s(parts: int, size: int, bits_per_s: float) -> float:
    """Return the minimum time, by bytes, of a ring of ``parts`` members with a separate link each."""
    return 2 * (parts - 1) / parts * size * 8 / bits_per_s


def host_of(rank: int, order: str, hosts: int, workers: int) -> int:
    return rank // workers if order == "hosts" else rank % hosts


def leaving(hosts_of_ranks: Sequence[int]) -> int:
    """Return the number of ranks of the host with the most that send to another host if all are in one ring."""
    following = [*hosts_of_ranks[1:], hosts_of_ranks[0]]
    pairs = zip(hosts_of_ranks, following, strict=True)
    counts = Counter(host for host, after in pairs if host != after)
    return max(counts.values(), default=0)


def bits_per_s(rate: str) -> float:
    return int(rate[:-4]) * BITS[rate[-4:]]


# ---- in each rank --------------------------------------------------------------------------------


def measure(sizes: list[int], rounds: int) -> list[dict[str, Any]]:
    group = groups.ours()
    reduce, flat = groups.sum_with(group), gloo_sum(torchs())
    answers = []
    for size in sizes:
        mine, theirs = arena.zeros(size // 4, torch.float32), torch.zeros(size // 4)
        groups.prove(reduce, mine)
        groups.prove(flat, theirs)
        ways = {"ours": _call(reduce, mine), "flat": _call(flat, theirs)}
        times = groups.take_turns(ways, rounds, warmup=1, repeats=5 if size <= MB else 1)
        groups.prove(reduce, mine)  # still correct afterwards
        answers.append(
            {
                "size": size,
                "carried_by": groups.named(group),
                "ours": times["ours"],
                "flat": times["flat"],
            }
        )
    return answers


def _call(reduce: Any, tensor: torch.Tensor) -> Any:
    return lambda: reduce(tensor)


def work(given: dict[str, Any]) -> None:
    """Run one process on one of the hosts."""
    CONGESTION.write_text(given["congestion"])
    meeting = groups.Meeting(given["first"], OURS_PORT, TORCHS_PORT)
    groups.enter(given["rank"], given["ranks"], meeting, {"ELASTIC_BIND": given["address"]})
    answers = measure(given["sizes"], given["rounds"])
    if distributed.get_rank() == 0:
        Path(given["out"]).write_text(json.dumps(answers))
    groups.leave()


# ---- the hosts -----------------------------------------------------------------------------------


def ask(
    order: str, hosts: int, workers: int, rate: str, sizes: list[int], rounds: int, congestion: str
) -> list[dict[str, Any]]:
    names = [f"h{number}" for number in range(1, hosts + 1)]
    with tempfile.TemporaryDirectory(prefix="hierarchy-") as text:
        folder = Path(text)
        with Network(names, folder) as network:
            for name in names:
                network.slow(name, rate)
            given = {
                "first": network.hosts[names[0]].address,
                "ranks": hosts * workers,
                "sizes": sizes,
                "rounds": rounds,
                "congestion": congestion,
                "out": str(folder / "answer.json"),
            }
            processes = []
            for rank in range(hosts * workers):
                host = network.hosts[names[host_of(rank, order, hosts, workers)]]
                arguments = json.dumps({**given, "rank": rank, "address": host.address})
                words = [sys.executable, __file__, "--work", arguments]
                processes.append(host.popen(words, env=QUIET))
            wait(processes)
            found: list[dict[str, Any]] = json.loads((folder / "answer.json").read_text())
            return found


def wait(processes: list[subprocess.Popen[bytes]]) -> None:
    """Wait until all processes have ended. Ends the benchmark if one fails, or at the deadline; closing the network
    ends the others."""
    deadline = time.monotonic() + LONGEST_S
    while any(process.poll() is None for process in processes):
        failed = [rank for rank, process in enumerate(processes) if process.poll()]
        if failed:
            time.sleep(1.0)  # gives the other ranks time to report their errors
            raise SystemExit(f"rank {failed[0]} failed: see its output above")
        if time.monotonic() > deadline:
            raise SystemExit(f"the ranks did not exit within {LONGEST_S:g} s")
        time.sleep(0.1)
    if any(process.returncode for process in processes):
        raise SystemExit("a rank failed: see its output above")


def answers_of(
    found: list[dict[str, Any]], order: str, hosts: int, workers: int, rate: str
) -> list[Answer]:
    speed, ranks = bits_per_s(rate), hosts * workers
    crossings = leaving([host_of(rank, order, hosts, workers) for rank in range(ranks)])
    return [
        Answer(
            order=order,
            size=each["size"],
            carried_by=each["carried_by"],
            ours_ms=spread(each["ours"]).times(1e3),
            flat_ms=spread(each["flat"]).times(1e3),
            times=ratio(each["flat"], each["ours"]),
            ours_bound_ms=bound_s(hosts, each["size"], speed) * 1e3,
            flat_bound_ms=bound_s(ranks, crossings * each["size"], speed) * 1e3,
        )
        for each in found
    ]


def table(answers: list[Answer], title: str) -> Table:
    headings = ("ranks", "size", "carried by", "ours, ms", "links allow", "flat Gloo, ms")
    found = results_output.table(title, *headings, "links allow its ring", "flat / ours")
    for answer in answers:
        found.add_row(
            ORDERS[answer.order],
            size_text(answer.size),
            answer.carried_by,
            answer.ours_ms.text(1),
            f"{answer.ours_bound_ms:.1f}",
            answer.flat_ms.text(1),
            f"{answer.flat_bound_ms:.1f}",
            answer.times.text(),
        )
    return found


def main() -> None:
    parser = results_output.options_of(__doc__)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2, help="of each host")
    parser.add_argument("--orders", nargs="+", choices=ORDERS, default=[*ORDERS], help="of ranks")
    parser.add_argument("--rate", default="1gbit", help="of each link, as in 100mbit")
    parser.add_argument(
        "--congestion", default="reno", help="TCP's congestion control in the hosts"
    )
    parser.add_argument("--sizes-mb", type=float, nargs="+", default=[1.0, 10.0, 100.0])
    parser.add_argument("--rounds", type=int, default=15, help="of each way, for each size")
    parser.add_argument("--work", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work is not None:
        work(options.work)
        return
    try:
        check_possible()
    except Invalid as error:
        print(f"skipped: {error}")
        return
    sizes = [int(size * MB) for size in options.sizes_mb]
    answers = []
    for order in options.orders:
        job = (order, options.hosts, options.workers, options.rate)
        answers += answers_of(ask(*job, sizes, options.rounds, options.congestion), *job)
    console = results_output.console()
    title = f"{options.hosts} hosts with {options.workers} workers each, links of {options.rate}"
    title += f", {options.congestion}"
    console.print(table(answers, f"{title}, {options.rounds} rounds: median (quartiles)"))
    marks = [
        Mark(
            f"{size_text(each.size)}, ranks {ORDERS[each.order]}, times as fast as flat",
            WANTED,
            each.times.median,
            at_least=True,
        )
        for each in answers
    ]
    results_output.conclude(console, options.json, {"answers": answers}, marks)


if __name__ == "__main__":
    main()
