"""Validation of the arguments of a job on a Ray cluster, before any process is started.

This module does not import Ray.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from elastic.driver.commandline.options.argument_parser import RAY
from elastic.driver.commandline.options.keyword_arguments import words_of
from elastic.driver.settings import Settings
from elastic.errors import Invalid
from elastic.launcher.option_types import RayOptions

CURRENT = "current"  # value that selects the caller's placement group, if the caller runs in one
PLACEMENT_S = 100.0
LEAST_S = 1.0  # minimum value of placement_timeout, in seconds
BOTH = (
    "label_selector can't be used in a placement group, which determines the nodes: omit label_selector, or pass"
    " placement_group=None"
)


@dataclass(frozen=True, kw_only=True)
class WorkerRequest:
    """Number, resources and placement of the workers of a job on Ray.

    ``resources`` use Ray's units: CPU, GPU, memory in bytes, and custom resources.
    """

    np: int  # initial number of workers
    least: int
    most: int
    elastic: bool
    resources: Mapping[str, float]
    placement_group: Any = CURRENT  # CURRENT, a Ray placement group, or None
    # resources that the caller itself uses in each bundle of its placement group
    in_use: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    per_bundle: int = 1  # number of workers in each bundle that has room for at least one
    labels: Mapping[str, str] = field(default_factory=dict)  # Ray's label selector for the nodes
    hosts: int | None = None  # exact number of nodes, each with np / hosts workers
    placement_timeout: float = PLACEMENT_S  # timeout for the placement of workers, in seconds

    @property
    def gpus(self) -> float:
        return self.resources.get("GPU", 0.0)


def wanted(
    num_workers: int | None,
    min_workers: int | None,
    max_workers: int | None,
    resources_per_worker: Mapping[str, float] | None,
    use_gpu: bool,
    placement_group: Any = CURRENT,
    num_hosts: int | None = None,
    placement_timeout: float = PLACEMENT_S,
    label_selector: Mapping[str, str] | None = None,
) -> WorkerRequest:
    """Validate the request for workers, and return it.

    Raises:
        Invalid: an argument is out of range or contradicts another argument.
    """
    counts = {"num_workers": num_workers, "min_workers": min_workers, "max_workers": max_workers}
    for name, count in counts.items():
        if count is not None and (
            not isinstance(count, int) or isinstance(count, bool) or count < 1
        ):
            raise Invalid(f"{name} is {count!r}: pass a whole number of at least 1")
    elastic = min_workers is not None or max_workers is not None
    np = num_workers if num_workers is not None else min_workers
    if np is None:
        raise Invalid(
            "num_workers and min_workers are missing: pass the number of workers to start, as in num_workers=4"
        )
    least = min_workers if min_workers is not None else np
    most = max_workers if max_workers is not None else np
    if least > most:
        raise Invalid(
            f"min_workers {least} is greater than max_workers {most}: lower min_workers, or raise max_workers"
        )
    if not least <= np <= most:
        raise Invalid(
            f"num_workers {np} is not between min_workers {least} and max_workers {most}: pass min <= num <= max"
        )
    if num_hosts is not None and (num_hosts < 1 or np % num_hosts):
        raise Invalid(
            f"num_workers {np} can't be divided evenly among {num_hosts} hosts: pass a multiple of {num_hosts}"
        )
    if num_hosts is not None and elastic:
        raise Invalid(
            "num_hosts can't be used with an elastic job, which uses all available hosts: omit num_hosts"
        )
    number = isinstance(placement_timeout, int | float) and not isinstance(placement_timeout, bool)
    if not number or not math.isfinite(placement_timeout) or placement_timeout < LEAST_S:
        raise Invalid(
            f"placement_timeout is {placement_timeout!r}: pass seconds, at least {LEAST_S:g}"
        )
    return WorkerRequest(
        np=np,
        least=least,
        most=most,
        elastic=elastic,
        resources=resources(resources_per_worker, use_gpu),
        placement_group=placement_group,
        hosts=num_hosts,
        labels=labels(label_selector, placement_group),
        placement_timeout=placement_timeout,
    )


def resources(given: Mapping[str, float] | None, use_gpu: bool) -> dict[str, float]:
    """Return the resources per worker: by default one CPU, and with ``use_gpu`` one GPU.

    Raises:
        Invalid: a name or an amount is invalid, or the GPUs contradict ``use_gpu``.
    """
    if not isinstance(use_gpu, bool):
        raise Invalid(f"use_gpu is {use_gpu!r}: pass True or False")
    if given is not None and not isinstance(given, Mapping):
        raise Invalid(
            f"resources_per_worker is a {type(given).__name__}: pass a dict such as {{'CPU': 2, 'GPU': 1}}"
        )
    found: dict[str, float] = {"CPU": 1.0}
    for name, amount in (given or {}).items():
        if not isinstance(name, str) or not name:
            raise Invalid(f"resources_per_worker has the key {name!r}: use strings as keys")
        if isinstance(amount, bool) or not isinstance(amount, int | float):
            raise Invalid(f"resources_per_worker[{name!r}] is {amount!r}: pass a number")
        if not math.isfinite(amount) or amount < 0:
            raise Invalid(f"resources_per_worker[{name!r}] is {amount!r}: pass 0 or more")
        found[name] = float(amount)
    if use_gpu:
        found.setdefault("GPU", 1.0)
        if not found["GPU"]:
            raise Invalid(
                "use_gpu=True requires GPUs, but resources_per_worker['GPU'] is 0: omit one of the two"
            )
    elif found.get("GPU"):
        raise Invalid("resources_per_worker has GPUs: also pass use_gpu=True")
    if found.get("GPU", 0.0) > 1 and found["GPU"] != int(found["GPU"]):
        raise Invalid(
            f"resources_per_worker['GPU'] is {found['GPU']:g}: pass a whole number, or a fraction below 1"
        )
    found = {name: amount for name, amount in found.items() if amount}
    if not found:
        raise Invalid("resources_per_worker requests nothing: pass at least {'CPU': 1}")
    return found


def labels(given: Mapping[str, str] | None, placement_group: Any) -> dict[str, str]:
    """Return the label selector of the nodes, which is empty by default.

    Raises:
        Invalid: the selector is not a mapping of strings, or a placement group already determines the nodes.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise Invalid(
            f"label_selector is a {type(given).__name__}: pass a dict such as {{'pool': 'training'}}"
        )
    for name, value in given.items():
        if not isinstance(name, str) or not name or not isinstance(value, str):
            raise Invalid(
                f"label_selector[{name!r}] is {value!r}: pass strings as names and values"
            )
    if given and placement_group not in (CURRENT, None):
        raise Invalid(BOTH)
    return dict(given)


def places(wanted: WorkerRequest, options: RayOptions) -> int:
    """Return the maximum number of workers, including standbys."""
    return wanted.most + _standbys(options)


def start_timeout_s(options: RayOptions) -> float:
    """Return the timeout in seconds from the placement of all workers until all of them have started."""
    return float(options.get("start_timeout") or Settings.start_timeout_s)


def _standbys(options: RayOptions) -> int:
    # Options may be passed as numbers or as text, like the flags of elasticrun.
    return int(options.get("standbys") or 0)


def check_options(options: RayOptions, *, elastic: bool = True) -> None:
    """Raise Invalid if an option is invalid, or TypeError if an option does not exist."""
    words_of(RAY, options)
    standbys = _standbys(options)
    if standbys and not elastic:
        raise Invalid(
            f"standbys is {standbys}, but only jobs with min_workers or max_workers replace lost workers: pass"
            " min_workers or max_workers"
        )


def check_environ(given: object) -> None:
    """Raise Invalid unless the value is a dict of environment variables."""
    if given is None:
        return
    if not isinstance(given, Mapping):
        raise Invalid(f"env is a {type(given).__name__}: pass a dict of strings")
    for name, value in given.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise Invalid(f"env[{name!r}] is {value!r}: pass strings as names and values")
        if not name or "=" in name or "\0" in name + value:
            raise Invalid(
                f"env[{name!r}] has an invalid name or value: remove null characters, and remove '=' from the"
                " name"
            )


def telemetry(caller: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
    """Return the OTEL_* variables for the driver: those of ``caller``, overridden by those of ``given``."""
    both = {**caller, **given}
    return {name: value for name, value in both.items() if name.startswith("OTEL_")}


def check_job_name(name: object) -> None:
    """Raise Invalid unless the value is a valid name of a detached job."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise Invalid(
            f"detached is {name!r}: pass a job name of up to 100 letters, digits, dots, dashes and underscores"
            " that starts with a letter or digit"
        )


def check_call(function: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise Invalid if the function's signature does not accept these arguments."""
    if not callable(function):
        raise Invalid(f"function is a {type(function).__name__}: pass a function")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        # Skip the check for functions without a signature, such as those not written in Python.
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        name = getattr(function, "__name__", "the function")
        with_what = "its config" if args or kwargs else "no arguments"
        raise Invalid(
            f"{name}{signature} can't be called with {with_what} ({error}): pass a config that matches its"
            " parameters"
        ) from None


def check_callables(**given: Callable[..., Any] | None) -> None:
    """Raise Invalid if a callback is not callable."""
    for name, value in given.items():
        if value is not None and not callable(value):
            raise Invalid(f"{name} is a {type(value).__name__}: pass a function")


def call_arguments(config: Any) -> tuple[Any, ...]:
    """Return the arguments with which the training function is called."""
    return () if config is None else (config,)
