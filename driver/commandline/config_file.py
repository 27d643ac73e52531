"""Turns a file of Horovod's form (``--config-file``) into flags. Decides nothing: flags of the command line win.

Every entry becomes the flag of the same meaning, so that a value is checked in one place only.
"""

from __future__ import annotations

import difflib
from collections.abc import Hashable

import yaml

from elastic.errors import Invalid

_FILE_LIMIT = 1 << 20

# Section -> key -> flag. A pair of flags is a switch: the one for true, the one for false.
_FLAGS: dict[str, dict[str, str | tuple[str, str]]] = {
    "params": {
        "fusion_threshold_mb": "--fusion-threshold-mb",
        "cycle_time_ms": "--cycle-time-ms",
        "cache_capacity": "--cache-capacity",
        "hierarchical_allreduce": ("--hierarchical-allreduce", "--no-hierarchical-allreduce"),
        "hierarchical_allgather": ("--hierarchical-allgather", "--no-hierarchical-allgather"),
        "torus_allreduce": ("--torus-allreduce", "--no-torus-allreduce"),
    },
    "autotune": {
        "enabled": ("--autotune", "--no-autotune"),
        "log_file": "--autotune-log-file",
        "warmup_samples": "--autotune-warmup-samples",
        "steps_per_sample": "--autotune-steps-per-sample",
        "bayes_opt_max_samples": "--autotune-bayes-opt-max-samples",
        "gaussian_process_noise": "--autotune-gaussian-process-noise",
    },
    "timeline": {
        "filename": "--timeline-filename",
        "mark_cycles": ("--timeline-mark-cycles", "--no-timeline-mark-cycles"),
    },
    "stall_check": {
        "enabled": ("--stall-check", "--no-stall-check"),
        "warning_time_seconds": "--stall-check-warning-time-seconds",
        "shutdown_time_seconds": "--stall-check-shutdown-time-seconds",
    },
    "library_options": {
        "mpi_threads_disable": ("--mpi-threads-disable", "--no-mpi-threads-disable"),
        "num_nccl_streams": "--num-nccl-streams",
        "ccl_bgt_affinity": "--thread-affinity",
        "thread_affinity": "--thread-affinity",
        "gloo_timeout_seconds": "--gloo-timeout-seconds",
    },
    "checkpoint": {
        "dir": "--checkpoint-dir",
        "every": "--checkpoint-every",
        "keep": "--checkpoint-keep",
        "restarts": "--restarts",
    },
    "preemption": {"source": "--preemption"},
    "logging": {
        "level": "--log-level",
        "with_timestamp": ("--log-with-timestamp", "--log-without-timestamp"),
        "hide_timestamp": ("--log-hide-timestamp", "--no-log-hide-timestamp"),
    },
}
_CONTROLLERS = ("gloo", "mpi", "jsrun")


def read_config(path: str) -> list[tuple[str, str]]:
    """Pairs of a flag, as one word, and where it stands, such as ``("--log-level=INFO", "job.yaml, logging.level")``.

    Raises Invalid, with a sentence that names file and entry, for what can't be read or is no such file.
    """
    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.load(file.read(_FILE_LIMIT), Loader=_Loader)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise Invalid(f"config file {path} can't be read: {reason}") from None
    except yaml.YAMLError as error:
        raise Invalid(f"config file {path} is not valid YAML: {_in_one_line(error)}") from None
    except RecursionError:
        raise Invalid(f"config file {path} is nested too deeply") from None
    if content is None:
        return []
    words: list[tuple[str, str]] = []
    for name, section in _mapping(content, f"config file {path}").items():
        where = f"config file {path}, {name}"
        if name == "controller":
            if str(section).lower() not in _CONTROLLERS:
                raise Invalid(f"{where}: there is no controller {section!r}; write gloo")
            words.append((f"--{str(section).lower()}", where))
            continue
        if name not in _FLAGS:
            raise Invalid(
                f"{where}: there is no such section{_near(name, ['controller', *_FLAGS])}"
            )
        if section is None:
            continue
        for key, value in _mapping(section, where).items():
            if key not in _FLAGS[name]:
                raise Invalid(
                    f"{where}.{key}: there is no such key{_near(key, list(_FLAGS[name]))}"
                )
            if value is not None:
                words.append((_word(_FLAGS[name][key], value, f"{where}.{key}"), f"{where}.{key}"))
    return words


def _word(flag: str | tuple[str, str], value: object, where: str) -> str:
    if isinstance(flag, tuple):
        if not isinstance(value, bool):
            raise Invalid(f"{where} is {value!r}; write true or false")
        return flag[0] if value else flag[1]
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise Invalid(f"{where} is {value!r}; write one number or text")
    return f"{flag}={value}"


def _mapping(value: object, where: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise Invalid(f"{where} must hold entries such as key: value")
    return {str(key): entry for key, entry in value.items()}


def _near(key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    return f"; did you mean {near[0]}?" if near else f"; there are {', '.join(known)}"


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice, where YAML would silently take the last."""

    def construct_mapping(
        self, node: yaml.MappingNode, deep: bool = False
    ) -> dict[Hashable, object]:
        seen: set[object] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"{key.value!r} is given twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


def _in_one_line(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    place = f"line {mark.line + 1}: " if mark else ""
    return place + str(getattr(error, "problem", None) or error).replace("\n", " ")
