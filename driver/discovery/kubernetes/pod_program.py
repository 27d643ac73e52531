"""Lookup of a job's program: the words after ``--`` in the agent commands of its worker pods.

A Kubeflow TrainJob passes the program only to its worker pods, so the driver reads the program from these pods.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from elastic.driver.discovery.kubernetes.api_client import (
    ApiError,
    ApiErrorKind,
    KubernetesApi,
    Resource,
)
from elastic.driver.discovery.kubernetes.api_objects import Json
from elastic.errors import Invalid

WAIT_S = 600.0
LOOK_S = 1.0
REFERENCE = re.compile(r"\$\([A-Za-z_]\w*\)")


def program_of(pod: Json) -> list[str]:
    """Return the program of a worker pod. Pure.

    Raises:
        Invalid: the command of the pod's first container contains no ``--`` or no program, or the program refers to
            environment variables of the pod.
    """
    name = pod["metadata"]["name"]
    container = pod["spec"]["containers"][0]
    words = [*(container.get("command") or ()), *(container.get("args") or ())]
    if "--" not in words[:-1]:
        raise Invalid(
            f"pod {name} has no program after --: its command must be elasticrun agent ... -- PROGRAM"
        )
    program = [str(word) for word in words[words.index("--") + 1 :]]
    reference = next((each for word in program for each in REFERENCE.findall(word)), None)
    if reference is not None:
        raise Invalid(
            f"the program of pod {name} contains {reference}, which only the pod can expand: pass the value, or read"
            " the environment in the program"
        )
    return program


def find_program(
    cluster: KubernetesApi,
    log: Callable[[str], object],
    *,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], object] = time.sleep,
) -> list[str]:
    """Return the program of the selected pods. Waits for the first pod if none exists.

    Raises:
        Invalid: no pod appeared within `WAIT_S` seconds, the pods can't be listed, or their program is invalid.
    """
    deadline = clock() + WAIT_S
    last = ""
    while True:
        try:
            pods, _ = cluster.all(Resource.PODS)
            why = f"no pod of namespace {cluster.namespace} has the labels {cluster.selector}"
        except ApiError as error:
            pods, why = [], f"pods of namespace {cluster.namespace} can't be listed: {error}"
            if error.why is ApiErrorKind.FORBIDDEN:
                raise Invalid(f"{why}; grant the permissions list and watch for pods") from None
        if pods:
            return program_of(pods[0])
        if clock() >= deadline:
            raise Invalid(
                f"{why}, for {WAIT_S:g} s: check that the worker pods were created, and that the API server"
                " responds"
            ) from None
        if why != last:
            last = why
            log(f"waiting for the program: {why}")
        pause(LOOK_S)
