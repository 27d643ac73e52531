"""Time until a group of all ranks exists and its first allreduce is complete, created by this package and by torch.

    python benchmarks/regroup.py [--ranks 2 4 8] [--rounds 20] [--json FILE]

Ways, in turns in the same processes:

- the group of this package: shared memory on one host, and Gloo, as between hosts
- a new ``ProcessGroupGloo`` of torch, whose ranks meet in a TCPStore
- ``reconfigure`` of an existing ``ProcessGroupGloo`` (torch 2.14 or later; else left out), with handles that the ranks
  exchange through the store of this package

The slowest rank counts. The previous group is closed before the time begins.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch._C import _distributed_c10d as c10d

import groups
import results_output
from elastic.collectives.groups.group_factory import ConnectingGroup
from elastic.collectives.interface import Op
from elastic.protocol.messages import Address
from elastic.rendezvous.store import Store, listen
from harness.ports import free_ports
from measurements import order, ratio, spread

SHARED, GLOO, NEW, AGAIN = "shared memory", "Gloo", "torch: new group", "torch: reconfigure"
HOST = "127.0.0.1"
TIMEOUT_S = 30.0
TIMEOUT = timedelta(seconds=TIMEOUT_S)
WARM = 2  # rounds that are not counted


class Ways:
    """The ways of one rank. Each creates a group, reduces a tensor, and returns what closes the group."""

    def __init__(self) -> None:
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        ports = torch.tensor(free_ports(2), dtype=torch.int64, device="cpu")
        distributed.broadcast(ports, 0)
        ours, torchs = ports.tolist()
        listener = listen(HOST, ours) if self.rank == 0 else None
        self._store = Store(Address(HOST, ours), listener, TIMEOUT_S)
        self._store.open()
        self._torchs = c10d.TCPStore(
            HOST, torchs, self.size, is_master=self.rank == 0, timeout=TIMEOUT
        )
        self._groups = 0
        self.all: dict[str, Callable[[], Callable[[], None]]] = {
            SHARED: lambda: self._ours(native=True),
            GLOO: lambda: self._ours(native=False),
            NEW: self._new,
        }
        if hasattr(c10d, "ReconfigureOptions"):
            self._kept = self._torch_group("kept", reconfigurable=True)
            self.all[AGAIN] = self._again

    def run(self, way: str) -> float:
        """Return the seconds that the slowest rank needs."""
        self._groups += 1
        distributed.barrier()
        began = time.perf_counter()
        close = self.all[way]()
        took = torch.tensor([time.perf_counter() - began], dtype=torch.float64, device="cpu")
        distributed.all_reduce(took, distributed.ReduceOp.MAX)
        close()
        return float(took)

    def _ours(self, *, native: bool) -> Callable[[], None]:
        connecting = ConnectingGroup(
            self._store,
            purpose=f"regroup {self._groups}",
            rank=self.rank,
            size=self.size,
            device_type="cpu",
            bind_host=HOST,
            timeout_s=TIMEOUT_S,
            native=native,
            apart=not native,
        )
        group = connecting.connect()
        summed = self._summand()
        group.allreduce(summed, Op.SUM).wait()
        self._check(summed)
        return connecting.abort

    def _new(self) -> Callable[[], None]:
        held = [self._torch_group(str(self._groups))]
        self._reduce(held[0])
        return held.clear

    def _again(self) -> Callable[[], None]:
        handle = self._kept.get_reconfigure_handle().encode()
        handles = self._store.exchange(f"handles {self._groups}", self.rank, self.size, handle)
        options: Any = c10d.ReconfigureOptions()  # type: ignore[attr-defined] # since torch 2.14
        options.uuid, options.timeout = self._groups, TIMEOUT
        options.handles = [each.decode() for each in handles]
        self._kept.reconfigure(options).wait()
        self._reduce(self._kept)
        return lambda: None

    def _torch_group(self, name: str, *, reconfigurable: bool = False) -> Any:
        gloo: Any = c10d.ProcessGroupGloo  # torch's stubs lack these options
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=HOST, lazy_init=False)]
        options._threads = 2
        options._timeout = TIMEOUT
        if reconfigurable:
            options.enable_reconfigure = True
        return gloo(c10d.PrefixStore(name, self._torchs), self.rank, self.size, options)

    def _reduce(self, group: Any) -> None:
        summed = self._summand()
        group.allreduce([summed]).wait()
        self._check(summed)

    def _summand(self) -> torch.Tensor:
        return torch.full((1,), self.rank + 1.0, dtype=torch.float32, device="cpu")

    def _check(self, summed: torch.Tensor) -> None:
        wanted = self.size * (self.size + 1) / 2
        if float(summed) != wanted:
            raise groups.WrongResult(
                f"the first allreduce returned {float(summed)} instead of {wanted}"
            )


def measure(rounds: int) -> dict[str, list[float]]:
    ways = Ways()
    found: dict[str, list[float]] = {way: [] for way in ways.all}
    for turn in range(WARM + rounds):
        for way in order([*ways.all], turn):
            took = ways.run(way)
            if turn >= WARM:
                found[way].append(took * 1e3)
    return found


def main() -> None:
    parser = results_output.options_of(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    console = results_output.console()
    table = results_output.table(
        "time until the first allreduce is complete, ms", "", "ranks", "time", f"to {GLOO}"
    )
    figures = {}
    for ranks in options.ranks:
        found = groups.ask(measure, ranks, options.rounds)
        figures[str(ranks)] = found
        for way, times in found.items():
            against = ratio(times, found[GLOO]).text()
            table.add_row(way, str(ranks), spread(times).text(1), against)
    console.print(table)
    results_output.write_json(options.json, figures)


if __name__ == "__main__":
    main()
