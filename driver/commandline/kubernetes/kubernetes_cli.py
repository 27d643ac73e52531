"""Command ``elasticrun k8s``, which runs and manages a training job as a Helm release from outside the cluster."""

from __future__ import annotations

import re
import secrets
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from elastic.driver.commandline.kubernetes.kubernetes_release import (
    ApiSilent,
    ChartRelease,
    NameTaken,
)
from elastic.driver.commandline.options.argument_parser import (
    ArgumentParser,
    NameList,
    add_declared,
    flag,
    switch,
    whole,
)
from elastic.errors import Invalid

DESCRIPTION = """\
Run a training job in the cluster of the kubeconfig, or manage one. `run` installs the chart, prints the driver's log,
and removes the release at the end of the job or at Ctrl-C. Requires helm."""

USAGE = """\
elasticrun k8s run --image IMAGE --workers MIN[:PODS] [--queue NAME] [flags] -- COMMAND
       elasticrun k8s status|logs|stop [flags] NAME
       elasticrun k8s scale [flags] NAME PODS"""

RUN = "run"
MOST_PODS = 100_000  # maximum number of worker pods, as in the chart's schema
# Valid job names: the chart derives names of pods and services from them, which limits the length.
NAME = re.compile(r"[a-z]([-a-z0-9]{0,43}[a-z0-9])?")
QUEUE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
IMAGE = re.compile(
    r"[A-Za-z0-9][\w./-]*(:\d+/[\w./-]+)?(:\w[\w.-]{0,127})?(@sha256:[0-9a-f]{64})?", re.ASCII
)
# number of positional arguments of each command
VERBS = {"status": 1, "logs": 1, "stop": 1, "scale": 2}


@dataclass
class KubernetesOptions:
    """Parsed flags of ``elasticrun k8s``."""

    image: str | None = flag("--image", "IMAGE", "Image of driver and workers: registry/train:1.2.")
    workers: str | None = flag(
        "--workers",
        "MIN[:PODS]",
        "Smallest number of workers, and number of worker pods (default of PODS: MIN).",
    )
    gpus: int = flag(
        "--gpus",
        "N",
        "GPUs per worker pod, with one worker each (default: 0).",
        whole(0),
        default=0,
    )
    queue: str | None = flag(
        "--queue", "NAME", "LocalQueue of Kueue that admits the worker pods (default: no queue)."
    )
    jobset: bool = switch(
        "--jobset", "Run as a JobSet: admit all pods together; their number is fixed."
    )
    name: str | None = flag("--name", "NAME", "Name of the job (default: train- and a number).")
    values: list[str] | None = flag(
        "--values",
        "FILE",
        "Values file for the chart; flags take precedence (repeatable).",
        action=NameList,
    )
    settings: list[str] | None = flag(
        "--set", "KEY=VALUE", "Chart value, in helm's syntax (repeatable).", action="append"
    )
    detach: bool = switch(
        "--detach", "Exit after installation; keep the release at the end of the job."
    )
    namespace: str | None = flag(
        "-n --namespace", "NAME", "Namespace (default: that of the kubeconfig)."
    )


def kubernetes_parser() -> ArgumentParser:
    """Return the parser of ``elasticrun k8s``."""
    made = ArgumentParser(prog="elasticrun k8s", usage=USAGE, description=DESCRIPTION)
    of_run = ("image", "workers", "gpus", "queue", "jobset", "name", "values", "settings", "detach")
    add_declared(made.group("job", "Flags of `elasticrun k8s run`."), KubernetesOptions, *of_run)
    add = made.group("general")
    add_declared(add, KubernetesOptions, "namespace")
    add("-h --help", None, None, "Show this help and exit.", action="help")
    return made


def main(arguments: Sequence[str]) -> int:
    """Run ``elasticrun k8s`` and return its exit code. For `run`, it is the exit code of the job.

    Raises:
        Invalid: the verb, a flag or the name of the job is invalid, or no such job exists.
    """
    made = kubernetes_parser()
    verb, rest = (arguments[0], [*arguments[1:]]) if arguments else ("-h", [])
    if verb != RUN and verb not in VERBS:
        made.parse_args([verb] if verb in ("-h", "--help") else [])
        known = ", ".join([RUN, *VERBS])
        raise Invalid(f"unknown verb {verb!r}: use one of {known}")
    options = KubernetesOptions()
    own, words = made.split(rest)
    if verb != RUN:
        count = VERBS[verb]
        more, after = made.split(words[count:])  # flags may also follow the job's name
        own, words = [*own, *more], [*words[:count], *after]
    made.parse_args(own, namespace=options)
    try:
        if verb == RUN:
            return _run(options, words)
        if len(words) != VERBS[verb]:
            wanted = "NAME PODS" if verb == "scale" else "NAME"
            raise Invalid(
                f"no job was given: pass a job name, as in elasticrun k8s {verb} [flags] {wanted}"
            )
        release = ChartRelease(job_name(words[0]), options.namespace)
        if verb == "status":
            print("\n".join(release.lines()), flush=True)
        elif verb == "logs":
            return release.follow(_write, _print)
        elif verb == "stop":
            release.stop()
            _print(f"removed job {release.name}")
        else:
            pods = int(words[1]) if words[1].isdecimal() else -1
            if not 0 <= pods <= MOST_PODS:
                raise Invalid(f"{words[1]!r} is not a number of pods: pass 0 to {MOST_PODS:,}")
            print(f"{release.name}: {release.scale(pods)} -> {pods} worker pods")
    except ApiSilent as error:
        raise Invalid(f"{error}. Try again") from None
    return 0


def job_name(name: str) -> str:
    """Return the name if it is valid as the name of a job. Raises Invalid otherwise."""
    if NAME.fullmatch(name) is None:
        raise Invalid(
            f"{name!r} is not a valid job name in Kubernetes: start with a letter a-z, followed by up to 44"
            " characters of a-z, 0-9 and -"
        )
    return name


def values_of(options: KubernetesOptions, command: Sequence[str]) -> dict[str, Any]:
    """Return the Helm values for the chart. Raises Invalid if a value is missing or invalid."""
    if options.image is None or options.workers is None or not command:
        raise Invalid(
            "run needs --image, --workers and a command, as in: elasticrun k8s run --image train:1.2 --workers 2:8"
            " -- python train.py"
        )
    found = re.fullmatch(r"([1-9]\d*)(?::([1-9]\d*))?", options.workers)
    if found is None:
        raise Invalid(f"--workers {options.workers!r} is invalid: pass MIN or MIN:PODS, as in 2:8")
    least, pods = int(found[1]), int(found[2] or found[1])
    if least > pods * max(1, options.gpus):
        raise Invalid(
            f"--workers is {options.workers}, but {pods} pods can't run {least} workers: pass PODS >= MIN"
        )
    if IMAGE.fullmatch(options.image) is None:
        raise Invalid(
            f"--image is {options.image!r}, which is not an image name: pass a name such as registry/train:1.2"
        )
    queue = options.queue
    if queue is not None and QUEUE.fullmatch(queue) is None:
        raise Invalid(
            f"--queue is {queue!r}, which is not the name of a LocalQueue: use a-z, 0-9 and -"
        )
    repository, tag, digest = image_parts(options.image)
    return {
        "image": {"repository": repository, "tag": tag, "digest": digest},
        "job": {"command": [*command], "minWorkers": least},
        "worker": {"number": pods, "gpus": options.gpus},
        **({} if queue is None else {"kueue": {"queue": queue}}),
        **({"jobset": {"enabled": True}} if options.jobset else {}),
    }


def image_parts(image: str) -> tuple[str, str, str]:
    """Split an image name, which may contain a registry's port, into repository, tag and digest."""
    rest, _, digest = image.partition("@")
    head, colon, tag = rest.rpartition(":")
    if not colon or "/" in tag:
        return rest, "" if digest else "latest", digest
    return head, tag, digest


def _run(options: KubernetesOptions, command: Sequence[str]) -> int:
    values = values_of(options, command)
    name = job_name(options.name or f"train-{secrets.token_hex(3)}")
    release = ChartRelease(name, options.namespace)
    where = f"-n {release.namespace} {release.name}"
    signal.signal(signal.SIGTERM, _interrupted)
    if release.exists():
        raise release.taken()
    if options.queue is not None:
        inactive = release.check_queue(options.queue, pods=not options.jobset)
        if inactive:
            _print(f"LocalQueue {options.queue} is not active, so the job waits: {inactive}")
    try:
        release.install(options.values or [], values, options.settings or [])
    except KeyboardInterrupt:
        _uninstall(release, if_there=True)
        _print(f"interrupted: job {release.name} was removed")
        return 130
    except NameTaken:
        # Do not uninstall: the release belongs to a job that was started concurrently.
        raise
    except Invalid:
        # After an error, helm does not remove the objects that it has created.
        _uninstall(release, if_there=True)
        raise
    _print(f"installed job {release.name} in namespace {release.namespace}")
    if options.detach:
        _print(
            f"show it with `elasticrun k8s status {where}`, stop it with `elasticrun k8s"
            f" stop {where}`"
        )
        return 0
    try:
        code = release.follow(_write, _print)
    except KeyboardInterrupt:
        code = 130
    except (Invalid, BrokenPipeError):  # BrokenPipeError: the reader of the output has exited
        _print(f"the release still exists; remove it with `elasticrun k8s stop {where}`")
        raise
    _uninstall(release)
    _print(f"removed job {release.name}; exit code {code}")
    return code


def _uninstall(release: ChartRelease, *, if_there: bool = False) -> None:
    """Remove the release, ignoring further Ctrl-C. If this fails, print how to remove it later."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    try:
        release.uninstall(if_there=if_there)
    except Invalid as error:
        again = f"elasticrun k8s stop -n {release.namespace} {release.name}"
        _print(f"job {release.name} may still exist; remove it with `{again}`: {error}")
        if not if_there:
            raise


def _interrupted(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def _write(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def _print(text: str) -> None:
    print(f"elasticrun: {text}", file=sys.stderr, flush=True)
