"""State of a Helm release, derived from its Job and pods. Pure: no I/O, no clock."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from datetime import datetime

from elastic.driver.discovery.kubernetes.api_objects import Json, is_queued, natural

DRIVER, WORKER = "driver", "worker"
# Maximum number of warnings to show (newest first), and maximum number of characters per warning.
WARNINGS, WORDS = 10, 300


@dataclass(frozen=True)
class PodState:
    """State of one pod.

    Args:
        trouble: reason why the pod does not run, according to Kubernetes. Empty if it runs or has ended.
    """

    name: str
    component: str
    created: str
    node: str
    address: str
    phase: str
    ready: bool
    restarts: int
    leaving: bool
    started: bool  # whether the container has started, so that its log exists
    code: int | None  # exit code of the pod's container, or None if the container has not ended
    trouble: str


@dataclass(frozen=True)
class Follow:
    """Decision of `elasticrun k8s run`: copy the log of the driver in ``pod``."""

    pod: str


@dataclass(frozen=True)
class Wait:
    """Decision of `elasticrun k8s run`: wait until a driver is running.

    Args:
        why: reason to log.
    """

    why: str


@dataclass(frozen=True)
class JobOver:
    """Decision of `elasticrun k8s run`: exit, because the job has ended with exit code ``code``."""

    code: int


def pod_state(pod: Json) -> PodState:
    """Convert a pod from the API's format to its state. Never raises."""
    about, spec, status = pod["metadata"], pod.get("spec") or {}, pod.get("status") or {}
    conditions = {each["type"]: each for each in status.get("conditions") or ()}
    containers = status.get("containerStatuses") or [{}]
    state = containers[0].get("state") or {}
    ended, waiting = state.get("terminated"), state.get("waiting") or {}
    scheduled = conditions.get("PodScheduled") or {}
    trouble = ""
    if is_queued(pod):
        trouble = "Queued: waiting for admission by Kueue"
    elif scheduled.get("status") == "False":
        trouble = f"{scheduled.get('reason', '')}: {scheduled.get('message', '')}"
    elif waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
        trouble = ": ".join(filter(None, (waiting["reason"], waiting.get("message"))))
    return PodState(
        name=about["name"],
        component=(about.get("labels") or {}).get("app.kubernetes.io/component", ""),
        created=about.get("creationTimestamp", ""),
        node=spec.get("nodeName", ""),
        address=status.get("podIP", ""),
        phase=status.get("phase", ""),
        ready=(conditions.get("Ready") or {}).get("status") == "True",
        restarts=containers[0].get("restartCount", 0),
        leaving="deletionTimestamp" in about,
        started="running" in state or ended is not None,
        code=None if ended is None else ended.get("exitCode"),
        trouble=trouble,
    )


def job_code(job: Json, drivers: Sequence[PodState]) -> int | None:
    """Return the exit code of a Kubernetes Job, or None if the Job has not ended.

    A failed Job has the exit code of its last driver.
    """
    ended = {
        each["type"]
        for each in (job.get("status") or {}).get("conditions") or ()
        if each.get("status") == "True"
    }
    if "Complete" in ended:
        return 0
    if "Failed" not in ended:
        return None
    codes = [pod.code for pod in _by_age(drivers) if pod.code]
    return codes[-1] if codes else 1


def saves(job: Json) -> bool:
    """Return whether the job also writes commits to storage that survives the loss of all workers."""
    [driver] = job["spec"]["template"]["spec"]["containers"]
    variables = {each["name"] for each in driver.get("env") or ()}
    flags = {word.partition("=")[0] for word in _our_words(job)}
    return "--checkpoint-dir" in flags or "ELASTIC_CHECKPOINT_DIR" in variables


def job_names(name: str) -> tuple[str, str]:
    """Return the possible names of the driver's Job: that of the chart's own Job, and that of a JobSet's Job."""
    return f"{name}-{DRIVER}", f"{name}-{DRIVER}-0"


def wanted(workers: Sequence[Json]) -> int:
    """Return the number of pods that a StatefulSet or the Jobs of a JobSet request."""
    specs = [each.get("spec") or {} for each in workers]
    return sum(int(spec.get("replicas", spec.get("parallelism", 0))) for spec in specs)


def is_scalable(workers: Sequence[Json]) -> bool:
    """Return whether the number of worker pods can change. In a JobSet, the number is fixed."""
    return any("replicas" in (each.get("spec") or {}) for each in workers)


def least_pods(job: Json, workers: Json) -> int:
    """Return the smallest number of pods that provides enough workers for the job.

    The numbers come from the flags in the commands of the driver's pods and the worker pods.
    """

    def number(words: Sequence[str], flag: str) -> int:
        return next(
            (int(b) for a, b in itertools.pairwise(words) if a == flag and b.isdecimal()), 1
        )

    return -(-number(_our_words(job), "--min-np") // max(1, number(_our_words(workers), "--slots")))


def least_instead(job: Json, workers: Json, pods: int) -> int | None:
    """Return the minimum number of pods for the job if ``pods`` is below it, otherwise None."""
    least = least_pods(job, workers)
    enough = saves(job) if pods == 0 else pods >= least
    return None if enough else least


def _our_words(owner: Json) -> list[str]:
    """Return elasticrun's own arguments in the pods of a Job or StatefulSet, without the user's program."""
    args = owner["spec"]["template"]["spec"]["containers"][0].get("args") or ()
    return [*itertools.takewhile(lambda word: word != "--", args)]


def next_step(job: Json, pods: Sequence[PodState], followed: Set[str]) -> Follow | Wait | JobOver:
    """Decide what `elasticrun k8s run` does next.

    Args:
        job: the Job of the driver, in the API's format.
        pods: the driver's pods.
        followed: names of the pods whose logs have been copied completely.
    """
    drivers = [pod for pod in _by_age(pods) if pod.component == DRIVER]
    left = [pod for pod in drivers if pod.name not in followed]
    for pod in left:
        if pod.started:
            return Follow(pod.name)
    code = job_code(job, drivers)
    if code is not None:
        return JobOver(code)
    if left and left[-1].trouble:
        return Wait(f"driver pod {left[-1].name} is not running: {left[-1].trouble}")
    return Wait("waiting for a driver pod")


def table(job: Json, pods: Sequence[PodState], wanted: int) -> list[str]:
    """Return the state of the release as lines of text."""
    drivers = [pod for pod in pods if pod.component == DRIVER]
    workers = [pod for pod in pods if pod.component == WORKER]
    code = job_code(job, drivers)
    how = "runs" if code is None else f"has ended with exit code {code}"
    serving = sum(pod.ready and not pod.leaving for pod in workers)
    name = job["metadata"]["name"].removesuffix("-0").removesuffix("-driver")
    lines = [f"job {name} {how}; {serving} of {wanted} worker pods are ready"]
    rows = [("pod", "node", "address", "state", "restarts")]
    for pod in sorted(pods, key=lambda pod: (pod.component, natural(pod.name))):
        rows.append((pod.name, pod.node, pod.address, _state(pod), str(pod.restarts)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines += ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    lines += [f"{pod.name}: {pod.trouble}" for pod in pods if pod.trouble]
    return lines


def warnings(events: Iterable[Json], name: str, now: datetime) -> list[str]:
    """Return lines of text with the warnings of Kubernetes about a release's current and past objects.

    Args:
        events: events of type Warning in the release's namespace. The API server keeps them for an hour.
        name: name of the release.
        now: current time.
    """
    ours = re.compile(
        rf"Pod/{re.escape(name)}-(worker-\d+(-\d+-[a-z0-9]{{5}})?|driver(-0-0)?-[a-z0-9]+)"
        rf"|StatefulSet/{re.escape(name)}-worker|Job/{re.escape(name)}-(driver(-0)?|worker-\d+)"
        rf"|JobSet/{re.escape(name)}"
        rf"|PersistentVolumeClaim/{re.escape(name)}-journal"
    )
    # (time of the last occurrence, number of occurrences), by object, reason and text of the warning
    found: dict[tuple[str, str, str], tuple[str, int]] = {}
    for event in events:
        about, series = event.get("involvedObject") or {}, event.get("series") or {}
        if not ours.fullmatch(f"{about.get('kind', '')}/{about.get('name', '')}"):
            continue
        created = (event.get("metadata") or {}).get("creationTimestamp") or ""
        last = (
            series.get("lastObservedTime") or event.get("lastTimestamp") or event.get("eventTime")
        )
        text = " ".join(str(event.get("message") or "").split())
        key = (about["name"], event.get("reason") or "", text)
        before, times = found.get(key, ("", 0))
        count = series.get("count") or event.get("count") or 1
        found[key] = (max(before, last or created), times + count)
    newest = sorted(found.items(), key=lambda each: each[1][0], reverse=True)
    lines = []
    for (object, reason, text), (last, times) in newest[:WARNINGS]:
        often = "once" if times == 1 else f"{times} times"
        shown = text if len(text) <= WORDS else f"{text[:WORDS]}..."
        lines.append(f"  {_ago(last, now)}, {often}: {object}: {reason}: {shown}")
    if len(newest) > WARNINGS:
        lines.append(f"  and {len(newest) - WARNINGS} older ones")
    return ["warnings of Kubernetes in the last hour:", *lines] if lines else []


def _ago(at: str, now: datetime) -> str:
    try:
        passed_s = (now - datetime.fromisoformat(at.replace("Z", "+00:00"))).total_seconds()
    except (TypeError, ValueError):
        return at
    return f"{passed_s:.0f} s ago" if passed_s < 120 else f"{passed_s / 60:.0f} min ago"


def _state(pod: PodState) -> str:
    if pod.leaving:
        return "leaving"
    if pod.code is not None and pod.phase != "Running":
        return f"ended ({pod.code})"
    if pod.trouble:
        return pod.trouble.partition(":")[0]
    if pod.phase == "Running":
        return "ready" if pod.ready else "running"
    return pod.phase.lower()


def _by_age(pods: Sequence[PodState]) -> list[PodState]:
    return sorted(pods, key=lambda pod: (pod.created, pod.name))
