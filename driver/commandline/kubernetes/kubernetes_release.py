"""Release of the Helm chart: installed and removed with helm, its state read from the Kubernetes API."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from elastic.driver.commandline.kubernetes.queue_check import (
    GROUP,
    LOCAL_QUEUES,
    is_managed,
    probe_pod,
    served_version,
    why_inactive,
)
from elastic.driver.commandline.kubernetes.release_state import (
    WORKER,
    Follow,
    JobOver,
    PodState,
    is_scalable,
    job_names,
    least_instead,
    next_step,
    pod_state,
    table,
    wanted,
    warnings,
)
from elastic.driver.discovery.kubernetes.api_client import ANSWER_S, CONNECT_S, WATCH_S, connection
from elastic.driver.discovery.kubernetes.api_objects import Json
from elastic.errors import Invalid

CHART = Path(__file__).parents[3] / "charts" / "hvd-elastic"
HELM_S = 120.0
LOOK_S = 1.0
# maximum number of seconds without a response from the API server while following a job
AWAY_S = 300.0
# Messages of helm about a name in use, from its first check and from concurrent installations.
TAKEN = ("name that is still in use", "release: already exists")
STAMP = re.compile(rb"^(\d{4}-\d\d-\d\dT\S+Z) ?(.*)$", re.DOTALL)


class ChartRelease:
    """Release of the Helm chart in a cluster.

    Raises:
        Invalid: the cluster, helm, or the release is missing.
    """

    def __init__(self, name: str, namespace: str | None) -> None:
        api, found = connection()
        from kubernetes import client

        self.name = name
        self.namespace = namespace or found
        self._core: Any = client.CoreV1Api(api)
        self._batch: Any = client.BatchV1Api(api)
        self._apps: Any = client.AppsV1Api(api)
        self._apis: Any = client.ApisApi(api)
        self._custom: Any = client.CustomObjectsApi(api)
        self._refused: Any = client.ApiException

    def install(self, files: Sequence[str], values: Json, settings: Sequence[str]) -> None:
        """Install the release.

        Args:
            files: values files, as for helm's ``--values``.
            values: Helm values.
            settings: as for helm's ``--set``. They take precedence over ``values``, which take precedence over
                ``files``.

        Raises:
            NameTaken: another process has installed a release of this name.
        """
        words = []
        for file in files:
            words += ["--values", os.path.abspath(file)]
        words += ["--values", "-"]
        for setting in settings:
            words += ["--set", setting]
        try:
            self._helm("install", self.name, str(CHART.resolve()), *words, stdin=json.dumps(values))
        except Invalid as error:
            if any(message in str(error) for message in TAKEN):
                raise self.taken() from None
            raise

    def check_queue(self, queue: str, *, pods: bool) -> str:
        """Check that Kueue can admit this release, without creating anything.

        Args:
            queue: name of a LocalQueue.
            pods: whether Kueue admits each pod of the release separately, instead of a JobSet as a whole.

        Returns:
            The reason why the queue currently admits no workloads, or an empty string.

        Raises:
            Invalid: Kueue or the queue is missing, or Kueue does not manage pods of the namespace.
        """
        version = served_version(self._json(self._apis.get_api_versions))
        if version is None:
            raise Invalid(
                "--queue needs Kueue, and this cluster has no API kueue.x-k8s.io: install Kueue, or omit --queue"
            )

        def missing() -> Invalid:
            return Invalid(
                f"namespace {self.namespace} has no LocalQueue {queue}: see `kubectl get localqueues -A`"
            )

        read, names = self._custom.get_namespaced_custom_object, (LOCAL_QUEUES, queue)
        found = self._json(read, GROUP, version, self.namespace, *names, missing=missing)
        create = self._core.create_namespaced_pod
        if pods and not is_managed(
            self._json(create, self.namespace, probe_pod(queue), dry_run="All")
        ):
            raise Invalid(
                f"Kueue does not manage pods of namespace {self.namespace}, so it would not queue the workers: enable"
                " the integration `pod` in Kueue's configuration, and check its managedJobsNamespaceSelector"
            )
        return why_inactive(found)

    def exists(self) -> bool:
        """Return whether a Helm release of this name exists, in any state and of any chart."""
        return self._chart() is not None

    def taken(self) -> NameTaken:
        where = f"namespace {self.namespace} already has a job {self.name}"
        return NameTaken(f"{where}: pass another --name")

    def stop(self) -> None:
        """Remove the release. Raises Invalid if the release does not exist or belongs to another chart."""
        chart = self._chart()
        if chart is None:
            raise self._no_job()
        if not chart.startswith(f"{CHART.name}-"):
            text = f"{self.name} of namespace {self.namespace} is a release of {chart}, not a job"
            raise Invalid(
                f"{text}: remove it with `helm uninstall -n {self.namespace} {self.name}`"
            )
        self.uninstall()

    def _chart(self) -> str | None:
        """Return the name and version of the release's chart, or None if there is no release."""
        states = ("deployed", "failed", "pending", "superseded", "uninstalled", "uninstalling")
        flags = [f"--{state}" for state in states]  # for Helm 4, which lacks the flag --all
        name = f"^{re.escape(self.name)}$"
        found = self._helm("list", "--output", "json", "--filter", name, *flags)
        return next((str(each["chart"]) for each in json.loads(found)), None)

    def uninstall(self, *, if_there: bool = False) -> None:
        """Remove the release.

        Args:
            if_there: whether to succeed if the release does not exist.
        """
        self._helm("uninstall", self.name, *["--ignore-not-found"] * if_there)

    def scale(self, pods: int) -> int:
        """Set the number of worker pods and return the previous number.

        Raises:
            Invalid: the job cannot continue with so few pods, or the job is a JobSet, whose number of pods is fixed.
        """
        job, workers = self._job(), self._workers()
        if not is_scalable(workers):
            raise Invalid(
                f"job {self.name} is a JobSet, whose number of pods can't change: uninstall it and run it again with"
                " other --workers, or run it without --jobset"
            )
        least = least_instead(job, workers[0], pods)
        if least is not None:
            why = (
                f"needs {least} worker pods to continue (job.minWorkers)"
                if pods
                else "keeps its commits in its workers' memory, and would end without a pod"
            )
            raise Invalid(
                f"job {self.name} {why}: pass {least} or more, or stop it with `elasticrun k8s stop -n"
                f" {self.namespace} {self.name}`"
            )
        body = {"spec": {"replicas": pods}}
        before = wanted(workers)
        self._ask(
            self._apps.patch_namespaced_stateful_set_scale,
            f"{self.name}-worker",
            self.namespace,
            body,
        )
        return before

    def lines(self) -> list[str]:
        """Return lines of text with the state of the release and warnings from Kubernetes."""
        return [*table(self._job(), self._pods(), wanted(self._workers())), *self._warnings()]

    def _warnings(self) -> list[str]:
        read = self._core.list_namespaced_event
        try:
            found = self._json(read, self.namespace, field_selector="type=Warning")
        except Invalid as error:  # Reading events requires a separate permission.
            return [f"warnings of Kubernetes are not available: {error}"]
        return warnings(found.get("items") or (), self.name, datetime.now(timezone.utc))

    def follow(self, write: Callable[[bytes], object], report: Callable[[str], object]) -> int:
        """Copy the logs of the job's drivers until the job has ended. Return its exit code.

        Raises Invalid if the release is removed before the job has ended.
        """
        followed: set[str] = set()
        last_text, silence = "", ApiSilence(report)
        while True:
            try:
                step = next_step(self._job(), self._pods(), followed)
                silence.over()
            except ApiSilent as error:
                silence.goes_on(error)
                time.sleep(LOOK_S)
                continue
            if isinstance(step, JobOver):
                return step.code
            if isinstance(step, Follow):
                self._copy_log(step.pod, write, silence)
                followed.add(step.pod)
                last_text = ""
                continue
            if step.why != last_text:
                last_text = step.why
                report(last_text)
            time.sleep(LOOK_S)

    # ---- one call --------------------------------------------------------------------------------------------------

    def _copy_log(self, pod: str, write: Callable[[bytes], object], silence: ApiSilence) -> None:
        """Copy a pod's log until its end, and reconnect after connection failures."""
        last = b""
        while True:
            try:
                lines = self._log(pod)
                silence.over()
                for line in lines:
                    found = STAMP.match(line)
                    stamp, text = found.groups() if found else (last, line)
                    if stamp > last or not found:
                        write(text)
                        last = stamp
                if self._has_ended(pod):
                    return
            except ApiSilent as error:
                if not error.unasked:
                    silence.goes_on(error)
            time.sleep(LOOK_S)

    def _log(self, pod: str) -> Iterator[bytes]:
        """Yield the lines of a pod's log, each with a timestamp."""
        response = self._ask(
            self._core.read_namespaced_pod_log,
            pod,
            self.namespace,
            follow=True,
            timestamps=True,
            _preload_content=False,
            _request_timeout=(CONNECT_S, WATCH_S),
        )
        return self._lines(response)

    def _lines(self, response: Any) -> Iterator[bytes]:
        rest = b""
        try:
            for chunk in response.stream(amt=None, decode_content=False):
                *lines, rest = (rest + chunk).split(b"\n")
                yield from (line + b"\n" for line in lines)
        except Exception as error:
            if not isinstance(error, OSError) and not type(error).__module__.startswith("urllib3"):
                raise
            # Not an error, because a driver may log nothing for longer than the timeout. The next request shows whether
            # it still runs.
            raise ApiSilent(
                f"the log stream of the driver ended ({type(error).__name__})", unasked=True
            ) from None
        finally:
            response.close()

    def _has_ended(self, pod: str) -> bool:
        found = [each for each in self._pods() if each.name == pod]
        return not found or found[0].code is not None

    def _job(self) -> Json:
        """Return the driver's Job, which may belong to a JobSet."""
        for name in job_names(self.name):
            with contextlib.suppress(ObjectMissing):
                read = self._batch.read_namespaced_job
                found = self._json(read, name, self.namespace, missing=ObjectMissing)
                return self._ours(found)
        raise self._no_job()

    def _pods(self) -> list[PodState]:
        pods = self._core.list_namespaced_pod
        found = self._json(pods, self.namespace, label_selector=self._labels)
        return [pod_state(each) for each in found.get("items") or ()]

    def _workers(self) -> list[Json]:
        """Return the StatefulSet of the worker pods, or the Jobs of a JobSet."""
        read = self._apps.read_namespaced_stateful_set
        with contextlib.suppress(ObjectMissing):
            found = self._json(read, f"{self.name}-{WORKER}", self.namespace, missing=ObjectMissing)
            return [self._ours(found)]
        labels = f"{self._labels},app.kubernetes.io/component={WORKER}"
        jobs = self._json(self._batch.list_namespaced_job, self.namespace, label_selector=labels)
        return jobs.get("items") or []

    @property
    def _labels(self) -> str:
        return f"app.kubernetes.io/name=hvd-elastic,app.kubernetes.io/instance={self.name}"

    def _ours(self, found: Json) -> Json:
        """Return the object if it belongs to the chart.

        Raises:
            Invalid: the object belongs to another chart, since other objects may have the same name.
        """
        if (found["metadata"].get("labels") or {}).get("app.kubernetes.io/name") != CHART.name:
            raise self._no_job()
        return found

    def _no_job(self) -> Invalid:
        lists = "`helm list -A` lists releases of all namespaces"
        return Invalid(f"namespace {self.namespace} has no job {self.name}; {lists}")

    def _json(self, call: Any, *words: Any, **options: Any) -> Json:
        response = self._ask(call, *words, _preload_content=False, **options)
        found: Json = json.loads(response.data)
        return found

    def _ask(
        self, call: Any, *words: Any, missing: Callable[[], Invalid] | None = None, **options: Any
    ) -> Any:
        import urllib3

        options.setdefault("_request_timeout", (CONNECT_S, ANSWER_S))
        try:
            return call(*words, **options)
        except self._refused as error:
            if error.status == 404:
                raise (missing or self._no_job)() from None
            if error.status == 401:
                raise Invalid(
                    "the API server rejected the credentials of the kubeconfig (HTTP 401): renew them, for example"
                    " with the login command of the cluster"
                ) from None
            if error.status == 403:
                detail = json.loads(error.body or "{}").get("message", error.reason)
                raise Invalid(
                    f"the API server rejected the request: {detail}. Grant this permission, or choose"
                    " another --namespace"
                ) from None
            raise ApiSilent(f"the API server responded with HTTP {error.status}") from None
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise ApiSilent(f"the API server does not respond ({type(error).__name__})") from None

    def _helm(self, *words: str, stdin: str = "") -> str:
        program = shutil.which("helm")
        if program is None:
            raise Invalid(
                "helm is not on the PATH: install Helm 3 or 4, https://helm.sh/docs/intro/install"
            )
        try:
            done = subprocess.run(
                [program, *words, "--namespace", self.namespace],
                input=stdin,
                capture_output=True,
                text=True,
                timeout=HELM_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise Invalid(
                f"helm {words[0]} did not finish within {HELM_S:g} s: check with `kubectl cluster-info` that the API"
                " server responds, then run the command again"
            ) from None
        if done.returncode != 0:
            output = done.stderr.strip() or done.stdout.strip()
            if f'namespaces "{self.namespace}" not found' in output:
                output += f"; create it with `kubectl create namespace {self.namespace}`"
            raise Invalid(f"helm {words[0]} failed: {output.removeprefix('Error: ')}")
        return done.stdout


class ObjectMissing(Invalid):
    """Error raised when the API server has no object of this name."""


class NameTaken(Invalid):
    """Error raised when another process has installed a release of this name."""


class ApiSilent(Exception):
    """Error raised when the API server does not respond.

    Args:
        unasked: True if the API server had responded and its log stream then ended. False if a request failed.
    """

    def __init__(self, why: str, *, unasked: bool = False) -> None:
        super().__init__(why)
        self.unasked = unasked


class ApiSilence:
    """Handler of API server outages, which logs the start and end of each outage.

    Raises:
        Invalid: the API server does not respond for longer than AWAY_S seconds.
    """

    def __init__(self, report: Callable[[str], object]) -> None:
        self._report = report
        self._since: float | None = None

    def goes_on(self, why: ApiSilent) -> None:
        now = time.monotonic()
        if self._since is None:
            self._since = now
            self._report(f"{why}; the job keeps running; retrying for {AWAY_S:g} s")
        elif now - self._since > AWAY_S:
            raise Invalid(
                f"{why}, for {AWAY_S:g} s. The job may still run: see `elasticrun k8s status` when the API server"
                " responds"
            )

    def over(self) -> None:
        if self._since is not None:
            self._since = None
            self._report("the API server answers again")
