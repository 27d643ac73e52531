"""Commands on a running job: ``elasticrun status``, ``scale``, ``drain`` and others."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic.driver.commandline.options.argument_parser import (
    ArgumentParser,
    add_declared,
    flag,
    seconds,
    switch,
    whole,
)
from elastic.driver.commandline.options.flags import Options
from elastic.driver.commandline.options.multi_host_checks import etcd_access, tls_files
from elastic.driver.commandline.options.multi_host_flags import EtcdFlags, SecurityFlags
from elastic.driver.commandline.running_jobs import job_tables
from elastic.driver.job.operator_api import messages
from elastic.driver.job.operator_api.client import (
    JobAddress,
    JobClient,
    JobUnreachable,
    find_job,
    key_of,
)
from elastic.driver.job.operator_api.runtime_folder import records
from elastic.driver.monitoring.stack_excerpts import training_stack
from elastic.driver.network.secret import read_secret
from elastic.driver.processes.console import shown
from elastic.errors import Invalid

DESCRIPTION = """\
JOB is the name of a job or the process ID of its driver; omit it if only one of your jobs runs on this machine. Pass
--journal to select a job by its journal, --etcd for a job of another machine, or --ray for a detached job on Ray."""

WATCH_S = 0.5
FOLLOW_S = 0.2


@dataclass(frozen=True)
class Verb:
    """Description of a command on a running job.

    Args:
        words: minimum and maximum number of arguments.
        named: whether the command accepts the name of the job as an additional first argument.
    """

    usage: str
    text: str
    words: tuple[int, int]
    flags: tuple[str, ...] = ()  # fields of `CommandOptions` whose flags this command accepts
    named: bool = True


VERBS: dict[str, Verb] = {
    "jobs": Verb("", "List the jobs of this user on this machine.", (0, 0), ("json",), named=False),
    "status": Verb(
        "[JOB]",
        "Show the workers, step, checkpoint age and goodput of a running job.",
        (0, 0),
        ("json", "watch"),
    ),
    "scale": Verb("[JOB] N", "Set the number of workers of a running job to N.", (1, 1), ("wait",)),
    "drain": Verb(
        "[JOB] HOST",
        "Move workers off a host, if --min-np allows it, and start no new ones there.",
        (1, 1),
        ("off",),
    ),
    "remove": Verb(
        "[JOB] WORKER", "Remove a worker, given as rank or host:slot, at its next commit.", (1, 1)
    ),
    "stacks": Verb(
        "[JOB] [RANK]",
        "Show the Python stacks of one worker or of the first eight, innermost script frames first.",
        (0, 1),
        ("all_threads", "log", "json"),
    ),
    "logs": Verb(
        "[JOB] [RANK]",
        "Show the last log lines of the driver and of all workers, or of one worker.",
        (0, 1),
        ("json", "follow", "least_lines"),
    ),
    "stop": Verb(
        "[JOB]",
        ("Stop a running job gracefully, as with SIGTERM; repeat to stop it immediately."),
        (0, 0),
    ),
}


@dataclass
class CommandOptions(Options):
    """Parsed flags of a command on a running job."""

    json: bool = switch("--json", "Print the result as JSON.")
    watch: bool = switch("--watch", "Refresh until Ctrl-C.")
    all_threads: bool = switch(
        "--all-threads", "Show all Python threads and all frames (default: the training thread)."
    )
    log: bool = switch("--log", "Also write the stacks to the job's log.")
    follow: bool = switch("-f --follow", "Follow the log until Ctrl-C or the end of the job.")
    least_lines: int | None = flag(
        "--lines", "N", "Number of log lines to print (default: 100).", whole(1)
    )
    off: bool = switch("--off", "Undo: allow workers on the host again.")
    wait: float | None = flag(
        "--wait", "S", "Wait up to S seconds for N workers to train.", seconds
    )
    journal: str | None = flag("--journal", "FILE", "Select the job that writes this journal.")
    ray: bool = switch("--ray", "Select a detached job on the Ray cluster at RAY_ADDRESS.")


def command_parser(name: str) -> ArgumentParser:
    """Return the parser of one command."""
    verb = VERBS[name]
    parser = ArgumentParser(
        prog=f"elasticrun {name}",
        usage=f"elasticrun {name} [flags] {verb.usage}".rstrip(),
        description=f"{verb.text}\n\n{DESCRIPTION}" if verb.named else verb.text,
    )
    if verb.flags:
        add_declared(parser.group("options"), CommandOptions, *verb.flags)
    if verb.named:
        add = parser.group("job")
        add_declared(add, CommandOptions, "journal", "ray")
        add_declared(add, EtcdFlags)
        add_declared(add, SecurityFlags)
    add = parser.group("general")
    add("-h --help", None, None, "Show this help and exit.", action="help")
    return parser


def main(name: str, arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run a command on a running job, and return the exit code.

    The exit code is 1 if the job rejects the request or is unreachable.

    Raises:
        Invalid: an argument or a flag is invalid, or no job or several jobs match.
    """
    verb = VERBS[name]
    parser = command_parser(name)
    options = CommandOptions()
    own, words = _parted(parser, arguments)
    parser.parse_args(own, namespace=options)
    least, most = verb.words
    job = options.job_name or ""
    if verb.named and not job and len(words) > least and (len(words) > most or _is_job(words[0])):
        job, *words = words
    if not least <= len(words) <= most:
        raise Invalid(
            f"elasticrun {name} got {shlex.join(words) or 'no argument'}, but accepts"
            f" {verb.usage or 'no arguments'}: see elasticrun {name} --help"
        )
    if name == "jobs":
        return _jobs(options, environ)
    try:
        with JobClient(_found(job, options, environ)) as client:
            return _RUN[name](client, words, options)
    except JobUnreachable as error:
        print(f"elasticrun {name}: {error}", file=sys.stderr)
        return 1


def _parted(parser: ArgumentParser, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split arguments into flags and positional arguments, which may be mixed."""
    own: list[str] = []
    words: list[str] = []
    rest = list(arguments)
    while rest:
        flags, rest = parser.split(rest)
        own += flags
        words += rest[:1]
        rest = rest[1:]
    return own, words


def _is_job(word: str) -> bool:
    return not word.isdecimal() and ":" not in word


def found_job(arguments: Sequence[str], environ: Mapping[str, str]) -> JobAddress:
    """Return the running job that ``status`` with these flags selects.

    Raises:
        Invalid: no running job matches, or several do.
    """
    options = CommandOptions()
    command_parser("status").parse_args(arguments, namespace=options)
    return _found(options.job_name or "", options, environ)


def _found(job: str, options: CommandOptions, environ: Mapping[str, str]) -> JobAddress:
    if options.ray:
        return _found_in_ray(job)
    etcd = etcd_access(options, environ)
    if etcd is None:
        return find_job(job, environ, journal=options.journal)
    if not job:
        raise Invalid("--etcd needs the name of the job: pass --job NAME")
    secret = read_secret(options.secret_file, environ)
    if secret is None:
        raise Invalid(
            "--etcd needs the secret of the job, which authenticates commands: pass --secret-file FILE"
        )
    files = tls_files(options.tls_cert, options.tls_key, options.tls_ca)
    tls = None
    if files is not None:
        from elastic.protocol.tls import context

        tls = context(files.cert, files.key, files.ca, server=False)
    from elastic.driver.job.operator_api.find_by_etcd import desk_of

    return JobAddress(job, desk_of(etcd, job), key_of(secret), tls)


def _found_in_ray(job: str) -> JobAddress:
    if not job:
        raise Invalid("no job was given: pass the name of a detached job to --ray")
    try:
        from elastic.driver.ray.detached_drivers import desk_of
    except ModuleNotFoundError:
        raise Invalid(
            "--ray needs Ray, which is not installed: run pip install 'hvd-elastic[ray]'"
        ) from None
    return JobAddress(job, *desk_of(job))


# ---- the commands ----------------------------------------------------------------------------------------------------


def _jobs(options: CommandOptions, environ: Mapping[str, str]) -> int:
    rows = []
    for record in records(environ):
        state: dict[str, Any] | None = None
        try:
            address = JobAddress(record.name, record.address, bytes.fromhex(record.key))
            with JobClient(address) as client:
                state = json.loads(client.ask(messages.AskStatus).data)
        except JobUnreachable:
            if record not in records(environ):
                continue  # the job has ended since it was listed
        rows.append(
            job_tables.job_row(record.name, record.pid, record.began, record.command, state)
        )
    if options.json:
        print(json.dumps(rows))
    else:
        print(shown("\n".join(job_tables.jobs(rows, time.time()))))
    return 0


def _status(client: JobClient, words: Sequence[str], options: CommandOptions) -> int:
    def state() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(client.ask(messages.AskStatus).data)
        return found

    if options.json:
        while True:
            print(json.dumps(state()), flush=True)
            if not options.watch:
                return 0
            time.sleep(WATCH_S)
    if not options.watch:
        print(shown("\n".join(job_tables.status(state()))))
        return 0
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console()
    with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
        while True:
            lines = job_tables.status(state(), most=max(8, console.height - 6))
            live.update(Text(shown("\n".join(lines))), refresh=True)
            time.sleep(WATCH_S)


def _scale(client: JobClient, words: Sequence[str], options: CommandOptions) -> int:
    try:
        workers = whole(1)(words[0])
    except argparse.ArgumentTypeError as error:
        raise Invalid(
            f"elasticrun scale: {error}, as in: elasticrun scale {client.job.name} 4"
        ) from None
    began = time.monotonic()
    code = _print_answer(client, client.ask(messages.AskScale, workers))
    if code or options.wait is None:
        return code
    while time.monotonic() - began < options.wait:
        job = json.loads(client.ask(messages.AskStatus).data)["set"]["job"]
        if job["size"] == workers and job["phase"] == "training":
            took = time.monotonic() - began
            print(f"job {client.job.name}: {workers} workers are training after {took:.1f} s")
            return 0
        time.sleep(0.1)
    print(
        f"job {client.job.name}: only {job['size']} of {workers} workers are training after {options.wait:g} s",
        file=sys.stderr,
    )
    return 1


def _stacks(client: JobClient, words: Sequence[str], options: CommandOptions) -> int:
    name = words[0] if words else ""
    answer = client.ask(messages.AskStacks, name, options.log, options.all_threads)
    stacks: dict[str, str] = json.loads(answer.data) if answer.data else {}
    if options.json:
        print(json.dumps(stacks))
        return 0 if answer.done else 1
    for worker, text in stacks.items():
        if text:
            print(shown(f"---- {worker}\n{text if options.all_threads else training_stack(text)}"))
    return _print_answer(client, answer, prefix="stacks " if answer.done else "")


def _logs(client: JobClient, words: Sequence[str], options: CommandOptions) -> int:
    worker = words[0] if words else ""
    after, most = -1, options.least_lines or 100
    while True:
        try:
            answer = client.ask(messages.AskLogs, worker, after)
        except JobUnreachable:
            if after < 0:
                raise
            return 0  # the job has ended, so its log is complete
        if not answer.done:
            return _print_answer(client, answer)
        after, lines = json.loads(answer.data)
        for line in lines[-most:]:
            print(
                json.dumps(line) if options.json else shown(job_tables.log_line(line)),
                flush=options.follow,
            )
        if not options.follow:
            return 0
        most = len(lines) + 1_000
        time.sleep(FOLLOW_S)


def _print_answer(client: JobClient, answer: messages.Told, prefix: str = "") -> int:
    line = shown(f"job {client.job.name}: {prefix}{answer.text}")
    print(
        line if answer.done else f"elasticrun: {line}",
        file=sys.stdout if answer.done else sys.stderr,
    )
    return 0 if answer.done else 1


_RUN: dict[str, Callable[[JobClient, Sequence[str], CommandOptions], int]] = {
    "status": _status,
    "scale": _scale,
    "drain": lambda client, words, options: _print_answer(
        client, client.ask(messages.AskDrain, words[0], options.off)
    ),
    "remove": lambda client, words, options: _print_answer(
        client, client.ask(messages.AskRemove, words[0])
    ),
    "stacks": _stacks,
    "logs": _logs,
    "stop": lambda client, words, options: _print_answer(client, client.ask(messages.AskStop)),
}
