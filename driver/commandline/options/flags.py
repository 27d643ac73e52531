"""Flags of elasticrun: names, types and help texts. Reads neither files nor the environment.

Flags have Horovod's names, so that horovodrun command lines work unchanged. Horovod flags without an equivalent are
accepted and recorded, so that the caller can log why they have no effect.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import Any

from elastic.driver.commandline.options.argument_parser import (
    EVERYWHERE,
    FUNCTIONS,
    LAUNCH,
    LOG_LEVELS,
    ON_LAUNCH,
    ArgumentParser,
    Group,
    IgnoredFlag,
    NameList,
    Use,
    add_declared,
    choice,
    cores,
    flag,
    given,
    islands,
    log_level,
    number,
    percent,
    seconds,
    switch,
    whole,
)
from elastic.driver.commandline.options.checkpoint_and_failover_flags import (
    CheckpointFlags,
    FailoverFlags,
    PreemptionFlags,
)
from elastic.driver.commandline.options.multi_host_flags import (
    EtcdFlags,
    KubernetesFlags,
    SecurityFlags,
    SshFlags,
)
from elastic.driver.commandline.options.short_help import ShortHelp
from elastic.driver.commandline.options.torchrun_flags import TorchrunFlags, add_refused
from elastic.driver.settings import Settings

DESCRIPTION = """\
Run a training script on several workers; keep training when workers fail or join."""

EXAMPLES = """\
examples:
  elasticrun -np 4 python train.py --lr 0.1
      four workers on this machine; the first failure ends the job
  elasticrun -np 4 --min-np 2 --max-np 8 --host-discovery-script ./hosts.sh python train.py
      two to eight workers, one per slot of the discovered hosts, also at startup
  elasticrun -np 8 --min-np 4 -H gpu1:4,gpu2:4 --output-filename out python train.py
      two machines, reached over ssh; the output of rank 0 is copied to out/rank.0/stdout, and so on
  elasticrun -np 8 --min-np 4 --etcd etcd1:2379 --job bert --secret-file job.secret python train.py
      all hosts that run `elasticrun agent` for this job
  elasticrun -np 4 --min-np 2 --journal job.journal --resume python train.py
      workers keep training if this driver is lost; rerun the same command to continue

commands on a running job (elasticrun COMMAND --help):
  jobs, status, scale, drain, remove, stacks, logs, stop
commands on a finished job, with the file of --journal or the folder of --checkpoint-dir:
  explain, replay; checkpoints
setup:
  agent (one per host, with --etcd); secret (create the file of --secret-file); k8s (a job on Kubernetes);
  doctor (check hosts); docs (print the documentation)"""


@dataclass
class WorkerFlags:
    """Flags for the number of workers and for limits on failures."""

    num_proc: int | None = flag(
        "-np --num-proc",
        "N",
        "Number of workers (default: --min-np).",
        whole(1),
        use=Use(functions=(LAUNCH,), keyword="np"),
    )
    min_num_proc: int | None = flag(
        "--min-np --min-num-proc",
        "N",
        "Elastic: smallest number of workers to continue with (default: -np).",
        whole(1),
        use=Use(functions=(LAUNCH,), keyword="min_np"),
    )
    max_num_proc: int | None = flag(
        "--max-np --max-num-proc",
        "N",
        "Elastic: largest number of workers, also at startup (default: -np; with host discovery, all slots).",
        whole(1),
        use=Use(functions=(LAUNCH,), keyword="max_np"),
    )
    standbys: int | None = flag(
        "--standbys",
        "N",
        "Elastic: spare workers that replace a lost one immediately (default: ELASTIC_STANDBYS, or 0).",
        whole(0),
        variable="ELASTIC_STANDBYS",
        keys=("standbys.count",),
        use=Use(functions=FUNCTIONS, setting="standbys"),
    )
    elastic_timeout: float | None = flag(
        "--elastic-timeout",
        "S",
        f"Timeout for --min-np workers to become ready (default: {Settings.elastic_timeout_s:g}, "
        "or HOROVOD_ELASTIC_TIMEOUT).",
        seconds,
        variable="HOROVOD_ELASTIC_TIMEOUT",
        use=Use(functions=FUNCTIONS, setting="elastic_timeout_s"),
    )
    start_timeout: float | None = flag(
        "--start-timeout",
        "S",
        f"Start-up timeout of a worker, up to hvd.init() (default: {Settings.start_timeout_s:g}, or"
        " HOROVOD_START_TIMEOUT).",
        seconds,
        variable="HOROVOD_START_TIMEOUT",
        use=Use(functions=FUNCTIONS, setting="start_timeout_s"),
    )
    reset_limit: int | None = flag(
        "--reset-limit",
        "N",
        "Maximum number of recoveries from failures before the job ends (default: no limit).",
        whole(0),
        use=Use(functions=FUNCTIONS, setting="reset_limit"),
    )
    commit_budget: float | None = flag(
        "--commit-budget",
        "PERCENT",
        "Elastic: maximum percentage of training time for copies in commit(); 0: no limit (default:"
        " ELASTIC_COMMIT_BUDGET, or 0).",
        percent,
        variable="ELASTIC_COMMIT_BUDGET",
        keys=("commits.budget",),
        use=Use(functions=FUNCTIONS, for_workers=True),
    )
    cooldown_range: Sequence[float] | None = flag(
        "--blacklist-cooldown-range",
        ("MIN", "MAX"),
        "Cooldown of a slot whose worker failed, doubling from MIN to MAX seconds (default:"
        f" {Settings.cooldown_min_s:g} {Settings.cooldown_max_s:g}).",
        seconds,
        nargs=2,
        use=Use(functions=FUNCTIONS, typed="tuple[float, float] | None"),
    )
    slot_attempts: int | None = flag(
        "--slot-attempts",
        "N",
        f"Stop using a slot after N consecutive start-up failures (default: {Settings.slot_attempts}).",
        whole(1),
        use=Use(setting="slot_attempts"),
    )
    host_attempts: int | None = flag(
        "--host-attempts",
        "N",
        "Stop using a host after N of its slots failed repeatedly (default: never).",
        whole(1),
        use=Use(setting="host_attempts"),
    )


@dataclass
class HostFlags:
    """Flags for hosts and slots."""

    hosts: str | None = flag(
        "-H --hosts",
        "LIST",
        "Hosts and their numbers of slots: gpu1:4,gpu2:4 or [::1]:2.",
        use=ON_LAUNCH,
    )
    hostfile: str | None = flag(
        "-hostfile --hostfile",
        "FILE",
        "Read hosts from a file, one per line: gpu1 slots=4.",
        use=ON_LAUNCH,
    )
    host_discovery_script: str | None = flag(
        "--host-discovery-script",
        "SCRIPT",
        "Program that prints the current hosts, one host[:slots] per line; run every second.",
        use=ON_LAUNCH,
    )
    slurm: bool = switch(
        "--slurm", "Discover the nodes of this Slurm allocation; start agents with srun."
    )
    slots_per_host: int | None = flag(
        "--slots-per-host",
        "N",
        "Slots of each host that is listed without a number (default: 1; with --slurm, its GPUs or tasks).",
        whole(1),
        use=ON_LAUNCH,
    )
    network_interfaces: list[str] | None = flag(
        "--network-interface --network-interfaces",
        "LIST",
        "Interfaces, networks or addresses for worker traffic, in order of preference: eth1,10.0.0.0/8 (default: the"
        " route to the other hosts; loopback on a single machine).",
        action=NameList,
        use=Use(functions=FUNCTIONS, keyword="network_interface", typed="str | None"),
    )


@dataclass
class CommunicationFlags:
    """Flags for the communication between workers."""

    controller: str = choice(  # the flags for MPI raise an error
        "gloo",
        given("--gloo", "gloo", "Start workers without MPI (no effect; accepted from Horovod)."),
        given("--mpi", "mpi", "Start workers with MPI (not supported)."),
        given("--jsrun", "jsrun", "Start workers with jsrun (not supported)."),
    )
    gloo_timeout_seconds: float | None = flag(
        "--gloo-timeout-seconds",
        "S",
        "Timeout of collectives and of connections between workers (default: HOROVOD_GLOO_TIMEOUT_SECONDS; else 30"
        " for connections, and ELASTIC_COLLECTIVE_TIMEOUT or --busy-timeout plus 60 for collectives).",
        seconds,
        variable="HOROVOD_GLOO_TIMEOUT_SECONDS",
        keys=("library_options.gloo_timeout_seconds",),
        use=Use(functions=(LAUNCH,), keyword="gloo_timeout", for_workers=True),
    )
    islands: str | None = flag(
        "--islands",
        "RULES",
        "Worker groups of elastic.island_group(): host (one per host) or NAME=HOST,HOST;NAME=HOST (default:"
        " ELASTIC_ISLANDS, or host).",
        islands,
        variable="ELASTIC_ISLANDS",
        keys=("islands.rules",),
        use=Use(functions=FUNCTIONS, for_workers=True),
    )
    tcp: bool = switch("--tcp", "Disable InfiniBand in NCCL (sets NCCL_IB_DISABLE=1).")


@dataclass
class TuningFlags:
    """Flags for the negotiation and fusion of small tensors."""

    fusion_threshold_mb: float | None = flag(
        "--fusion-threshold-mb",
        "MB",
        "Maximum size of a fused collective of small tensors; 0: off (default: HOROVOD_FUSION_THRESHOLD, in bytes,"
        " or 128).",
        number,
        keys=("params.fusion_threshold_mb",),
    )
    cycle_time_ms: float | None = flag(
        "--cycle-time-ms",
        "MS",
        "Milliseconds to wait for more tensors before a negotiation round (default: HOROVOD_CYCLE_TIME, or 1).",
        number,
        variable="HOROVOD_CYCLE_TIME",
        keys=("params.cycle_time_ms",),
        use=Use(for_workers=True),
    )
    cache_capacity: int | None = flag(
        "--cache-capacity",
        "N",
        "Number of tensors whose negotiation is cached; 0: off (default: HOROVOD_CACHE_CAPACITY, or 1024).",
        whole(0),
        variable="HOROVOD_CACHE_CAPACITY",
        keys=("params.cache_capacity",),
        use=Use(for_workers=True),
    )
    thread_affinity: str | None = flag(
        "--thread-affinity",
        "CORES",
        "Cores for background threads, one per worker of a host: 0,1,2,3 (default: HOROVOD_THREAD_AFFINITY, or not"
        " pinned).",
        cores,
        variable="HOROVOD_THREAD_AFFINITY",
        keys=("library_options.ccl_bgt_affinity", "library_options.thread_affinity"),
        use=Use(for_workers=True),
    )


@dataclass
class DetectionFlags:
    """Flags for failure-detection timeouts."""

    lease: float | None = flag(
        "--lease",
        "S",
        f"Kill a worker that has been stopped or unreachable for S seconds (default: {Settings.lease_s:g}).",
        seconds,
        use=Use(setting="lease_s"),
    )
    idle_timeout: float | None = flag(
        "--idle-timeout",
        "S",
        "Kill an idle worker after its peers have waited S seconds; 0: never (default:"
        f" {Settings.idle_s:g}; in a job of fixed size, --busy-timeout).",
        number,
    )
    busy_warning: float | None = flag(
        "--busy-warning",
        "S",
        "Log a warning about a busy worker after its peers have waited S seconds; 0: never (default:"
        f" {Settings.busy_warning_s:g}).",
        number,
    )
    busy_timeout: float | None = flag(
        "--busy-timeout",
        "S",
        "Kill a busy worker after its peers have waited S seconds; 0: never (default: "
        f"{Settings.busy_s:g}).",
        number,
    )
    gpu_hang_timeout: float | None = flag(
        "--gpu-hang-timeout",
        "S",
        "Kill a worker whose GPU starts a collective S seconds after the others; 0: never (default:"
        f" {Settings.gpu_hang_s:g}).",
        number,
    )
    health_check: str | None = flag(
        "--health-check",
        "COMMAND",
        "Command that tests a slot before its worker is admitted; auto: built-in test (default: "
        "no check).",
        variable="ELASTIC_HEALTH_CHECK",
        keys=("health_check.command",),
        use=Use(functions=FUNCTIONS, setting="health_check"),
    )
    health_check_timeout: float | None = flag(
        "--health-check-timeout",
        "S",
        f"Time limit of a health check (default: {Settings.health_check_s:g}).",
        seconds,
        variable="ELASTIC_HEALTH_CHECK_TIMEOUT",
        keys=("health_check.timeout_seconds",),
        use=Use(functions=FUNCTIONS, setting="health_check_s"),
    )
    bandwidth_factor: float | None = flag(
        "--bandwidth-factor",
        "F",
        "With --health-check auto: reject hosts below F times the median bandwidth; 0: off (default:"
        f" {Settings.bandwidth_factor:g}).",
        number,
        variable="ELASTIC_BANDWIDTH_FACTOR",
        keys=("health_check.bandwidth_factor",),
        use=Use(functions=FUNCTIONS, setting="bandwidth_factor"),
    )
    quarantine: str | None = flag(
        "--quarantine",
        "WHICH",
        f"What to quarantine after wrong results of a worker: slot, host or off (default: {Settings.quarantine}).",
        variable="ELASTIC_QUARANTINE",
        keys=("verification.quarantine",),
        use=Use(functions=FUNCTIONS, setting="quarantine"),
    )
    keep_faulty: str | None = flag(
        "--keep-faulty",
        "DIR",
        "Directory for the state of a worker with wrong results (default: not saved).",
        variable="ELASTIC_KEEP_FAULTY",
        keys=("verification.keep",),
        use=Use(functions=FUNCTIONS, for_workers=True),
    )
    straggler_factor: float | None = flag(
        "--straggler-factor",
        "F",
        "Report workers below F times the median speed as stragglers; 0: off (default:"
        f" {Settings.straggler_factor:g}).",
        number,
        variable="ELASTIC_STRAGGLER_FACTOR",
        keys=("stragglers.factor",),
        use=Use(functions=FUNCTIONS, setting="straggler_factor"),
    )
    replace_stragglers: bool = switch(
        "--replace-stragglers",
        "Replace a persistent straggler with a ready standby.",
        variable="ELASTIC_REPLACE_STRAGGLERS",
        keys=("stragglers.replace=true",),
        use=Use(functions=FUNCTIONS, setting="replace_stragglers"),
    )
    stall_warning: float | None = flag(
        "--stall-check-warning-time-seconds",
        "S",
        "Log tensors that some ranks have not submitted for S seconds; also sets --busy-warning (default:"
        " HOROVOD_STALL_CHECK_TIME_SECONDS, or 60).",
        number,
        variable="HOROVOD_STALL_CHECK_TIME_SECONDS",
        keys=("stall_check.warning_time_seconds",),
        use=Use(for_workers=True),
    )
    stall_shutdown: float | None = flag(
        "--stall-check-shutdown-time-seconds",
        "S",
        "Fail collectives that some ranks have not submitted for S seconds; 0: never; also sets --busy-timeout"
        " (default: HOROVOD_STALL_SHUTDOWN_TIME_SECONDS, or 0 for collectives).",
        number,
        variable="HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
        keys=("stall_check.shutdown_time_seconds",),
        use=Use(for_workers=True),
    )
    stall_check: bool | None = choice(
        None,
        given(
            "--no-stall-check",
            False,
            "Disable all stall and failure timeouts except --lease (also: HOROVOD_STALL_CHECK_DISABLE=1; opposite:"
            " --stall-check).",
            variable="HOROVOD_STALL_CHECK_DISABLE",
            keys=("stall_check.enabled=false",),
        ),
        given("--stall-check", True, keys=("stall_check.enabled=true",)),
        use=Use(for_workers=True),
    )


@dataclass
class OutputFlags:
    """Flags for output, reports and metrics."""

    output_filename: str | None = flag(
        "--output-filename",
        "DIR",
        "Copy each worker's output to DIR/rank.N/stdout and stderr (without a rank: DIR/HOST.SLOT/).",
        use=ON_LAUNCH,
    )
    stdin: int | None = flag(
        "--stdin",
        "RANK",
        "Rank on this machine that receives standard input (default: none).",
        whole(0),
        keys=("stdin.rank",),
        use=ON_LAUNCH,
    )
    prefix_output_with_timestamp: bool = switch(
        "-prefix-timestamp --prefix-output-with-timestamp",
        "Prefix each line of worker output with the time.",
    )
    timeline_filename: str | None = flag(
        "--timeline-filename",
        "FILE",
        "Write a timeline of all ranks, for chrome://tracing or ui.perfetto.dev (default: HOROVOD_TIMELINE).",
        variable="HOROVOD_TIMELINE",
        keys=("timeline.filename",),
        use=Use(for_workers=True),
    )
    timeline_mark_cycles: bool | None = choice(
        None,
        given(
            "--timeline-mark-cycles",
            True,
            "Mark negotiation rounds in the timeline (also: HOROVOD_TIMELINE_MARK_CYCLES=1; opposite:"
            " --no-timeline-mark-cycles).",
            variable="HOROVOD_TIMELINE_MARK_CYCLES",
            keys=("timeline.mark_cycles=true",),
        ),
        given("--no-timeline-mark-cycles", False, keys=("timeline.mark_cycles=false",)),
        use=Use(for_workers=True),
    )
    journal: str | None = flag(
        "--journal",
        "FILE",
        "Record all events and decisions of the driver; keep older parts and five earlier journals.",
        use=ON_LAUNCH,
    )
    summary: bool = switch(
        "--summary",
        "Print how the job and each worker spent their time (also: ELASTIC_SUMMARY=1).",
        variable="ELASTIC_SUMMARY",
        keys=("summary.enabled=true",),
        use=EVERYWHERE,
    )
    report: str | None = flag(
        "--report",
        "FILE",
        "Write an HTML report of the job when it ends (default: ELASTIC_REPORT, or no report).",
        variable="ELASTIC_REPORT",
        keys=("report.file",),
        use=ON_LAUNCH,
    )
    digests: bool = switch(
        "--digests",
        "Record digests of all state tensors in --journal, for `python -m elastic.chaos exact`.",
    )
    strict: bool = switch(
        "--strict",
        "Fail on script mistakes (exit code 2) and on script failures (exit code 1).",
        variable="ELASTIC_STRICT",
        keys=("checks.strict=true",),
        use=Use(setting="strict", for_workers=True),
    )
    allow_inexact: bool = switch(
        "--allow-inexact",
        "With elastic.Shards: allow workers whose results are not bitwise identical.",
    )
    metrics_port: int | None = flag(
        "--metrics-port",
        "PORT",
        "Serve Prometheus metrics at http://127.0.0.1:PORT/metrics.",
        whole(1),
    )
    metrics_host: str | None = flag(
        "--metrics-host",
        "ADDRESS",
        "Address to serve metrics on, without access control (default: 127.0.0.1).",
    )
    dashboard: str | None = flag(
        "--dashboard",
        "[ADDRESS]:PORT",
        "Serve a live page on 127.0.0.1 or ADDRESS (default: ELASTIC_DASHBOARD, or none). Access requires the"
        " tokenized URL printed at startup.",
        variable="ELASTIC_DASHBOARD",
        keys=("dashboard.address",),
        use=EVERYWHERE,
    )
    opentelemetry: bool = switch(
        "--opentelemetry",
        "Export traces of recoveries and world changes to OTEL_EXPORTER_OTLP_ENDPOINT (also:"
        " ELASTIC_OPENTELEMETRY=1).",
        variable="ELASTIC_OPENTELEMETRY",
        keys=("opentelemetry.enabled=true",),
    )
    tensorboard: str | None = flag(
        "--tensorboard",
        "DIR",
        "Write reported values, recoveries and worker counts to DIR for TensorBoard.",
    )
    log_level: str | None = flag(
        "--log-level",
        "LEVEL",
        f"Lowest level to log: {', '.join(LOG_LEVELS)} (default: HOROVOD_LOG_LEVEL, or INFO).",
        log_level,
        variable="HOROVOD_LOG_LEVEL",
        keys=("logging.level",),
        use=Use(functions=(LAUNCH,), for_workers=True),
    )
    verbose: bool = switch("--verbose", "Same as --log-level DEBUG.", use=Use(functions=FUNCTIONS))
    log_timestamps: bool | None = choice(
        None,
        given(
            "--log-without-timestamp --log-hide-timestamp",
            False,
            "Omit the time from log lines (also: HOROVOD_LOG_HIDE_TIME=1; opposite: --log-with-timestamp).",
            variable="HOROVOD_LOG_HIDE_TIME",
            keys=("logging.with_timestamp=false", "logging.hide_timestamp=true"),
        ),
        given(
            "--log-with-timestamp --no-log-hide-timestamp",
            True,
            keys=("logging.with_timestamp=true", "logging.hide_timestamp=false"),
        ),
        use=Use(for_workers=True),
    )


@dataclass
class GeneralFlags:
    """Flags that belong to no other group."""

    config_file: str | None = flag(
        "--config-file",
        "FILE",
        "Read flags from a YAML file in Horovod's format; command-line flags take precedence.",
    )
    check_build: bool = switch("-cb --check-build", "Print build information and exit.")
    version: bool = switch("-v --version", "Print the version and exit.")
    disable_cache: bool = switch(
        "--disable-cache", "Do not cache checks (no effect; accepted from Horovod)."
    )


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
    """Flags of ``elasticrun`` as given by the user.

    None means that the flag was not passed; its value then comes from the configuration file, the environment or the
    default.
    """

    command: list[str] = field(default_factory=list)
    # passed flags that have no effect, each with whether it enables a feature
    without_meaning: dict[str, bool] = field(default_factory=dict)


# title, text and classes of flags of each group in --help-all
GROUPS: tuple[tuple[str, str | None, tuple[type, ...]], ...] = (
    ("workers", None, (WorkerFlags,)),
    (
        "hosts",
        "Pass at most one of -H, --hostfile, --host-discovery-script and --slurm. Without these flags and --etcd,"
        " all\nworkers run on this machine.",
        (HostFlags,),
    ),
    (
        "several hosts",
        "Listed hosts are reached over ssh. With --etcd and without -H, hosts are those that run `elasticrun"
        " agent`.\nMore: elasticrun docs many-hosts",
        (SshFlags, EtcdFlags, KubernetesFlags),
    ),
    (
        "checkpoints",
        "Durable checkpoints on shared storage. A final checkpoint is written at the end, except after Ctrl-C.\n"
        "More: elasticrun docs checkpoints",
        (CheckpointFlags,),
    ),
    (
        "preemption",
        "Leave a machine before it is reclaimed, and replace lost workers. More: elasticrun docs spot",
        (PreemptionFlags,),
    ),
    (
        "driver failover",
        "Keep workers running when the driver is lost, and resume with another driver. If all workers were lost"
        " too,\ntraining resumes from --checkpoint-dir.\nMore: elasticrun docs many-hosts",
        (FailoverFlags,),
    ),
    (
        "security",
        "Authentication of all connections, and encryption with TLS. Without a secret, the driver generates one.\n"
        "More: elasticrun docs security",
        (SecurityFlags,),
    ),
    ("communication", None, (CommunicationFlags,)),
    (
        "small tensors",
        "Negotiate and reduce small tensors together. More: elasticrun docs negotiation",
        (TuningFlags,),
    ),
    (
        "failure detection",
        "Detect, report and kill hung workers. More: elasticrun docs detection",
        (DetectionFlags,),
    ),
    (
        "torch.distributed, and torchrun's flags",
        "Run scripts written for torchrun without changes. More: elasticrun docs pytorch",
        (TorchrunFlags,),
    ),
    ("output", None, (OutputFlags,)),
    ("general", None, (GeneralFlags,)),
)


def parse(arguments: Sequence[str]) -> Options:
    """Parse a command line without its program name. ``--help`` and ``--help-all`` exit.

    Raises:
        Invalid: a flag is unknown, or its value is missing or invalid.
    """
    known = parser()
    own, command = known.split(arguments)
    options = Options()
    known.parse_args(own, namespace=options)
    options.command = command
    return options


def declared() -> Iterator[tuple[Field[Any], Use]]:
    """Yield all options, in the order of ``--help-all``."""
    for _, _, kinds in GROUPS:
        for option in (each for kind in kinds for each in fields(kind)):
            yield option, option.metadata["use"]


def settings_of(options: Options) -> dict[str, Any]:
    """Return the values of passed options that set fields of `Settings`, keyed by field."""
    values = ((use.setting, getattr(options, option.name)) for option, use in declared())
    return {setting: value for setting, value in values if setting and value is not None}


def worker_variables(options: Options) -> dict[str, str]:
    """Return the environment variables through which workers read the options that were passed."""
    env = {}
    for option, use in declared():
        value = getattr(options, option.name)
        if not use.for_workers or value == option.default:
            continue
        for (_, metavar, _, _), more in option.metadata["flags"]:
            if variable := more.get("variable"):
                if metavar is None:
                    env[variable] = str(int(value == more.get("const", True)))
                else:
                    env[variable] = str(value).removesuffix(".0")
    return env


def build_parser() -> ArgumentParser:
    """Return the parser with all flags, in groups."""
    parser = ArgumentParser(
        prog="elasticrun",
        usage="elasticrun [flags] program [arguments of the program]",
        description=DESCRIPTION,
        epilog=EXAMPLES,
    )
    for title, text, kinds in GROUPS:
        add = parser.group(title, text)
        for kind in kinds:
            add_declared(add, kind)
    add("-h --help", None, None, "Show the most used flags and exit.", action=ShortHelp, nargs=0)
    add("--help-all", None, None, "Show all flags and exit.", action="help")
    add_refused(add)
    _add_without_meaning(
        parser.group(
            "accepted from Horovod, without effect",
            "A log line at startup explains why a flag has no effect.",
        )
    )
    return parser


parser = functools.cache(build_parser)


def _add_without_meaning(add: Group) -> None:
    def valued(name: str, convert: Any, text: str, key: str = "", variable: str = "") -> None:
        keys = [key] if key else []
        rest = {"dest": name, "const": True, "variable": variable, "keys": keys}
        add(name, "X", convert, text, action=IgnoredFlag, **rest)

    text = "File for autotuning trials (no effect)."
    valued("--autotune-log-file", str, text, "autotune.log_file", "HOROVOD_AUTOTUNE_LOG")
    text = "Number of initial autotuning samples to discard (no effect)."
    valued("--autotune-warmup-samples", whole(0), text, "autotune.warmup_samples")
    text = "Number of steps per autotuning sample (no effect)."
    valued("--autotune-steps-per-sample", whole(0), text, "autotune.steps_per_sample")
    text = "Maximum number of autotuning samples (no effect)."
    valued("--autotune-bayes-opt-max-samples", whole(0), text, "autotune.bayes_opt_max_samples")
    text = "Noise level assumed by autotuning (no effect)."
    valued("--autotune-gaussian-process-noise", number, text, "autotune.gaussian_process_noise")
    text, key = "Number of NCCL streams (no effect).", "library_options.num_nccl_streams"
    valued("--num-nccl-streams", whole(0), text, key, "HOROVOD_NUM_NCCL_STREAMS")
    valued("--mpi-args", str, "Arguments of mpirun (no effect).")
    valued("--binding-args", str, "Arguments for MPI process binding (no effect).")
    for name, text, key in (
        (
            "hierarchical-allreduce",
            "Use a two-level allreduce (no effect).",
            "params.hierarchical_allreduce",
        ),
        (
            "hierarchical-allgather",
            "Use a two-level allgather (no effect).",
            "params.hierarchical_allgather",
        ),
        ("torus-allreduce", "Use a torus allreduce (no effect).", "params.torus_allreduce"),
        ("autotune", "Tune fusion and cycle time automatically (no effect).", "autotune.enabled"),
        (
            *("mpi-threads-disable", "Use MPI without threads (no effect)."),
            "library_options.mpi_threads_disable",
        ),
    ):
        on, off = f"--{name}", f"--no-{name}"
        variable = f"HOROVOD_{name.upper().replace('-', '_')}"
        rest = {"action": IgnoredFlag, "dest": on, "nargs": 0}
        shown = f"{text} Opposite: {off}."
        add(on, None, None, shown, const=True, variable=variable, keys=[f"{key}=true"], **rest)
        add(off, None, None, argparse.SUPPRESS, const=False, keys=[f"{key}=false"], **rest)


def why_without_meaning(flag: str) -> str:
    """Return the reason, as a clause, why a Horovod flag has no effect here."""
    if flag.startswith("--autotune"):
        return "autotuning is not supported; set --fusion-threshold-mb and --cycle-time-ms instead"
    return {
        "--hierarchical-allreduce": _BY_ITSELF,
        "--hierarchical-allgather": _BY_ITSELF,
        "--torus-allreduce": _NCCL_CHOOSES,
        "--num-nccl-streams": "each group of ranks has a separate communicator and stream",
    }.get(flag, "workers do not use MPI")


_BY_ITSELF = (
    "ranks of a host always reduce in shared memory first, then with other hosts; on GPUs, NCCL "
    "chooses the algorithm (override with NCCL_ALGO)"
)
_NCCL_CHOOSES = "NCCL chooses the algorithm for the network (override with NCCL_ALGO)"
