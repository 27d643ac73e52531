"""The flags of elasticrun: names, types, help. Reads no file and no environment, and decides nothing.

The names are Horovod's, so that a horovodrun command line works unchanged. Horovod's flags for which there is nothing
here to set are accepted, but remembered, so that the caller can say so, and why.
"""

from __future__ import annotations

import argparse
import difflib
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic.driver.commandline.arguments import (
    LOG_LEVELS,
    Group,
    Names,
    Parser,
    WithoutMeaning,
    cores,
    log_level,
    number,
    seconds,
    whole,
)
from elastic.driver.commandline.multi_host_flags import (
    add_checkpoints,
    add_failover,
    add_preemption,
    add_security,
    add_several_hosts,
)
from elastic.driver.commandline.torchrun_flags import add_torchrun
from elastic.driver.settings import Settings
from elastic.errors import Invalid

DESCRIPTION = """\
Trains with PyTorch in several worker processes, and goes on when some are lost or others join."""

EXAMPLES = """\
examples:
  elasticrun -np 4 python train.py --lr 0.1
      four workers on this machine; the first that fails ends the job
  elasticrun -np 4 --min-np 2 --max-np 8 --host-discovery-script ./hosts.sh python train.py
      start with four, go on with as few as two, grow to as many as eight as the script lists more slots
  elasticrun -np 8 --min-np 4 -H gpu1:4,gpu2:4 --output-filename out python train.py
      two machines, reached over ssh; what each worker prints goes to out/rank.0/stdout and so on
  elasticrun -np 8 --min-np 4 --etcd etcd1:2379 --job bert --secret-file job.secret python train.py
      on every host on which `elasticrun agent` runs for this job, as they come and go
  elasticrun -np 4 --min-np 2 --journal job.journal --resume python train.py
      training outlives this driver; the same command again goes on with it

commands on a job that runs (elasticrun COMMAND --help):
  jobs, status, scale, drain, remove, stacks, logs, stop
afterwards, from the file of --journal, or from the folder of --checkpoint-dir:
  explain, replay; checkpoints
elsewhere:
  agent (one on each host, with --etcd); secret (makes the file of --secret-file); k8s (a job on Kubernetes)
"""


@dataclass
class Options:
    """Flags as given. None means not given, so that the file, the environment and the defaults can fill it in."""

    command: list[str] = field(default_factory=list)
    num_proc: int | None = None
    min_num_proc: int | None = None
    max_num_proc: int | None = None
    standbys: int | None = None
    hosts: str | None = None
    hostfile: str | None = None
    host_discovery_script: str | None = None
    slots_per_host: int | None = None
    start_timeout: float | None = None  # seconds
    elastic_timeout: float | None = None  # seconds
    reset_limit: int | None = None
    cooldown_range: Sequence[float] | None = None  # two numbers of seconds
    slot_attempts: int | None = None
    host_attempts: int | None = None
    output_filename: str | None = None
    prefix_output_with_timestamp: bool = False
    journal: str | None = None
    summary: bool = False
    report: str | None = None
    digests: bool = False
    allow_inexact: bool = False
    metrics_port: int | None = None
    metrics_host: str | None = None
    dashboard: str | None = None
    opentelemetry: bool = False
    log_level: str | None = None
    verbose: bool = False
    config_file: str | None = None
    network_interfaces: list[str] | None = None
    gloo_timeout_seconds: float | None = None
    lease: float | None = None  # seconds
    idle_timeout: float | None = None  # seconds; 0: never
    busy_warning: float | None = None  # seconds; 0: never
    busy_timeout: float | None = None  # seconds; 0: never
    gpu_hang_timeout: float | None = None  # seconds; 0: never
    stall_warning: float | None = None  # seconds; 0: never; stands in for busy_warning
    stall_shutdown: float | None = None  # seconds; 0: never; stands in for busy_timeout
    stall_check: bool | None = None
    fusion_threshold_mb: float | None = None
    cycle_time_ms: float | None = None
    cache_capacity: int | None = None
    thread_affinity: str | None = None  # numbers of cores with commas between them
    timeline_filename: str | None = None
    timeline_mark_cycles: bool | None = None
    log_timestamps: bool | None = None
    tcp: bool = False
    controller: str = "gloo"  # "mpi" and "jsrun" are there to be refused
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    ssh_config: str | None = None
    remote_python: str | None = None
    exported: list[str] | None = None  # names of variables
    job_name: str | None = None
    etcd: str | None = None
    etcd_user: str | None = None
    etcd_cert: str | None = None
    etcd_key: str | None = None
    etcd_ca: str | None = None
    kubernetes: bool = False
    kubernetes_selector: str | None = None
    kubernetes_namespace: str | None = None
    kubernetes_service: str | None = None
    secret_file: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_ca: str | None = None
    checkpoint_dir: str | None = None
    checkpoint_every: str | None = None
    checkpoint_keep: int | None = None
    begin_from: str | None = None
    restarts: int | None = None
    preemption: str | None = None
    preload: str | None = None
    resume: bool = False
    standby: bool = False
    fresh: bool = False
    torch_backend: str | None = None
    nproc_per_node: str | None = None  # a number, auto, gpu or cpu
    nnodes: tuple[int, int] | None = None
    standalone: bool = False
    max_restarts: int | None = None
    rdzv_id: str | None = None
    rdzv_backend: str | None = None
    rdzv_endpoint: str | None = None
    master_addr: str | None = None
    master_port: int | None = None
    module: bool = False
    no_python: bool = False
    driver_timeout: float | None = None  # seconds
    driver_port: int | None = None
    disable_cache: bool = False
    check_build: bool = False
    version: bool = False
    without_meaning: dict[str, bool] = field(default_factory=dict)  # flag -> switched on


def parse(arguments: Sequence[str]) -> Options:
    """The options of a command line without its program name. Raises Invalid; prints and exits for ``--help``."""
    known = parser()
    own, command = known.split(arguments)
    options = Options()
    _, unknown = known.parse_known_args(own, namespace=options)
    if unknown:
        flags = [name for action in known.actions for name in action.option_strings]
        near = difflib.get_close_matches(unknown[0].partition("=")[0], flags, n=1)
        hint = f"did you mean {near[0]}?" if near else "see elasticrun --help"
        raise Invalid(f"unknown flag {unknown[0]}; {hint}")
    options.command = command
    return options


def build_parser() -> Parser:
    """All flags, in groups."""
    parser = Parser(
        prog="elasticrun",
        usage="elasticrun [flags] program [arguments of the program]",
        description=DESCRIPTION,
        epilog=EXAMPLES,
    )
    _add_workers(parser.group("workers"))
    _add_hosts(
        parser.group(
            "hosts",
            "At most one of the first three; without any and without --etcd, this machine has as many"
            " slots as it needs,\n  up to 8 a core.",
        )
    )
    add_several_hosts(
        parser.group(
            "several hosts",
            "Hosts of a list that are not this machine are reached over ssh; those of --etcd run"
            "\n  the program `elasticrun agent`. See docs/many-hosts.md.",
        )
    )
    add_checkpoints(
        parser.group(
            "checkpoints",
            "What is committed outlives all workers, and the driver. See docs/checkpoints.md.",
        )
    )
    add_preemption(
        parser.group(
            "machines that go away",
            "Their workers leave before the end, and others take their places. See docs/spot.md.",
        )
    )
    add_failover(
        parser.group(
            "a driver that may die",
            "Workers then belong to agents that outlive it, and another driver goes on.",
        )
    )
    add_security(parser.group("security", "Every connection is authenticated; TLS also encrypts."))
    _add_communication(parser.group("communication"))
    _add_tuning(
        parser.group(
            "small tensors",
            "What is submitted together is negotiated and reduced together.",
        )
    )
    _add_detection(
        parser.group(
            "hung and slow workers",
            "They are named, then fenced: killed, so that the others go on. See docs/detection.md.",
        )
    )
    add_torchrun(
        parser.group(
            "torch.distributed, and torchrun's flags",
            "Scripts that torchrun starts run unedited. See docs/pytorch.md.",
        )
    )
    _add_output(parser.group("output"))
    _add_general(parser.group("general"))
    _add_without_meaning(
        parser.group(
            "accepted from Horovod, without meaning here",
            "A line at the start names those that were given, and says why.",
        )
    )
    return parser


parser = functools.cache(build_parser)


def _add_workers(add: Group) -> None:
    add("-np --num-proc", "N", whole(1), "Workers to start with (elastic: default --min-np).")
    add("--min-np --min-num-proc", "N", whole(1), "Elastic: go on with as few (default: -np).")
    add(
        "--max-np --max-num-proc",
        "N",
        whole(1),
        "Elastic: never use more workers (default: -np; where hosts come and go, as many as there are"
        " slots).",
    )
    add(
        "--standbys",
        "N",
        whole(0),
        "Elastic: keep N workers beyond --max-np in free slots, ready to take the place of one that is lost (default:"
        " ELASTIC_STANDBYS, or 0).",
        variable="ELASTIC_STANDBYS",
        keys=("standbys.count",),
    )
    add(
        "--elastic-timeout",
        "S",
        seconds,
        f"Give up after waiting this long for --min-np workers (default: {Settings.elastic_timeout_s:g}, or"
        " HOROVOD_ELASTIC_TIMEOUT).",
        variable="HOROVOD_ELASTIC_TIMEOUT",
    )
    add(
        "--start-timeout",
        "S",
        seconds,
        f"Give a worker this long from its start to hvd.init() (default: {Settings.start_timeout_s:g}, or"
        " HOROVOD_START_TIMEOUT).",
        variable="HOROVOD_START_TIMEOUT",
    )
    add(
        "--reset-limit",
        "N",
        whole(0),
        "Survive N failures, then end the job; planned changes do not count (default: no limit).",
    )
    add(
        "--blacklist-cooldown-range",
        ("MIN", "MAX"),
        seconds,
        "Use a slot again MIN seconds after its worker failed, doubling up to MAX (default:"
        f" {Settings.cooldown_min_s:g} {Settings.cooldown_max_s:g}).",
        dest="cooldown_range",
        nargs=2,
    )
    add(
        "--slot-attempts",
        "N",
        whole(1),
        "Give a slot up after N workers in a row died there before they trained (default:"
        f" {Settings.slot_attempts}).",
    )
    add(
        "--host-attempts",
        "N",
        whole(1),
        "Give a host up once N of its slots were given up (default: never).",
    )


def _add_hosts(add: Group) -> None:
    add("-H --hosts", "LIST", str, "Hosts and slots, as in gpu1:4,gpu2:4 or [::1]:2, each once.")
    add("-hostfile --hostfile", "FILE", str, "A file with one host a line, as in gpu1 slots=4.")
    add(
        "--host-discovery-script",
        "SCRIPT",
        str,
        "A program that is run every second and prints the hosts there are now, one host or"
        " host:slots a line.",
    )
    add("--slots-per-host", "N", whole(1), "Slots of a host listed without a number (default: 1).")
    add(
        "--network-interface --network-interfaces",
        "LIST",
        str,
        "Talk over the first of these that a host has: interfaces, networks or addresses, as in"
        " eth1,10.0.0.0/8,fd00::/8 (default: what leads to the other hosts; on one machine"
        " loopback).",
        action=Names,
        dest="network_interfaces",
    )


def _add_communication(add: Group) -> None:
    add(
        "--gloo", None, None, "Start workers without MPI, as is always done.", **_controller("gloo")
    )
    add("--mpi", None, None, "Refused: MPI does not start our workers.", **_controller("mpi"))
    add("--jsrun", None, None, "Refused: jsrun does not start our workers.", **_controller("jsrun"))
    add(
        "--gloo-timeout-seconds",
        "S",
        seconds,
        "End a collective that has waited this long, whoever is to blame (default:"
        " HOROVOD_GLOO_TIMEOUT_SECONDS, ELASTIC_COLLECTIVE_TIMEOUT, or --busy-timeout and a minute);"
        " also the time to connect (default: 30).",
        variable="HOROVOD_GLOO_TIMEOUT_SECONDS",
        keys=("library_options.gloo_timeout_seconds",),
    )
    add("--tcp", None, None, "Keep NCCL off InfiniBand (sets NCCL_IB_DISABLE=1).")


def _add_tuning(add: Group) -> None:
    add(
        "--fusion-threshold-mb",
        "MB",
        number,
        "Fuse small tensors into collectives of up to so many MiB; 0: never (default:"
        " HOROVOD_FUSION_THRESHOLD, in bytes, or 128).",
        keys=("params.fusion_threshold_mb",),
    )
    add(
        "--cycle-time-ms",
        "MS",
        number,
        "Wait this long for more to fuse before a round of negotiation (default:"
        " HOROVOD_CYCLE_TIME, or 1).",
        variable="HOROVOD_CYCLE_TIME",
        keys=("params.cycle_time_ms",),
    )
    add(
        "--cache-capacity",
        "N",
        whole(0),
        "Remember the negotiation of so many tensors; 0: of none (default:"
        " HOROVOD_CACHE_CAPACITY, or 1024).",
        variable="HOROVOD_CACHE_CAPACITY",
        keys=("params.cache_capacity",),
    )
    add(
        "--thread-affinity",
        "CORES",
        cores,
        "Keep each worker's background thread on one core: their numbers, one for each worker of a"
        " host, as in 0,1,2,3 (default: HOROVOD_THREAD_AFFINITY, or any core).",
        variable="HOROVOD_THREAD_AFFINITY",
        keys=("library_options.ccl_bgt_affinity", "library_options.thread_affinity"),
    )


def _add_detection(add: Group) -> None:
    add(
        "--lease",
        "S",
        seconds,
        "Fence a worker that was not able to run for this long, as its process is stopped, or that"
        f" the network does not reach (default: {Settings.lease_s:g}).",
    )
    add(
        "--idle-timeout",
        "S",
        number,
        "Fence a worker that others wait for and that uses neither processor nor disk for this"
        f" long; 0: never (default: {Settings.idle_s:g}; in a job of a fixed size, --busy-timeout).",
    )
    add(
        "--busy-warning",
        "S",
        number,
        "Name a busy worker once others have waited for it this long; 0: never (default:"
        f" {Settings.busy_warning_s:g}).",
    )
    add(
        "--busy-timeout",
        "S",
        number,
        "Fence a busy worker once others have waited for it this long; 0: never (default:"
        f" {Settings.busy_s:g}).",
    )
    add(
        "--gpu-hang-timeout",
        "S",
        number,
        "Fence a worker whose GPU has not come to a collective this long after those of the others;"
        " where all have come, form a new world after three times as long; 0: never (default:"
        f" {Settings.gpu_hang_s:g}).",
    )
    add(
        "--stall-check-warning-time-seconds",
        "S",
        number,
        "As --busy-warning, and name tensors that some ranks have not submitted for this long, and"
        " these ranks (default: HOROVOD_STALL_CHECK_TIME_SECONDS, or 60).",
        dest="stall_warning",
        variable="HOROVOD_STALL_CHECK_TIME_SECONDS",
        keys=("stall_check.warning_time_seconds",),
    )
    add(
        "--stall-check-shutdown-time-seconds",
        "S",
        number,
        "As --busy-timeout, and fail collectives that some ranks have not submitted for this long;"
        " 0: never (default: HOROVOD_STALL_SHUTDOWN_TIME_SECONDS, or 0 for collectives).",
        dest="stall_shutdown",
        variable="HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
        keys=("stall_check.shutdown_time_seconds",),
    )
    add(
        "--no-stall-check",
        None,
        None,
        "Turn the last five off, as HOROVOD_STALL_CHECK_DISABLE=1 does. --stall-check: leave them on.",
        variable="HOROVOD_STALL_CHECK_DISABLE",
        keys=("stall_check.enabled=false",),
        **_switch("stall_check", False),
    )
    add(
        "--stall-check",
        None,
        None,
        argparse.SUPPRESS,
        keys=("stall_check.enabled=true",),
        **_switch("stall_check", True),
    )


def _add_output(add: Group) -> None:
    add(
        "--output-filename",
        "DIR",
        str,
        "Also write what each worker prints to DIR/rank.N/stdout and DIR/rank.N/stderr.",
    )
    add(
        "-prefix-timestamp --prefix-output-with-timestamp",
        None,
        None,
        "Put the time before each line that a worker prints.",
    )
    add(
        "--timeline-filename",
        "FILE",
        str,
        "Write to FILE what every rank does when, for chrome://tracing or ui.perfetto.dev"
        " (default: HOROVOD_TIMELINE).",
        variable="HOROVOD_TIMELINE",
        keys=("timeline.filename",),
    )
    add(
        "--timeline-mark-cycles",
        None,
        None,
        "Mark every round of negotiation there, as HOROVOD_TIMELINE_MARK_CYCLES=1 does."
        " Off: --no-timeline-mark-cycles.",
        variable="HOROVOD_TIMELINE_MARK_CYCLES",
        keys=("timeline.mark_cycles=true",),
        **_switch("timeline_mark_cycles", True),
    )
    add(
        "--no-timeline-mark-cycles",
        None,
        None,
        argparse.SUPPRESS,
        keys=("timeline.mark_cycles=false",),
        **_switch("timeline_mark_cycles", False),
    )
    add("--journal", "FILE", str, "Write every event and decision of the driver to FILE.")
    add(
        "--summary",
        None,
        None,
        "Say at the end how the time of the job and of each worker went: training, committing, waiting, recovering,"
        " lost; as ELASTIC_SUMMARY=1 does.",
        variable="ELASTIC_SUMMARY",
        keys=("summary.enabled=true",),
    )
    add(
        "--report",
        "FILE",
        str,
        "Write a page about the job to FILE when it ends: what happened and why, a timeline, what was reported, how the"
        " time went (default: ELASTIC_REPORT, or none).",
        variable="ELASTIC_REPORT",
        keys=("report.file",),
    )
    add(
        "--digests",
        None,
        None,
        "Have workers report a digest of every tensor of the state at each commit, into --journal; two runs are then"
        " compared by python -m elastic.chaos exact.",
    )
    add(
        "--allow-inexact",
        None,
        None,
        "Where training in shards is to be exact, let workers in that compute differently (other threads, instructions,"
        " versions), and say from which step on.",
    )
    add(
        "--metrics-port",
        "PORT",
        whole(1),
        "Serve metrics for Prometheus at http://127.0.0.1:PORT/metrics.",
    )
    add("--metrics-host", "ADDRESS", str, "Serve them on this address, to whoever reaches it.")
    add(
        "--dashboard",
        "[ADDRESS]:PORT",
        str,
        "Serve a live page of the job at http://127.0.0.1:PORT/, or on another address, to who has the link that is"
        " shown at the start, which holds a token (default: ELASTIC_DASHBOARD, or no page).",
        variable="ELASTIC_DASHBOARD",
        keys=("dashboard.address",),
    )
    add(
        "--opentelemetry",
        None,
        None,
        "Send a trace of each recovery and each change of the world, with its phases as spans, to where the OTEL_*"
        " variables say (OTEL_EXPORTER_OTLP_ENDPOINT); as ELASTIC_OPENTELEMETRY=1 does.",
        variable="ELASTIC_OPENTELEMETRY",
        keys=("opentelemetry.enabled=true",),
    )
    add(
        "--log-level",
        "LEVEL",
        log_level,
        f"Show messages from this level on: {', '.join(LOG_LEVELS)} (default: INFO, or"
        " HOROVOD_LOG_LEVEL).",
        variable="HOROVOD_LOG_LEVEL",
        keys=("logging.level",),
    )
    add("--verbose", None, None, "The same as --log-level DEBUG.")
    add(
        "--log-without-timestamp --log-hide-timestamp",
        None,
        None,
        "Leave the time out of our own lines, as HOROVOD_LOG_HIDE_TIME=1 does."
        " On: --log-with-timestamp.",
        variable="HOROVOD_LOG_HIDE_TIME",
        keys=("logging.with_timestamp=false", "logging.hide_timestamp=true"),
        **_switch("log_timestamps", False),
    )
    add(
        "--log-with-timestamp --no-log-hide-timestamp",
        None,
        None,
        argparse.SUPPRESS,
        keys=("logging.with_timestamp=true", "logging.hide_timestamp=false"),
        **_switch("log_timestamps", True),
    )


def _add_general(add: Group) -> None:
    add("--config-file", "FILE", str, "Read a YAML file of Horovod's form; flags given here win.")
    add("-cb --check-build", None, None, "Show what is available here, and end.")
    add("-v --version", None, None, "Show the version, and end.")
    add("-h --help", None, None, "Show this, and end.", action="help")
    add("--disable-cache", None, None, "Changes nothing: no checks are cached anyway.")


def _add_without_meaning(add: Group) -> None:
    valued: tuple[tuple[str, Any, str, dict[str, Any]], ...] = (
        (
            *("--autotune-log-file", str, "Where autotuning writes its trials."),
            {"variable": "HOROVOD_AUTOTUNE_LOG", "keys": ["autotune.log_file"]},
        ),
        (
            *("--autotune-warmup-samples", whole(0), "Samples that autotuning discards first."),
            {"keys": ["autotune.warmup_samples"]},
        ),
        (
            *("--autotune-steps-per-sample", whole(0), "Steps in a sample of autotuning."),
            {"keys": ["autotune.steps_per_sample"]},
        ),
        (
            *("--autotune-bayes-opt-max-samples", whole(0), "Most samples of autotuning."),
            {"keys": ["autotune.bayes_opt_max_samples"]},
        ),
        (
            *("--autotune-gaussian-process-noise", number, "Noise that autotuning assumes."),
            {"keys": ["autotune.gaussian_process_noise"]},
        ),
        (
            *("--num-nccl-streams", whole(0), "Number of NCCL streams."),
            {"variable": "HOROVOD_NUM_NCCL_STREAMS", "keys": ["library_options.num_nccl_streams"]},
        ),
        ("--mpi-args", str, "Arguments of mpirun.", {}),
        ("--binding-args", str, "Binding of processes under MPI.", {}),
    )
    for flag, convert, text, rest in valued:
        add(flag, "X", convert, text, action=WithoutMeaning, dest=flag, const=True, **rest)
    for name, text, key in (
        ("hierarchical-allreduce", "Allreduce in two levels.", "params.hierarchical_allreduce"),
        ("hierarchical-allgather", "Allgather in two levels.", "params.hierarchical_allgather"),
        ("torus-allreduce", "Allreduce on a torus.", "params.torus_allreduce"),
        ("autotune", "Tune fusion and cycle time while training.", "autotune.enabled"),
        (
            *("mpi-threads-disable", "Turn MPI's threads off."),
            "library_options.mpi_threads_disable",
        ),
    ):
        on, off = f"--{name}", f"--no-{name}"
        variable = f"HOROVOD_{name.upper().replace('-', '_')}"
        rest = {"action": WithoutMeaning, "dest": on, "nargs": 0}
        shown = f"{text} Off: {off}."
        add(on, None, None, shown, const=True, variable=variable, keys=[f"{key}=true"], **rest)
        add(off, None, None, argparse.SUPPRESS, const=False, keys=[f"{key}=false"], **rest)


def why_without_meaning(flag: str) -> str:
    """Why there is nothing that this flag could set here: a clause."""
    if flag.startswith("--autotune"):
        return (
            "nothing is tuned while training; --fusion-threshold-mb and --cycle-time-ms are"
            " what there is to try"
        )
    return {
        "--hierarchical-allreduce": _BY_ITSELF,
        "--hierarchical-allgather": _BY_ITSELF,
        "--torus-allreduce": _NCCL_CHOOSES,
        "--num-nccl-streams": "each group of ranks has a communicator and a stream of its own",
    }.get(flag, "workers are not started by MPI and do not talk over it")


_BY_ITSELF = (
    "ranks of one host reduce in shared memory first, and then with other hosts, without being told;"
    " on GPUs NCCL chooses the algorithm, and its variable NCCL_ALGO forces one"
)
_NCCL_CHOOSES = (
    "NCCL chooses the algorithm by the network it finds; its variable NCCL_ALGO forces one"
)


def _controller(name: str) -> dict[str, Any]:
    return {"action": "store_const", "dest": "controller", "const": name}


def _switch(field: str, on: bool) -> dict[str, Any]:
    return {"action": "store_const", "dest": field, "const": on}
