"""Explanations of failed agent starts on Ray nodes, derived from Ray's errors. Pure: no I/O, no clock."""

from __future__ import annotations

import re

_SHOWN = 300  # maximum number of characters quoted from Ray's text
_COLOUR = re.compile(r"\x1b?\[\d+m")
_INSTALL = (
    "install it in the nodes' image, or pass ray.init(runtime_env={'pip': ['hvd-elastic']}), or its folder in"
    " py_modules"
)


def why_no_actor(host: str, node: str, kind: str, text: str, *, limit_s: float) -> str:
    """Return the reason why Ray could not start an agent.

    Args:
        host: host of the agent.
        node: Ray node of the agent.
        kind: class name of Ray's exception, or TimeoutError after a timeout.
        text: message of the exception.
        limit_s: time limit for the start, in seconds.
    """
    message = _COLOUR.sub("", text)
    node = node[:8]
    if found := re.search(r"No module named '?([\w.]+)'?", message):
        missing = f"Ray's Python there has no module {found[1]}"
        return f"hvd-elastic can't be imported on {host}: {missing}; {_INSTALL}"
    if "failed to import on the worker" in message:
        return f"hvd-elastic can't be imported on {host}; {_INSTALL}"
    if kind == "RuntimeEnvSetupError":
        return (
            f"Ray could not set up the job's runtime_env on {host}: {_last_line(message)}; "
            "correct it"
        )
    if kind == "ActorUnschedulableError":
        return f"node {node} ({host}) has left the Ray cluster: add another node"
    if "its node has died" in message or "node was terminated" in message:
        return f"node {node} ({host}) died: add another node"
    if kind in ("GetTimeoutError", "TimeoutError"):
        return (
            f"Ray did not start an actor on {host} within {limit_s:g} s: node {node} may be dead, overloaded or still"
            " setting up the job's runtime_env; see `ray list nodes`"
        )
    return f"Ray can't run an actor on {host}, node {node}: {kind}: {_cause(message)}; see `ray list actors`"


def exit_cause(host: str, text: str) -> str:
    """Return the reason why an actor exited after its agent had been ready."""
    return f"the actor of the agent on {host} exited: {_cause(_COLOUR.sub('', text))}"


def another_release(host: str, theirs: str, ours: str) -> str:
    return (
        f"{host} has release {theirs} of hvd-elastic, and this machine has {ours}: install the same in the image of"
        f" every node, or pass it in ray.init(runtime_env={{'pip': [...]}})"
    )


def _cause(message: str) -> str:
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    for line in lines:
        if line.startswith(("The actor is dead because ", "The actor died because ")):
            return line.split(" because ", 1)[1].rstrip(".")[:_SHOWN]
    return lines[0].rstrip(".")[:_SHOWN] if lines else "no reason given"


def _last_line(message: str) -> str:
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return lines[-1].rstrip(".")[:_SHOWN] if lines else "no reason given"
