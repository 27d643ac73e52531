"""Conversion of torchrun's flags to elasticrun's, with an explanation for each rejected flag.

Users start torchrun on every host, with flags that locate the other hosts. elasticrun is started once, and finds the
other hosts or starts agents on them. Flags that locate hosts are therefore rejected with an error that names the
equivalent.
"""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass
from typing import Any, TypeVar

from elastic.driver.commandline.options.argument_parser import Group, flag, switch, whole
from elastic.errors import Invalid

# class `Options` in `flags`, which contains the flags of this module
Options = TypeVar("Options", bound=Any)

_ELSEWHERE = (
    "elasticrun is started once, not on every host: omit it, and list the hosts with -H "
    "host1:4,host2:4, or run"
    " `elasticrun agent` on each of them and pass --etcd"
)
_OUTPUT = "omit it, and pass --output-filename DIR to write each worker's output to a file"
_NOTHING = "omit it; it has no equivalent here"
# Rejected flags of torchrun, each with whether it takes a value and with the remedy.
REFUSED: dict[str, tuple[bool, str]] = {
    "--node-rank --node_rank": (True, _ELSEWHERE),
    "--local-addr --local_addr": (True, "omit it, and pass --network-interface"),
    "--rdzv-conf --rdzv_conf": (
        True,
        "omit it, or limit the waits with --elastic-timeout and --start-timeout",
    ),
    "--run-path --run_path": (False, "omit it: it is `python -m runpy`"),
    "-r --redirects": (True, _OUTPUT),
    "-t --tee": (True, _OUTPUT),
    "--log-dir --log_dir": (True, _OUTPUT),
    "--local-ranks-filter --local_ranks_filter": (True, _OUTPUT),
    "--logs-specs --logs_specs": (True, _OUTPUT),
    "--logs_level --logs-level": (True, "omit it, and pass --log-level"),
    "--duplicate-stdout-filters --duplicate_stdout_filters": (True, _OUTPUT),
    "--duplicate-stderr-filters --duplicate_stderr_filters": (True, _OUTPUT),
    "--event-log-handler --event_log_handler": (
        True,
        "omit it, and pass --journal or --metrics-port",
    ),
    "--monitor-interval --monitor_interval": (True, "omit it: exits are detected immediately"),
    "--start-method --start_method": (True, _NOTHING),
    "--role": (True, _NOTHING),
    "--numa-binding --numa_binding": (True, "omit it, and start the script with numactl"),
    "--signals-to-handle --signals_to_handle": (True, _NOTHING),
    "--shutdown-timeout --shutdown_timeout": (True, _NOTHING),
    "--virtual-local-rank --virtual_local_rank": (False, _NOTHING),
}
BACKENDS = ("elastic", "off")


def add_refused(add: Group) -> None:
    """Add torchrun's rejected flags, each with an error that explains the alternative."""
    for names, (valued, _) in REFUSED.items():
        rest: dict[str, Any] = {} if valued else {"nargs": 0}
        add(
            names,
            "X" if valued else None,
            str,
            argparse.SUPPRESS,
            action=_Refuse,
            dest=names,
            **rest,
        )


class _Refuse(argparse.Action):
    def __call__(self, parser: Any, options: Any, values: Any, option: str | None = None) -> None:
        raise Invalid(f"{option} of torchrun is not supported; {REFUSED[self.dest][1]}")


def _backend(text: str) -> str:
    if text not in BACKENDS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a supported backend: pass one of {', '.join(BACKENDS)}"
        )
    return text


def _per_host(text: str) -> str:
    if text not in ("auto", "gpu", "cpu") and not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a valid number of processes: pass a whole number of at least 1, auto, gpu or cpu"
        )
    return text


def _hosts(text: str) -> tuple[int, int]:
    least, _, most = text.partition(":")
    most = most or least
    if not (least.isdecimal() and most.isdecimal() and 0 < int(least) <= int(most)):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a valid number of hosts: pass a number, or a range such as 2:4"
        )
    return int(least), int(most)


@dataclass
class TorchrunFlags:
    """Flags for torch.distributed, and torchrun's own flags."""

    torch_backend: str | None = flag(
        "--torch-backend",
        "WHICH",
        "Backend of torch.distributed: elastic, or off for torch's own gloo and nccl (default:"
        " ELASTIC_TORCH_BACKEND, or elastic).",
        _backend,
        variable="ELASTIC_TORCH_BACKEND",
        keys=("torch.backend",),
    )
    nproc_per_node: str | None = flag(
        "--nproc-per-node --nproc_per_node",
        "N",
        "Workers per host: a number, cpu (cores), gpu (GPUs) or auto (GPUs, else cores).",
        _per_host,
    )
    nnodes: tuple[int, int] | None = flag(
        "--nnodes", "N[:M]", "Number of hosts, or a range N:M for an elastic job.", _hosts
    )
    standalone: bool = switch("--standalone", "Run on this host only.")
    max_restarts: int | None = flag(
        "--max-restarts --max_restarts",
        "N",
        "Same as --reset-limit; no effect in a job of fixed size.",
        whole(0),
    )
    rdzv_id: str | None = flag("--rdzv-id --rdzv_id", "NAME", "Same as --job.")
    rdzv_backend: str | None = flag(
        "--rdzv-backend --rdzv_backend",
        "WHICH",
        "Rendezvous backend: etcd or etcd-v2; c10d and static have no effect.",
    )
    rdzv_endpoint: str | None = flag(
        "--rdzv-endpoint --rdzv_endpoint",
        "HOST:PORT",
        "With --rdzv-backend etcd or etcd-v2: same as --etcd; otherwise no effect.",
    )
    master_addr: str | None = flag(
        "--master-addr --master_addr",
        "HOST",
        "MASTER_ADDR of the workers (default: the address of rank 0).",
    )
    master_port: int | None = flag(
        "--master-port --master_port",
        "PORT",
        "MASTER_PORT of the workers (default: a free port).",
        whole(1),
    )
    module: bool = switch("-m --module", "Run the program as a Python module.")
    no_python: bool = switch(
        "--no-python --no_python", "Run the program directly, without the Python interpreter."
    )


def translated(options: Options, cores: int, gpus: int) -> Options:
    """Replace torchrun's flags with the equivalent flags of elasticrun. Passed flags of elasticrun take precedence.

    Args:
        options: options as parsed.
        cores: number of cores of this host.
        gpus: number of GPUs of this host.

    Raises:
        Invalid: a flag of torchrun has no equivalent.
    """
    changes: dict[str, Any] = {}
    nodes = options.nnodes or (1, 1)
    several = nodes[1] > 1
    if options.standalone and several:
        raise Invalid(
            "--standalone uses a single host, but --nnodes specifies several hosts: keep only one of them"
        )
    if options.nproc_per_node is not None or options.nnodes is not None:
        changes |= _counted(options, nodes, _workers(options.nproc_per_node or "1", cores, gpus))
    elastic = nodes[0] < nodes[1] or options.min_num_proc is not None
    if elastic and options.max_restarts is not None:
        changes["reset_limit"] = _first(options.reset_limit, options.max_restarts)
    if options.rdzv_id is not None:
        changes["job_name"] = _first(options.job_name, options.rdzv_id)
    if options.rdzv_endpoint is not None or options.rdzv_backend is not None:
        changes |= _found(options, several)
    same: Options = dataclasses.replace(options, **changes)
    return same


def _counted(options: Any, nodes: tuple[int, int], each: int) -> dict[str, Any]:
    least, most = nodes
    if most > 1 and not _knows_hosts(options):
        raise Invalid(
            f"--nnodes {least if least == most else f'{least}:{most}'} needs several hosts, but none were given;"
            f" {_ELSEWHERE}"
        )
    changes = {
        "num_proc": _first(options.num_proc, each * least),
        "slots_per_host": _first(options.slots_per_host, each),
    }
    if least < most:
        changes["min_num_proc"] = _first(options.min_num_proc, each * least)
        changes["max_num_proc"] = _first(options.max_num_proc, each * most)
    return changes


def _workers(text: str, cores: int, gpus: int) -> int:
    if text == "gpu" and not gpus:
        raise Invalid(
            "--nproc-per-node gpu requires a GPU, but this host has none: pass a number, or cpu"
        )
    if text == "cpu" or (text == "auto" and not gpus):
        return cores
    return int(text) if text.isdecimal() else gpus


def _knows_hosts(options: Any) -> bool:
    by = (
        options.hosts,
        options.hostfile,
        options.host_discovery_script,
        options.etcd,
        options.rdzv_endpoint,
    )
    return options.kubernetes or options.slurm or options.kubernetes_service is not None or any(by)


def _found(options: Any, several: bool) -> dict[str, Any]:
    if (options.rdzv_backend or "").startswith("etcd"):
        if not options.rdzv_endpoint:
            raise Invalid(
                "--rdzv-backend etcd needs --rdzv-endpoint: pass etcd's address, or --etcd"
            )
        return {"etcd": _first(options.etcd, options.rdzv_endpoint)}
    if options.rdzv_backend not in (None, "c10d", "static"):
        raise Invalid(
            f"--rdzv-backend {options.rdzv_backend} is not supported: omit it, or pass --etcd"
        )
    if several and options.hosts is None and options.hostfile is None:
        raise Invalid(f"--rdzv-endpoint does not select the hosts; {_ELSEWHERE}")
    return {}


def _first(given: Any, otherwise: Any) -> Any:
    return otherwise if given is None else given
