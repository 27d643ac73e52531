"""The flags of elasticrun: names, types, help. Reads no file and no environment, and decides nothing.

The names are Horovod's, so that a horovodrun command line works unchanged. Horovod's flags for which there is nothing
here to set are accepted, but remembered, so that the caller can say so, and why.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic.driver.commandline.arguments import (
    LOG_LEVELS,
    Group,
    Names,
    Parser,
    WithoutMeaning,
    add_declared,
    choice,
    cores,
    flag,
    given,
    log_level,
    number,
    seconds,
    switch,
    whole,
)
from elastic.driver.commandline.multi_host_flags import (
    CheckpointFlags,
    EtcdFlags,
    FailoverFlags,
    KubernetesFlags,
    PreemptionFlags,
    SecurityFlags,
    SshFlags,
)
from elastic.driver.commandline.setup.short_help import ShortHelp
from elastic.driver.commandline.torchrun_flags import TorchrunFlags, add_refused
from elastic.driver.settings import Settings

DESCRIPTION = """\
Run a training script on several workers; keep training when workers fail or join."""

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
setup:
  agent (one on each host, with --etcd); secret (makes the file of --secret-file); k8s (a job on Kubernetes);
  doctor (checks hosts); docs (the pages of the documentation)
"""


@dataclass
class WorkerFlags:
    """How many, and when to give up."""

    num_proc: int | None = flag(
        "-np --num-proc", "N", "Workers to start with (elastic: default --min-np).", whole(1)
    )
    min_num_proc: int | None = flag(
        "--min-np --min-num-proc", "N", "Elastic: go on with as few (default: -np).", whole(1)
    )
    max_num_proc: int | None = flag(
        "--max-np --max-num-proc",
        "N",
        "Elastic: never use more workers (default: -np; where hosts come and go, as many as there are slots).",
        whole(1),
    )
    standbys: int | None = flag(
        "--standbys",
        "N",
        "Elastic: keep N workers beyond --max-np in free slots, ready to take the place of one that is lost (default:"
        " ELASTIC_STANDBYS, or 0).",
        whole(0),
        variable="ELASTIC_STANDBYS",
        keys=("standbys.count",),
    )
    elastic_timeout: float | None = flag(
        "--elastic-timeout",
        "S",
        f"Give up after waiting this long for --min-np workers (default: {Settings.elastic_timeout_s:g}, or"
        " HOROVOD_ELASTIC_TIMEOUT).",
        seconds,
        variable="HOROVOD_ELASTIC_TIMEOUT",
    )
    start_timeout: float | None = flag(
        "--start-timeout",
        "S",
        f"Give a worker this long from its start to hvd.init() (default: {Settings.start_timeout_s:g}, or"
        " HOROVOD_START_TIMEOUT).",
        seconds,
        variable="HOROVOD_START_TIMEOUT",
    )
    reset_limit: int | None = flag(
        "--reset-limit",
        "N",
        "Survive N failures, then end the job; planned changes do not count (default: no limit).",
        whole(0),
    )
    cooldown_range: Sequence[float] | None = flag(
        "--blacklist-cooldown-range",
        ("MIN", "MAX"),
        "Use a slot again MIN seconds after its worker failed, doubling up to MAX (default:"
        f" {Settings.cooldown_min_s:g} {Settings.cooldown_max_s:g}).",
        seconds,
        nargs=2,
    )
    slot_attempts: int | None = flag(
        "--slot-attempts",
        "N",
        f"Give a slot up after N workers in a row died there before they trained (default: {Settings.slot_attempts}).",
        whole(1),
    )
    host_attempts: int | None = flag(
        "--host-attempts",
        "N",
        "Give a host up once N of its slots were given up (default: never).",
        whole(1),
    )


@dataclass
class HostFlags:
    """Where they run."""

    hosts: str | None = flag(
        "-H --hosts", "LIST", "Hosts and slots, as in gpu1:4,gpu2:4 or [::1]:2, each once."
    )
    hostfile: str | None = flag(
        "-hostfile --hostfile", "FILE", "A file with one host a line, as in gpu1 slots=4."
    )
    host_discovery_script: str | None = flag(
        "--host-discovery-script",
        "SCRIPT",
        "A program that is run every second and prints the hosts there are now, one host or host:slots a line.",
    )
    slots_per_host: int | None = flag(
        "--slots-per-host", "N", "Slots of a host listed without a number (default: 1).", whole(1)
    )
    network_interfaces: list[str] | None = flag(
        "--network-interface --network-interfaces",
        "LIST",
        "Talk over the first of these that a host has: interfaces, networks or addresses, as in"
        " eth1,10.0.0.0/8,fd00::/8 (default: what leads to the other hosts; on one machine loopback).",
        action=Names,
    )


@dataclass
class CommunicationFlags:
    """How they talk."""

    controller: str = choice(  # two are there to be refused
        "gloo",
        given("--gloo", "gloo", "Start workers without MPI, as is always done."),
        given("--mpi", "mpi", "Refused: MPI does not start our workers."),
        given("--jsrun", "jsrun", "Refused: jsrun does not start our workers."),
    )
    gloo_timeout_seconds: float | None = flag(
        "--gloo-timeout-seconds",
        "S",
        "End a collective that has waited this long, whoever is to blame (default: HOROVOD_GLOO_TIMEOUT_SECONDS,"
        " ELASTIC_COLLECTIVE_TIMEOUT, or --busy-timeout and a minute); also the time to connect (default: 30).",
        seconds,
        variable="HOROVOD_GLOO_TIMEOUT_SECONDS",
        keys=("library_options.gloo_timeout_seconds",),
    )
    tcp: bool = switch("--tcp", "Keep NCCL off InfiniBand (sets NCCL_IB_DISABLE=1).")


@dataclass
class TuningFlags:
    """How small tensors are negotiated and fused."""

    fusion_threshold_mb: float | None = flag(
        "--fusion-threshold-mb",
        "MB",
        "Fuse small tensors into collectives of up to so many MiB; 0: never (default:"
        " HOROVOD_FUSION_THRESHOLD, in bytes, or 128).",
        number,
        keys=("params.fusion_threshold_mb",),
    )
    cycle_time_ms: float | None = flag(
        "--cycle-time-ms",
        "MS",
        "Wait this long for more to fuse before a round of negotiation (default: HOROVOD_CYCLE_TIME, or 1).",
        number,
        variable="HOROVOD_CYCLE_TIME",
        keys=("params.cycle_time_ms",),
    )
    cache_capacity: int | None = flag(
        "--cache-capacity",
        "N",
        "Remember the negotiation of so many tensors; 0: of none (default: HOROVOD_CACHE_CAPACITY, or 1024).",
        whole(0),
        variable="HOROVOD_CACHE_CAPACITY",
        keys=("params.cache_capacity",),
    )
    thread_affinity: str | None = flag(
        "--thread-affinity",
        "CORES",
        "Keep each worker's background thread on one core: their numbers, one for each worker of a"
        " host, as in 0,1,2,3 (default: HOROVOD_THREAD_AFFINITY, or any core).",
        cores,
        variable="HOROVOD_THREAD_AFFINITY",
        keys=("library_options.ccl_bgt_affinity", "library_options.thread_affinity"),
    )


@dataclass
class DetectionFlags:
    """How long to wait for whom."""

    lease: float | None = flag(
        "--lease",
        "S",
        "Fence a worker that was not able to run for this long, as its process is stopped, or that"
        f" the network does not reach (default: {Settings.lease_s:g}).",
        seconds,
    )
    idle_timeout: float | None = flag(
        "--idle-timeout",
        "S",
        "Fence a worker that others wait for and that uses neither processor nor disk for this"
        f" long; 0: never (default: {Settings.idle_s:g}; in a job of a fixed size, --busy-timeout).",
        number,
    )
    busy_warning: float | None = flag(
        "--busy-warning",
        "S",
        "Name a busy worker once others have waited for it this long; 0: never (default:"
        f" {Settings.busy_warning_s:g}).",
        number,
    )
    busy_timeout: float | None = flag(
        "--busy-timeout",
        "S",
        f"Fence a busy worker once others have waited for it this long; 0: never (default: {Settings.busy_s:g}).",
        number,
    )
    gpu_hang_timeout: float | None = flag(
        "--gpu-hang-timeout",
        "S",
        "Fence a worker whose GPU has not come to a collective this long after those of the others; where all have"
        f" come, form a new world after three times as long; 0: never (default: {Settings.gpu_hang_s:g}).",
        number,
    )
    stall_warning: float | None = flag(
        "--stall-check-warning-time-seconds",
        "S",
        "As --busy-warning, and name tensors that some ranks have not submitted for this long, and"
        " these ranks (default: HOROVOD_STALL_CHECK_TIME_SECONDS, or 60).",
        number,
        variable="HOROVOD_STALL_CHECK_TIME_SECONDS",
        keys=("stall_check.warning_time_seconds",),
    )
    stall_shutdown: float | None = flag(
        "--stall-check-shutdown-time-seconds",
        "S",
        "As --busy-timeout, and fail collectives that some ranks have not submitted for this long;"
        " 0: never (default: HOROVOD_STALL_SHUTDOWN_TIME_SECONDS, or 0 for collectives).",
        number,
        variable="HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
        keys=("stall_check.shutdown_time_seconds",),
    )
    stall_check: bool | None = choice(
        None,
        given(
            "--no-stall-check",
            False,
            "Turn the last five off, as HOROVOD_STALL_CHECK_DISABLE=1 does. --stall-check: leave them on.",
            variable="HOROVOD_STALL_CHECK_DISABLE",
            keys=("stall_check.enabled=false",),
        ),
        given("--stall-check", True, keys=("stall_check.enabled=true",)),
    )


@dataclass
class OutputFlags:
    """What is written, served and shown."""

    output_filename: str | None = flag(
        "--output-filename",
        "DIR",
        "Also write what each worker prints to DIR/rank.N/stdout and DIR/rank.N/stderr.",
    )
    stdin: int | None = flag(
        "--stdin",
        "RANK",
        "Pass standard input to the worker of this rank, on this machine (default: every worker's is empty).",
        whole(0),
        keys=("stdin.rank",),
    )
    prefix_output_with_timestamp: bool = switch(
        "-prefix-timestamp --prefix-output-with-timestamp",
        "Put the time before each line that a worker prints.",
    )
    timeline_filename: str | None = flag(
        "--timeline-filename",
        "FILE",
        "Write to FILE what every rank does when, for chrome://tracing or ui.perfetto.dev (default: HOROVOD_TIMELINE).",
        variable="HOROVOD_TIMELINE",
        keys=("timeline.filename",),
    )
    timeline_mark_cycles: bool | None = choice(
        None,
        given(
            "--timeline-mark-cycles",
            True,
            "Mark every round of negotiation there, as HOROVOD_TIMELINE_MARK_CYCLES=1 does."
            " Off: --no-timeline-mark-cycles.",
            variable="HOROVOD_TIMELINE_MARK_CYCLES",
            keys=("timeline.mark_cycles=true",),
        ),
        given("--no-timeline-mark-cycles", False, keys=("timeline.mark_cycles=false",)),
    )
    journal: str | None = flag(
        "--journal",
        "FILE",
        "Write every event and decision of the driver to FILE. Those of five jobs before stay; FILE.1 is the newest.",
    )
    summary: bool = switch(
        "--summary",
        "Say at the end how the time of the job and of each worker went: training, committing, waiting, recovering,"
        " lost; as ELASTIC_SUMMARY=1 does.",
        variable="ELASTIC_SUMMARY",
        keys=("summary.enabled=true",),
    )
    report: str | None = flag(
        "--report",
        "FILE",
        "Write a page about the job to FILE when it ends: what happened and why, a timeline, what was reported, how the"
        " time went (default: ELASTIC_REPORT, or none).",
        variable="ELASTIC_REPORT",
        keys=("report.file",),
    )
    digests: bool = switch(
        "--digests",
        "Have workers report a digest of every tensor of the state at each commit, into --journal; two runs are then"
        " compared by python -m elastic.chaos exact.",
    )
    strict: bool = switch(
        "--strict",
        "End the job with exit code 2 if its first steps show a mistake in the script, and with 1 if it finishes on"
        " fewer workers than it started because scripts failed.",
        variable="ELASTIC_STRICT",
        keys=("checks.strict=true",),
    )
    allow_inexact: bool = switch(
        "--allow-inexact",
        "Where training in shards is to be exact, let workers in that compute differently (other threads, instructions,"
        " versions), and say from which step on.",
    )
    metrics_port: int | None = flag(
        "--metrics-port",
        "PORT",
        "Serve metrics for Prometheus at http://127.0.0.1:PORT/metrics.",
        whole(1),
    )
    metrics_host: str | None = flag(
        "--metrics-host", "ADDRESS", "Serve them on this address, to whoever reaches it."
    )
    dashboard: str | None = flag(
        "--dashboard",
        "[ADDRESS]:PORT",
        "Serve a live page of the job at http://127.0.0.1:PORT/, or on another address, to who has the link that is"
        " shown at the start, which holds a token (default: ELASTIC_DASHBOARD, or no page).",
        variable="ELASTIC_DASHBOARD",
        keys=("dashboard.address",),
    )
    opentelemetry: bool = switch(
        "--opentelemetry",
        "Send a trace of each recovery and each change of the world, with its phases as spans, to where the OTEL_*"
        " variables say (OTEL_EXPORTER_OTLP_ENDPOINT); as ELASTIC_OPENTELEMETRY=1 does.",
        variable="ELASTIC_OPENTELEMETRY",
        keys=("opentelemetry.enabled=true",),
    )
    tensorboard: str | None = flag(
        "--tensorboard",
        "DIR",
        "Write what workers report, recoveries and the number of workers into DIR as scalars for TensorBoard.",
    )
    log_level: str | None = flag(
        "--log-level",
        "LEVEL",
        f"Show messages from this level on: {', '.join(LOG_LEVELS)} (default: INFO, or HOROVOD_LOG_LEVEL).",
        log_level,
        variable="HOROVOD_LOG_LEVEL",
        keys=("logging.level",),
    )
    verbose: bool = switch("--verbose", "The same as --log-level DEBUG.")
    log_timestamps: bool | None = choice(
        None,
        given(
            "--log-without-timestamp --log-hide-timestamp",
            False,
            "Leave the time out of our own lines, as HOROVOD_LOG_HIDE_TIME=1 does. On: --log-with-timestamp.",
            variable="HOROVOD_LOG_HIDE_TIME",
            keys=("logging.with_timestamp=false", "logging.hide_timestamp=true"),
        ),
        given(
            "--log-with-timestamp --no-log-hide-timestamp",
            True,
            keys=("logging.with_timestamp=true", "logging.hide_timestamp=false"),
        ),
    )


@dataclass
class GeneralFlags:
    """The rest."""

    config_file: str | None = flag(
        "--config-file", "FILE", "Read a YAML file of Horovod's form; flags given here win."
    )
    check_build: bool = switch("-cb --check-build", "Show what is available here, and end.")
    version: bool = switch("-v --version", "Show the version, and end.")
    disable_cache: bool = switch("--disable-cache", "Changes nothing: no checks are cached anyway.")


@dataclass
class Options(
    WorkerFlags,
    HostFlags,
    SshFlags,
    EtcdFlags,
    KubernetesFlags,
    CheckpointFlags,
    PreemptionFlags,
    FailoverFlags,
    SecurityFlags,
    CommunicationFlags,
    TuningFlags,
    DetectionFlags,
    TorchrunFlags,
    OutputFlags,
    GeneralFlags,
):
    """Flags as given. None means not given, so that the file, the environment and the defaults can fill it in."""

    command: list[str] = field(default_factory=list)
    without_meaning: dict[str, bool] = field(default_factory=dict)  # flag -> switched on


# Title and text of each group of --help-all, and the flags in it.
GROUPS: tuple[tuple[str, str | None, tuple[type, ...]], ...] = (
    ("workers", None, (WorkerFlags,)),
    (
        "hosts",
        "At most one of the first three. Without them and without --etcd: this machine, with as many slots as workers,"
        "\n  up to 8 a core.",
        (HostFlags,),
    ),
    (
        "several hosts",
        "Hosts of a list are reached over ssh; on those of --etcd runs `elasticrun agent`."
        "\n  More: elasticrun docs many-hosts",
        (SshFlags, EtcdFlags, KubernetesFlags),
    ),
    (
        "checkpoints",
        "Commits that outlive all workers and the driver. More: elasticrun docs checkpoints",
        (CheckpointFlags,),
    ),
    (
        "preemption",
        "Workers leave before their machine is reclaimed; others replace them. More: elasticrun docs spot",
        (PreemptionFlags,),
    ),
    (
        "driver failover",
        "Workers belong to agents that outlive the driver; another driver continues. More: elasticrun docs many-hosts",
        (FailoverFlags,),
    ),
    (
        "security",
        "Every connection is authenticated; TLS also encrypts. More: elasticrun docs security",
        (SecurityFlags,),
    ),
    ("communication", None, (CommunicationFlags,)),
    (
        "small tensors",
        "Tensors submitted together are negotiated and reduced together. More: elasticrun docs negotiation",
        (TuningFlags,),
    ),
    (
        "failure detection",
        "Hung and slow workers are named, then killed so that the others continue. More: elasticrun docs detection",
        (DetectionFlags,),
    ),
    (
        "torch.distributed, and torchrun's flags",
        "Scripts for torchrun run unedited. More: elasticrun docs pytorch",
        (TorchrunFlags,),
    ),
    ("output", None, (OutputFlags,)),
    ("general", None, (GeneralFlags,)),
)


def parse(arguments: Sequence[str]) -> Options:
    """The options of a command line without its program name. Raises Invalid; exits for ``--help``, ``--help-all``."""
    known = parser()
    own, command = known.split(arguments)
    options = Options()
    known.parse_args(own, namespace=options)
    options.command = command
    return options


# What functions that start jobs call otherwise than the command line.
OTHERWISE = {
    "np": "num_proc",
    "gloo_timeout": "gloo_timeout_seconds",
    "begin_from": "from",
    "cooldown_range": "blacklist_cooldown_range",
}


def flags_of(given: Mapping[str, Any]) -> list[str]:
    """Arguments of such a function as words of a command line. None, and False of a switch: not given."""
    words: list[str] = []
    for name, value in given.items():
        flag = f"--{OTHERWISE.get(name, name).replace('_', '-')}"
        if name in ("fresh", "summary", "verbose"):
            words += [flag] if value else []
        elif name == "cooldown_range" and value is not None:
            words += [flag, *map(str, value)]
        elif value is not None:
            words.append(f"{flag}={value}")
    return words


def build_parser() -> Parser:
    """All flags, in groups."""
    parser = Parser(
        prog="elasticrun",
        usage="elasticrun [flags] program [arguments of the program]",
        description=DESCRIPTION,
        epilog=EXAMPLES,
    )
    for title, text, kinds in GROUPS:
        add = parser.group(title, text)
        for kind in kinds:
            add_declared(add, kind)
    add(
        "-h --help",
        None,
        None,
        "Show the most used flags on one screen, and exit.",
        action=ShortHelp,
        nargs=0,
    )
    add("--help-all", None, None, "Show every flag, and exit.", action="help")
    add_refused(add)
    _add_without_meaning(
        parser.group(
            "accepted from Horovod, without meaning here",
            "A line at the start names those that were given, and says why.",
        )
    )
    return parser


parser = functools.cache(build_parser)


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
    for name, convert, text, rest in valued:
        add(name, "X", convert, text, action=WithoutMeaning, dest=name, const=True, **rest)
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
        return "nothing is tuned while training; --fusion-threshold-mb and --cycle-time-ms are what there is to try"
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
