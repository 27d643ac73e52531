"""Program ``elasticrun`` (also ``horovodrun``): converts flags to a validated job, runs it, and returns its exit code.

This is the only module of the driver that reads the environment. All errors that can be detected before any process is
started are reported here, in one sentence and with exit code 2. Precedence: command line, configuration file,
environment, default.
"""

from __future__ import annotations

import argparse
import asyncio
import difflib
import os
import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from elastic.checkpoints.options import RUN
from elastic.driver.commandline.options import flags, torchrun_flags
from elastic.driver.commandline.options.argument_parser import seconds
from elastic.driver.commandline.options.checkpoint_options import (
    checkpoint_plan,
    finished_before,
    note_finished,
    rerun_reason,
    same_command_of,
)
from elastic.driver.commandline.options.config_file import read_config
from elastic.driver.commandline.options.flags import Options
from elastic.driver.commandline.options.multi_host_options import fleet_plan, pod_source
from elastic.driver.commandline.options.script_flags import ScriptFlags
from elastic.driver.commandline.program_check import check_command, run_by_python
from elastic.driver.commandline.setup import check_build
from elastic.driver.discovery.script import find_script
from elastic.driver.discovery.slurm import allocation
from elastic.driver.job.job import Job, most_workers
from elastic.driver.job.multi_host_plan import provided
from elastic.driver.job.provider import Provider
from elastic.driver.job.start_cleanup import StartCleanup
from elastic.driver.journal.file_journal import check_own
from elastic.driver.launch import mistyped_variables
from elastic.driver.launch.standard_input import check_stdin
from elastic.driver.launch.worker_environment import threads_per_worker
from elastic.driver.network.host_lists import ThisHost, parse_hosts, read_hostfile, show
from elastic.driver.network.local_interfaces import alone_address, free_port, worker_network
from elastic.driver.preemption import watch
from elastic.driver.processes import preloaded_pool
from elastic.driver.processes.console import replace_closed_streams
from elastic.driver.reasons import counted
from elastic.driver.settings import UNBOUNDED, Settings
from elastic.errors import Invalid
from elastic.protocol.switches import digests, switch
from elastic.rendezvous.nccl_settings import CONNECT_TIMEOUT_S

if TYPE_CHECKING:
    from elastic.driver.job.start import Outcome

T = TypeVar("T")

# Variables that only workers use. They are checked here to report an error once, before workers are started.
_WORKERS_SWITCHES = (
    "ELASTIC_CHECKS",
    "ELASTIC_NATIVE",
    "HOROVOD_DYNAMIC_PROCESS_SETS",
    "HOROVOD_DISABLE_GROUP_FUSION",
)
_DEFAULT_VALUES = {
    # These values equal Horovod's defaults, so the user may not have set them.
    ("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "0"),
    ("HOROVOD_NUM_NCCL_STREAMS", "0"),
    ("HOROVOD_NUM_NCCL_STREAMS", "1"),
    ("HOROVOD_TIMELINE", "DYNAMIC"),  # with DYNAMIC, the script passes the file to start_timeline()
}
# Log level at which to report an elasticrun flag that follows a program that may define flags itself.
# The level of the last four options is lower, because programs often define flags with these names.
_MISPLACED = {
    **dict.fromkeys(("num_proc", "min_num_proc", "max_num_proc"), "warning"),
    **dict.fromkeys(
        ("checkpoint_dir", "host_discovery_script", "journal", "output_filename"), "info"
    ),
}
PROGRAM_ALIKE = (
    0.75  # minimum similarity (0 to 1) between a program name and a command to suggest the command
)
NAMES = ("elasticrun", "horovodrun")
COMMANDS = ("jobs", "status", "scale", "drain", "remove", "stacks", "logs", "stop")
OTHER_COMMANDS = ("agent", "secret", "k8s", "explain", "replay", "checkpoints", "docs", "doctor")
# The output of these commands may be piped to a program that exits early, such as `head`.
PIPED_COMMANDS = (*COMMANDS, *OTHER_COMMANDS[2:])
_MIB = 1 << 20
_A_DAY_S = 86_400.0
_SLACK_S = 60.0  # margin by which collectives time out after the driver has acted on a hang


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``elasticrun`` and return its exit code.

    Args:
        arguments: words of the command line. The default is ``sys.argv[1:]``.
    """
    replace_closed_streams()
    arguments = sys.argv[1:] if arguments is None else arguments
    environ = dict(os.environ)
    try:
        if arguments and arguments[0] in ("agent", "secret"):
            from elastic.driver.commandline import agent_cli

            return agent_cli.main(arguments, environ)
        if arguments and arguments[0] == "k8s":
            from elastic.driver.commandline.kubernetes import kubernetes_cli

            return kubernetes_cli.main(arguments[1:])
        if arguments and arguments[0] == "explain":
            from elastic.driver.commandline.offline import explain_cli

            return explain_cli.main(arguments[1:], environ)
        if arguments and arguments[0] == "replay":
            from elastic.driver.commandline.offline import replay_cli

            return replay_cli.main(arguments[1:], environ)
        if arguments and arguments[0] in COMMANDS:
            from elastic.driver.commandline.running_jobs import job_commands

            return job_commands.main(arguments[0], arguments[1:], environ)
        if arguments and arguments[0] == "checkpoints":
            from elastic.driver.commandline.offline import checkpoints_cli

            return checkpoints_cli.main(arguments[1:])
        if arguments and arguments[0] == "docs":
            from elastic.driver.commandline.setup import docs_cli

            return docs_cli.main(arguments[1:])
        if arguments and arguments[0] == "doctor":
            from elastic.driver.commandline.setup import doctor_cli

            return doctor_cli.main(arguments[1:], environ)
        _check_program(arguments, environ)
        options = read_options(arguments, environ)
        if options.version:
            print(check_build.version())
            return 0
        if options.check_build:
            print(check_build.describe(check_build.probe()))
            return 0
        if options.program_from_pods:
            options.command = _program_from_pods(options, environ)
        return _run_unless_finished(options, environ)
    except Invalid as error:
        print(f"{_called()}:", str(error).replace("\n", " "), file=sys.stderr)
        return 2
    except OSError as error:
        if isinstance(error, BrokenPipeError) and arguments and arguments[0] in PIPED_COMMANDS:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            return 128 + signal.SIGPIPE
        print(f"{_called()}: the driver can't start: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _check_program(arguments: Sequence[str], environ: Mapping[str, str]) -> None:
    """Raise Invalid if the first word is a misspelled command, which would otherwise be run as a program."""
    word = arguments[0] if arguments else ""
    if (
        word[:1] in ("", "-")
        or os.path.exists(word)
        or shutil.which(word, path=environ.get("PATH"))
    ):
        return
    near = _nearest_command(word)
    hint = f"did you mean elasticrun {near}?" if near else "see elasticrun --help"
    raise Invalid(f"{word} is neither an elasticrun command nor a program; {hint}")


def _nearest_command(word: str, alike: float = 0.6) -> str:
    near = difflib.get_close_matches(word, [*COMMANDS, *OTHER_COMMANDS], 1, alike)
    return near[0] if near else ""


def _command_meant(command: Sequence[str]) -> str:
    """Suggest a command if a program name, such as ``stat``, may be misspelled. Otherwise return an empty string."""
    near = _nearest_command(command[0], PROGRAM_ALIKE) if command else ""
    return f"; or did you mean elasticrun {near}?" if near else ""


def _called() -> str:
    """Return the name by which the user called this program, ``elasticrun`` or ``horovodrun``."""
    name = os.path.basename(sys.argv[0])
    return name if name in NAMES else NAMES[0]


def _run_unless_finished(options: Options, environ: Mapping[str, str]) -> int:
    """Run the job and return its exit code, or return 0 if the job has already finished.

    Raises:
        Invalid: an option of the job is invalid.
        OSError: the driver cannot bind an address or write one of its files.
    """
    same = same_command_of(options, environ)
    found = None if same is None else finished_before(same, options)
    if same is not None and found is not None:
        print(
            f"{_called()}: this job already finished, at {found}: {same.storage.url}/{found.name}\n"
            "  To train further, change the script or its arguments, start a new job with --fresh, or continue from a"
            " commit with --from.",
            file=sys.stderr,
        )
        return 0
    reason = None if same is None else rerun_reason(same, options)
    if reason is not None:
        print(
            f"{_called()}: training had already finished, but the job runs again: {reason.value}",
            file=sys.stderr,
        )
    job = make_job(options, environ)
    outcome = asyncio.run(_run(job))
    if outcome.code == 0 and same is not None:
        note_finished(same, int(job.settings.env[RUN]))
    return outcome.code or int(outcome.unreported)


async def _run(job: Job) -> Outcome:
    from elastic.driver.job.start import start

    return await start(job)


def _program_from_pods(options: Options, environ: Mapping[str, str]) -> list[str]:
    """Return the program of the worker pods. Waits for the first pod.

    Raises:
        Invalid: the command line also contains a program, hosts are not pods, or the pods have no valid program.
    """
    pods = pod_source(options, environ)
    if pods is None:
        raise Invalid("--program-from-pods requires --kubernetes: pass --kubernetes")
    if options.command:
        raise Invalid(
            f"--program-from-pods and the program {options.command[0]} can't be combined: omit one of them"
        )
    from elastic.driver.discovery.kubernetes.api_client import ApiClient
    from elastic.driver.discovery.kubernetes.pod_program import find_program

    def log(text: str) -> None:
        print(f"{_called()}: {text}", file=sys.stderr, flush=True)

    return find_program(ApiClient(pods.selector, pods.namespace), log)


# ---- options ---------------------------------------------------------------------------------------------------------


def read_options(arguments: Sequence[str], environ: Mapping[str, str]) -> Options:
    """Return the options from command line, configuration file and environment.

    The command line takes precedence over the file, and the file over the environment.

    Raises:
        Invalid: a value is invalid. The message names the flag, the file or the variable.
    """
    options = flags.parse(arguments)
    words = [
        (f"{flag}={environ[name]}", f"environment variable {name}")
        for name, flag in flags.parser().variables.items()
        if environ.get(name) and (name, environ[name]) not in _DEFAULT_VALUES
    ]
    words += _switches(environ) + _fusion(environ)
    if options.config_file is not None:
        words += read_config(options.config_file, flags.parser().keys)
    for word, source in words:
        try:
            flags.parse([word])
        except Invalid as error:
            raise Invalid(f"{source}: {error}") from None
    # Put the command line last, because argparse uses the last value of a flag.
    return flags.parse([*(word for word, _ in words), *arguments])


def _switches(environ: Mapping[str, str]) -> list[tuple[str, str]]:
    switches = flags.parser().switches
    on = [name for name in (*switches, *_WORKERS_SWITCHES) if switch(environ, name)]
    digests(environ)
    return [(switches[name], f"environment variable {name}") for name in on if name in switches]


def _fusion(environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """Convert Horovod's environment variable for the fusion threshold, in bytes, to this package's flag, in MiB."""
    name = "HOROVOD_FUSION_THRESHOLD"
    text = environ.get(name)
    if not text:
        return []
    if not text.isdecimal():
        raise Invalid(f"{name} is {text!r}: set it to a whole number of bytes")
    return [(f"--fusion-threshold-mb={int(text) / _MIB!r}", f"environment variable {name}")]


# ---- the job ---------------------------------------------------------------------------------------------------------


def make_job(
    options: Options,
    environ: Mapping[str, str],
    *,
    this_host: ThisHost | None = None,
    cores: int | None = None,
    provider: Provider | None = None,
) -> Job:
    """Validate all options and fill in the defaults. Creates the output folder.

    Args:
        options: options as given by the user.
        environ: environment of the driver.
        this_host: object that recognizes names of this machine.
        cores: number of cores that the workers share (default: those available to this process).
        provider: engine that supplies the hosts, or None.

    Raises:
        Invalid: an option is invalid. Files created by this call are removed.
    """
    traces = StartCleanup()
    with traces.removed_on_error():
        return _checked_job(options, environ, traces, this_host, cores, provider)


def _checked_job(
    options: Options,
    environ: Mapping[str, str],
    traces: StartCleanup,
    this_host: ThisHost | None,
    cores: int | None,
    provider: Provider | None,
) -> Job:
    if options.controller != "gloo":
        raise Invalid(
            f"--{options.controller} is not supported: omit it. Workers are started directly and communicate"
            " over Gloo or NCCL"
        )
    cores = cores or len(os.sched_getaffinity(0))
    options = torchrun_flags.translated(options, cores, _gpus())
    np, workers_min, workers_max, elastic = _workers(options)
    this_host = this_host or ThisHost()
    standbys = _given(options.standbys, 0)
    hosts = _hosts(options, workers_max, standbys, cores) if provider is None else None
    own_slots = hosts is not None and options.hosts is None and options.hostfile is None
    elsewhere = {host for host in hosts or () if this_host.elsewhere(host) is not None}
    fleet = fleet_plan(options, environ, elsewhere=bool(elsewhere))
    if provider is not None:
        fleet = provided(fleet, provider)
    command = _command(options, sys.executable if not fleet.needed else "python")
    slurm = allocation(environ, options.slots_per_host) if options.slurm else None
    script = None
    if options.host_discovery_script is not None:
        script = find_script(options.host_discovery_script, path=environ.get("PATH"))
    elif hosts is not None and np > sum(hosts.values()):
        raise Invalid(
            f"{np} workers need {np} slots, but {show(hosts)} has {sum(hosts.values())}: list more slots, or lower"
            " -np"
        )
    if hosts is not None and standbys and sum(hosts.values()) <= workers_max:
        raise Invalid(
            f"--standbys {standbys} needs slots beyond --max-np {workers_max}, but {show(hosts)} has"
            f" {sum(hosts.values())}: list more slots, or lower --max-np"
        )
    bind = "" if fleet.needed else alone_address(options.network_interfaces or ())
    timeline = _writable_place("--timeline-filename", options.timeline_filename)
    options = replace(options, timeline_filename=timeline)
    checkpoints = checkpoint_plan(options, elastic=elastic, traces=traces)
    env = _worker_additions(options, environ) | checkpoints.env
    if elastic:
        env["ELASTIC_MIN_WORKERS"] = str(workers_min)
    env |= _torch_additions(options, environ, bind, next(iter(hosts or ()), ""))
    notes = _notes(options, environ, elastic=elastic) + checkpoints.notes
    if hosts is not None and (starting := min(workers_max, sum(hosts.values()))) > np:
        text = f"starting {starting} workers, the maximum that --max-np and the slots allow; training needs at least"
        notes.append(("info", f"{text} {workers_min}"))
    if options.driver_port is not None and not fleet.needed and script is None:
        notes.append(
            (
                "warning",
                (
                    f"--driver-port {options.driver_port} has no effect: this job has no agents, since all workers"
                    " run here"
                ),
            )
        )
    # With a discovery script, the number of slots is unknown here, so each worker's share of the cores is computed when
    # the worker is started.
    if "OMP_NUM_THREADS" not in environ and not fleet.needed and hosts is not None:
        workers = min(workers_max + standbys, sum(hosts.values()))
        threads = threads_per_worker(cores, workers)
        env["OMP_NUM_THREADS"] = str(threads)
        setting = f"OMP_NUM_THREADS={threads} ({cores} cores, up to {counted(workers, 'worker')})"
        notes.append(("info", f"{setting} for each worker, since it is unset"))
    cooldown_min_s, cooldown_max_s = _given(
        options.cooldown_range, (Settings.cooldown_min_s, Settings.cooldown_max_s)
    )
    job = Job(
        command=command,
        settings=Settings(
            np=np,
            workers_min=workers_min,
            workers_max=workers_max,
            elastic=elastic,
            cooldown_min_s=cooldown_min_s,
            cooldown_max_s=cooldown_max_s,
            silence_s=_given(options.lease, Settings.lease_s),
            gpu_limit_s=_own_timeout_s(options, environ) or Settings.gpu_limit_s,
            restarts=checkpoints.restarts,
            judge_scripts=True,
            durable=bool(checkpoints.env),
            starting_max=cores if own_slots else None,
            timeline=timeline,
            env=env,
            **_stall_limits(options),
            **flags.settings_of(options),
        ),
        hosts=hosts,
        own_slots=own_slots,
        script=script,
        allocation=slurm,
        fleet=fleet,
        slots_per_host=_given(options.slots_per_host, 1),
        environ={
            **environ,
            **(worker_network(bind, environ) if bind and options.network_interfaces else {}),
        },
        bind=bind,
        begins=checkpoints.begins,
        journal=_writable_file(options.journal, traces),
        summary=options.summary,
        report=_report(options.report),
        metrics=_metrics(options),
        dashboard=_dashboard(options.dashboard),
        opentelemetry=options.opentelemetry,
        preemption=_preemption(options),
        preload=_preload(options, elastic=elastic),
        stdin_rank=_stdin_rank(options, workers_max, by_agents=fleet.needed),
        tensorboard=_writable_dir("--tensorboard", options.tensorboard, traces),
        output_dir=_writable_dir("--output-filename", options.output_filename, traces),
        prefix_timestamps=options.prefix_output_with_timestamp,
        log_level=options.log_level or ("DEBUG" if options.verbose else "INFO"),
        log_timestamps=_given(options.log_timestamps, True),
        notes=notes,
        refused=traces.remove,
    )
    # Check the program last, because it follows the flags on the command line.
    if not fleet.needed:
        check_command(command, path=environ.get("PATH"))
    elif not command:
        check_command([], path=None)
    return job


def _report(path: str | None) -> str | None:
    """Return the absolute path of the report.

    Raises:
        Invalid: the path is not writable, or is a file that is not a report.
    """
    place = _writable_place("--report", path, replaces=True)
    if place is not None:
        from elastic.driver.monitoring.explain.report_at_job_end import BEGINNING, check_replaceable

        check_replaceable(Path(place), BEGINNING)
    return place


def _preemption(options: Options) -> str:
    """Return the source of preemption notices from ``--preemption``.

    Raises:
        Invalid: the value is neither a known source nor a command.
    """
    wanted = _given(options.preemption, watch.AUTO)
    watch.check(wanted)
    return wanted


def _preload(options: Options, *, elastic: bool) -> str:
    """Return the value of ``--preload``, or an empty string for a static job, which restarts no worker.

    Raises:
        Invalid: a word is not a module name, or the number of processes is out of range.
    """
    wanted = _given(options.preload, preloaded_pool.AUTO if elastic else preloaded_pool.OFF)
    try:
        names, count = preloaded_pool.read(wanted)
    except ValueError as error:
        raise Invalid(f"--preload {wanted}: {error}") from error
    return ",".join([*names, str(count)]) if count else ""


def _stdin_rank(options: Options, workers_max: int, *, by_agents: bool) -> int | None:
    rank = options.stdin
    check_stdin(rank, workers_max, by_agents=by_agents)
    if rank is not None:
        try:
            behind = os.isatty(0) and os.tcgetpgrp(0) != os.getpgrp()
        except OSError:  # standard input is the terminal of another session
            behind = False
        if behind:
            raise Invalid(
                f"--stdin {rank} needs the terminal, but this command runs in the background: run the command in"
                " the foreground, or redirect its input"
            )
    return rank


def _worker_additions(options: Options, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that flags add to every worker's environment, replacing inherited values."""
    env = {
        "HOROVOD_GLOO_TIMEOUT_SECONDS": f"{CONNECT_TIMEOUT_S:g}",
        "ELASTIC_COLLECTIVE_TIMEOUT": f"{_collective_timeout_s(options, environ):g}",
        **flags.worker_variables(options),
    }
    if options.tcp:
        env["NCCL_IB_DISABLE"] = "1"
    if options.allow_inexact:
        env["ELASTIC_ALLOW_INEXACT"] = "1"
    if options.digests:
        env["ELASTIC_DIGESTS"] = "tensors"
    if options.fusion_threshold_mb is not None:
        env["HOROVOD_FUSION_THRESHOLD"] = str(int(options.fusion_threshold_mb * _MIB))
    return env


def _torch_additions(
    options: Options, environ: Mapping[str, str], bind: str, first_host: str
) -> dict[str, str]:
    """Return the environment variables that a script written for torch.distributed needs.

    Rank 0 listens at the address in these variables unless the script uses this package's backend.

    Args:
        options: options of the job.
        environ: environment of the driver.
        bind: address at which workers listen, or empty if they run on several hosts.
        first_host: host of rank 0, if it is known.
    """
    name = options.job_name or uuid.uuid4().hex
    env = {
        "ELASTIC_TORCH_BACKEND": _given(options.torch_backend, torchrun_flags.BACKENDS[0]),
        "TORCHELASTIC_RUN_ID": name,
    }
    address = options.master_addr or environ.get("MASTER_ADDR") or bind or first_host
    port = options.master_port or environ.get("MASTER_PORT") or (free_port(bind) if bind else 29500)
    return env | ({"MASTER_ADDR": address, "MASTER_PORT": str(port)} if address else {})


def _gpus() -> int:
    try:
        return len(os.listdir("/proc/driver/nvidia/gpus"))
    except OSError:
        return 0


def _command(options: Options, python: str) -> list[str]:
    if options.module:
        if options.no_python:
            raise Invalid("-m and --no-python can't be combined: keep only one of them")
        return [python, "-m", *options.command] if options.command else []
    return options.command if options.no_python else run_by_python(options.command, python)


def _stall_limits(options: Options) -> dict[str, Any]:
    if options.stall_check is False:
        return dict.fromkeys(("idle_s", "busy_warning_s", "busy_s", "gpu_hang_s"), 0.0)
    warning_s = _given(options.busy_warning, options.stall_warning)
    busy_s = _given(options.busy_timeout, options.stall_shutdown)
    busy_s = _given(busy_s, Settings.busy_s)
    # A static job does not replace fenced workers, so allow an idle worker as much time as a busy one: it may be
    # waiting for an upload.
    idle_s = Settings.idle_s if _is_elastic(options) else busy_s
    return {
        "idle_s": _given(options.idle_timeout, idle_s),
        "busy_warning_s": _given(warning_s, Settings.busy_warning_s),
        "busy_s": busy_s,
        "gpu_hang_s": _given(options.gpu_hang_timeout, Settings.gpu_hang_s),
    }


def _own_timeout_s(options: Options, environ: Mapping[str, str]) -> float | None:
    if options.gloo_timeout_seconds is not None:
        return options.gloo_timeout_seconds
    text = environ.get("ELASTIC_COLLECTIVE_TIMEOUT")
    if not text:
        return None
    try:
        return seconds(text)
    except argparse.ArgumentTypeError as error:
        raise Invalid(f"ELASTIC_COLLECTIVE_TIMEOUT: {error}") from None


def _collective_timeout_s(options: Options, environ: Mapping[str, str]) -> float:
    """Return the timeout of collectives in Gloo, in seconds.

    The timeout is a last resort, because the driver detects a hang much earlier.
    """
    own_s = _own_timeout_s(options, environ)
    if own_s is not None:
        return own_s
    busy_s: float = _stall_limits(options)["busy_s"]
    return busy_s + _SLACK_S if busy_s else _A_DAY_S


def _metrics(options: Options) -> tuple[str, int] | None:
    if options.metrics_port is None:
        if options.metrics_host is not None:
            raise Invalid("--metrics-host requires --metrics-port: pass --metrics-port PORT")
        return None
    if options.metrics_port > 65535:
        raise Invalid(f"--metrics-port {options.metrics_port} is not a port: pass 1 to 65535")
    return _given(options.metrics_host, "127.0.0.1"), options.metrics_port


def _dashboard(text: str | None) -> tuple[str, int] | None:
    """Parse the value of ``--dashboard``. Return the address and port.

    An address without brackets is an IPv4 address or a name.

    Raises:
        Invalid: the text does not have the form [ADDRESS]:PORT.
    """
    if text is None:
        return None
    address, _, port = text.rpartition(":")
    bare = address.removeprefix("[").removesuffix("]")
    if not port.isdecimal() or int(port) > 65535 or (":" in address and bare == address):
        raise Invalid(
            f"--dashboard {text} is not an [ADDRESS]:PORT: pass one, as in :8080 or 10.0.0.5:8080"
        )
    return bare or "127.0.0.1", int(port)


def _is_elastic(options: Options) -> bool:
    elastic_flags = (
        options.min_num_proc,
        options.max_num_proc,
        options.host_discovery_script,
        options.kubernetes or None,
        options.kubernetes_service,
        options.etcd if options.hosts is None and options.hostfile is None else None,
    )
    return any(each is not None for each in elastic_flags)


def _workers(options: Options) -> tuple[int, int, int, bool]:
    """Return the values of -np, --min-np and --max-np, and whether the job is elastic.

    Raises:
        Invalid: a value is missing, or the values contradict each other.
    """
    np, least, most = options.num_proc, options.min_num_proc, options.max_num_proc
    elastic = _is_elastic(options)
    if not elastic:
        if np is None:
            late = " before the program" if "-np" in options.command else ""
            meant = _command_meant(options.command)
            raise Invalid(
                f"-np is missing: pass the number of workers to start, as in -np 4{late}{meant}"
            )
        return np, np, np, False
    if np is None and least is None:
        raise Invalid(
            "-np and --min-np are both missing, so the number of workers is unknown: pass the number, as in -np 4"
        )
    if np is None:
        assert least is not None, "one of the two is given"
        np = least
    least = _given(least, np)
    growing = (options.host_discovery_script, options.etcd, options.kubernetes_service)
    grows = options.kubernetes or any(each is not None for each in growing)
    most = _given(most, UNBOUNDED if grows else np)
    # The order of the checks ensures that no error mentions a value that the user has not set.
    if np < least:
        raise Invalid(f"-np {np} is smaller than --min-np {least}: pass --min-np {np} or less")
    if options.num_proc is not None and np > most:
        raise Invalid(f"-np {np} is greater than --max-np {most}: lower -np, or raise --max-np")
    if least > most:
        raise Invalid(
            f"--min-np {least} is greater than --max-np {most}: lower --min-np, or raise --max-np"
        )
    return np, least, most, True


def _hosts(options: Options, workers_max: int, standbys: int, cores: int) -> dict[str, int] | None:
    """Return the number of slots of each host, or None if hosts are discovered.

    Raises:
        Invalid: several sources of hosts were passed, a host entry is invalid, or this machine has too few cores.
    """
    sources = {
        "-H": options.hosts,
        "--hostfile": options.hostfile,
        "--host-discovery-script": options.host_discovery_script,
        "--kubernetes": options.kubernetes or options.kubernetes_service or None,
        "--slurm": options.slurm or None,
    }
    given = [flag for flag, value in sources.items() if value is not None]
    if len(given) > 1:
        raise Invalid(f"{' and '.join(given)} can't be combined: keep only one of them")
    slots = _given(options.slots_per_host, 1)
    if options.hosts is not None:
        hosts = parse_hosts(options.hosts, default_slots=slots)
    elif options.hostfile is not None:
        hosts = read_hostfile(options.hostfile, default_slots=slots)
    elif given or options.etcd is not None:
        return None
    else:
        workers, most = workers_max + standbys, most_workers(cores)
        if workers > most:
            raise Invalid(
                f"{workers} workers are too many for this machine, which has {counted(cores, 'core')}: pass at"
                f" most {most}. To start more anyway, pass -H localhost:{workers}"
            )
        return {"localhost": workers}
    return hosts


def _notes(options: Options, environ: Mapping[str, str], *, elastic: bool) -> list[tuple[str, str]]:
    """Return the lines to log about settings without effect, and about packages that conflict with this one."""
    notes: list[tuple[str, str]] = []
    others = (check_build.other_horovod(), check_build.other_elastic())
    notes += [("warning", other) for other in others if other is not None]
    for name in ("HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS"):
        value = environ.get(name, "")
        # Ignore "gloo": this package sets this value in workers, and a worker may start another job.
        if value.lower() not in ("", "gloo"):
            why = "workers are started directly and communicate over shared memory, Gloo or NCCL"
            notes.append(("warning", f"{name}={value} has no effect: {why}"))
    if options.fresh and options.resume:
        text = "--fresh discards the job that --resume would continue: omit --fresh when you rerun the command"
        notes.append(("info", text))
    notes += _passed_on(options, environ.get("PATH"))
    parser = flags.parser()
    of_flags = {*parser.variables, *parser.switches}
    notes += [("warning", text) for text in mistyped_variables.unread(environ, of_flags)]
    without: dict[str, list[str]] = {}
    for flag, on in options.without_meaning.items():
        if on:
            without.setdefault(flags.why_without_meaning(flag), []).append(flag)
    for why, unused in without.items():
        verb = "have" if len(unused) > 1 else "has"
        notes.append(("warning", f"{', '.join(unused)} {verb} no effect: {why}"))
    if not elastic:
        of_elastic = {
            "--reset-limit": options.reset_limit,
            "--max-restarts": options.max_restarts or None,
            "--blacklist-cooldown-range": options.cooldown_range,
            "--slot-attempts": options.slot_attempts,
            "--host-attempts": options.host_attempts,
        }
        unused = [flag for flag, value in of_elastic.items() if value is not None]
        if unused:
            notes.append(
                ("warning", f"these flags have no effect without --min-np: {', '.join(unused)}")
            )
    return notes


def _passed_on(options: Options, path: str | None) -> list[tuple[str, str]]:
    """Return warnings about flags after the program that may have been intended for elasticrun.

    Flags that the program defines, or that were also passed to elasticrun, are omitted.
    """
    given = {word.partition("=")[0] for word in takewhile("--".__ne__, options.command[1:])}
    notes: list[tuple[str, str]] = []
    script: ScriptFlags | None = None
    default = Options()
    for action in flags.parser().actions:
        # Ignore single-letter flags, which are ambiguous, and --help and --version, which most programs define.
        late = [name for name in action.option_strings if name in given and len(name) > 2]
        own = getattr(default, action.dest, None)
        if (
            not late
            or action.dest in ("version", "check_build")
            or not hasattr(default, action.dest)
        ):
            continue
        script = script or ScriptFlags(options.command, module=options.module, path=path)
        level = "warning" if script.known else _MISPLACED.get(action.dest)
        if level and getattr(options, action.dest) == own and not script.defines(late[0]):
            text = f"{late[0]} follows the program, which receives it: put it before {options.command[0]} if it is for"
            notes.append((level, f"{text} {_called()}"))
    return notes


def _writable_dir(flag: str, path: str | None, traces: StartCleanup) -> str | None:
    if path is None:
        return None
    traces.folder(path)
    try:
        os.makedirs(path, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except FileExistsError:
        raise Invalid(f"{flag} {path} is a file: pass a directory") from None
    except OSError as error:
        raise Invalid(
            f"{flag} {path} is not writable: {error.strerror}. Pass another directory"
        ) from None
    return os.path.abspath(path)


def _writable_file(path: str | None, traces: StartCleanup) -> str | None:
    if path is None:
        return None
    traces.file(path)
    if not os.path.exists(path):
        check_own(Path(path))
    try:
        with open(path, "ab"):
            pass
    except OSError as error:
        raise Invalid(
            f"--journal {path} is not writable: {error.strerror}. Pass another file"
        ) from None
    return os.path.abspath(path)


def _writable_place(flag: str, path: str | None, *, replaces: bool = False) -> str | None:
    """Check that a file can be written at a path, and return the path. Returns None for None.

    The file is not created, because an empty file would be an invalid timeline or report.

    Args:
        flag: the flag with this path.
        path: the path, or None.
        replaces: whether an existing file will be replaced with a new file rather than modified.

    Raises:
        Invalid: the file cannot be written.
    """
    if path is None:
        return None
    folder = os.path.dirname(os.path.abspath(path))
    if not path:
        trouble = "the path is empty"
    elif os.path.isdir(path):
        trouble = "it is a directory"
    elif os.path.exists(path) and not os.path.isfile(path):
        trouble = "it is a device, a pipe or a socket"
    elif not os.path.isdir(folder):
        trouble = f"the directory {folder} does not exist"
    elif os.path.exists(path) and not os.access(path, os.W_OK):
        trouble = "permission denied, or a read-only file system"
    else:
        try:
            # Create a temporary file, because the permission bits of a file system such as /proc do not show whether it
            # accepts files.
            if replaces or not os.path.exists(path):
                tempfile.TemporaryFile(dir=folder).close()
            return os.path.abspath(path)
        except OSError as error:
            trouble = f"{folder} accepts no new files: {error.strerror}"
    raise Invalid(f"{flag} {path or repr(path)} is not writable: {trouble}. Pass another file")


def _given(value: T | None, default: T) -> T:
    return default if value is None else value


if __name__ == "__main__":
    sys.exit(main())
