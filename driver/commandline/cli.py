"""Program ``elasticrun`` (also ``horovodrun``): converts flags to a validated job, runs it, and returns its exit code.

This is the only module of the driver that reads the environment. All errors that can be detected before any process is
started are reported here, in one sentence and with exit code 2. Precedence: command line, configuration file,
environment, default.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from elastic.checkpoints.options import RUN
from elastic.driver.commandline.options import flags, torchrun_flags
from elastic.driver.commandline.options.argument_parser import or_default
from elastic.driver.commandline.options.command_names import (
    COMMANDS,
    PIPED_COMMANDS,
    called,
    check_first_word,
)
from elastic.driver.commandline.options.config_file import read_config
from elastic.driver.commandline.options.environment_variables import (
    flags_from_environment,
    torch_additions,
    worker_additions,
)
from elastic.driver.commandline.options.flags import Options
from elastic.driver.commandline.options.hang_timeouts import own_timeout_s, stall_limits
from elastic.driver.commandline.options.listen_addresses import dashboard_address, metrics_address
from elastic.driver.commandline.options.misplaced_flags import misplaced_flags
from elastic.driver.commandline.options.multi_host_checks import fleet_plan, pod_source
from elastic.driver.commandline.options.starting_checkpoint import (
    checkpoint_plan,
    finished_before,
    note_finished,
    rerun_reason,
    same_command_of,
)
from elastic.driver.commandline.options.worker_count import slots_of_hosts, worker_counts
from elastic.driver.commandline.options.writable_paths import (
    report_path,
    writable_dir,
    writable_file,
    writable_place,
)
from elastic.driver.commandline.program_check import check_command, run_by_python
from elastic.driver.commandline.setup import check_build
from elastic.driver.discovery.script import find_script
from elastic.driver.discovery.slurm import allocation
from elastic.driver.job.job import Job
from elastic.driver.job.multi_host_plan import provided
from elastic.driver.job.provider import Provider
from elastic.driver.job.start_cleanup import StartCleanup
from elastic.driver.launch import mistyped_variables
from elastic.driver.launch.standard_input import check_stdin
from elastic.driver.launch.worker_environment import threads_per_worker
from elastic.driver.network.host_lists import ThisHost, show
from elastic.driver.network.local_interfaces import alone_address, worker_network
from elastic.driver.preemption import watch
from elastic.driver.processes import preloaded_pool
from elastic.driver.processes.console import replace_closed_streams
from elastic.driver.reasons import counted
from elastic.driver.settings import Settings
from elastic.errors import Invalid

if TYPE_CHECKING:
    from elastic.driver.job.start import Outcome


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
        check_first_word(arguments, environ)
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
        print(f"{called()}:", str(error).replace("\n", " "), file=sys.stderr)
        return 2
    except OSError as error:
        if isinstance(error, BrokenPipeError) and arguments and arguments[0] in PIPED_COMMANDS:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            return 128 + signal.SIGPIPE
        print(f"{called()}: the driver can't start: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


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
            f"{called()}: this job already finished, at {found}: {same.storage.url}/{found.name}\n"
            "  To train further, change the script or its arguments, start a new job with --fresh, or continue from a"
            " commit with --from.",
            file=sys.stderr,
        )
        return 0
    reason = None if same is None else rerun_reason(same, options)
    if reason is not None:
        print(
            f"{called()}: training had already finished, but the job runs again: {reason.value}",
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
        print(f"{called()}: {text}", file=sys.stderr, flush=True)

    return find_program(ApiClient(pods.selector, pods.namespace), log)


# ---- options ---------------------------------------------------------------------------------------------------------


def read_options(arguments: Sequence[str], environ: Mapping[str, str]) -> Options:
    """Return the options from command line, configuration file and environment.

    The command line takes precedence over the file, and the file over the environment.

    Raises:
        Invalid: a value is invalid. The message names the flag, the file or the variable.
    """
    options = flags.parse(arguments)
    words = flags_from_environment(environ)
    if options.config_file is not None:
        words += read_config(options.config_file, flags.parser().keys)
    for word, source in words:
        try:
            flags.parse([word])
        except Invalid as error:
            raise Invalid(f"{source}: {error}") from None
    # Put the command line last, because argparse uses the last value of a flag.
    return flags.parse([*(word for word, _ in words), *arguments])


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
    np, workers_min, workers_max, elastic = worker_counts(options)
    this_host = this_host or ThisHost()
    standbys = or_default(options.standbys, 0)
    hosts = slots_of_hosts(options, workers_max, standbys, cores) if provider is None else None
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
    timeline = writable_place("--timeline-filename", options.timeline_filename)
    options = replace(options, timeline_filename=timeline)
    checkpoints = checkpoint_plan(options, elastic=elastic, traces=traces)
    env = worker_additions(options, environ) | checkpoints.env
    if elastic:
        env["ELASTIC_MIN_WORKERS"] = str(workers_min)
    env |= torch_additions(options, environ, bind, next(iter(hosts or ()), ""))
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
    cooldown_min_s, cooldown_max_s = or_default(
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
            silence_s=or_default(options.lease, Settings.lease_s),
            gpu_limit_s=own_timeout_s(options, environ) or Settings.gpu_limit_s,
            restarts=checkpoints.restarts,
            judge_scripts=True,
            durable=bool(checkpoints.env),
            starting_max=cores if own_slots else None,
            timeline=timeline,
            env=env,
            **stall_limits(options),
            **flags.settings_of(options),
        ),
        hosts=hosts,
        own_slots=own_slots,
        script=script,
        allocation=slurm,
        fleet=fleet,
        slots_per_host=or_default(options.slots_per_host, 1),
        environ={
            **environ,
            **(worker_network(bind, environ) if bind and options.network_interfaces else {}),
        },
        bind=bind,
        begins=checkpoints.begins,
        journal=writable_file(options.journal, traces),
        summary=options.summary,
        report=report_path(options.report),
        metrics=metrics_address(options),
        dashboard=dashboard_address(options.dashboard),
        opentelemetry=options.opentelemetry,
        preemption=_preemption(options),
        preload=_preload(options, elastic=elastic),
        stdin_rank=_stdin_rank(options, workers_max, by_agents=fleet.needed),
        tensorboard=writable_dir("--tensorboard", options.tensorboard, traces),
        output_dir=writable_dir("--output-filename", options.output_filename, traces),
        prefix_timestamps=options.prefix_output_with_timestamp,
        log_level=options.log_level or ("DEBUG" if options.verbose else "INFO"),
        log_timestamps=or_default(options.log_timestamps, True),
        notes=notes,
        refused=traces.remove,
    )
    # Check the program last, because it follows the flags on the command line.
    if not fleet.needed:
        check_command(command, path=environ.get("PATH"))
    elif not command:
        check_command([], path=None)
    return job


def _preemption(options: Options) -> str:
    """Return the source of preemption notices from ``--preemption``.

    Raises:
        Invalid: the value is neither a known source nor a command.
    """
    wanted = or_default(options.preemption, watch.AUTO)
    watch.check(wanted)
    return wanted


def _preload(options: Options, *, elastic: bool) -> str:
    """Return the value of ``--preload``, or an empty string for a static job, which restarts no worker.

    Raises:
        Invalid: a word is not a module name, or the number of processes is out of range.
    """
    wanted = or_default(options.preload, preloaded_pool.AUTO if elastic else preloaded_pool.OFF)
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
    notes += misplaced_flags(options, environ.get("PATH"))
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


if __name__ == "__main__":
    sys.exit(main())
