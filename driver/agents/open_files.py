"""How many files a driver may have open: each host's agent is one. Decides how many it needs, and asks for them."""

from __future__ import annotations

import resource

from elastic.errors import Invalid

SPARE = 512  # for strangers, and for whatever else a process has open
# Where hosts come by themselves, for so many of them at least, if the system lets us.
UNKNOWN = 16_384


def limit_for(hosts: int | None, soft: int, hard: int) -> int:
    """The limit to set, where ``soft`` and ``hard`` are those that hold now. ``hosts`` None: nobody knows how many.

    While an agent's new connection stands in for an old one, both are open. Raises Invalid.
    """
    endless = resource.RLIM_INFINITY
    wanted = SPARE + (UNKNOWN if hosts is None else 2 * hosts)
    if soft == endless or soft >= wanted:
        return soft
    if hard == endless or hard >= wanted:
        return wanted
    if hosts is not None and hard < SPARE + hosts:
        raise Invalid(
            f"{hosts} hosts need {wanted} open files, but this process may have {hard}: raise the hard limit"
            f" (ulimit -Hn {wanted}, or LimitNOFILE= of its service)"
        )
    return hard


def allow_hosts(hosts: int | None) -> None:
    """Raises Invalid where the hard limit does not suffice."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = limit_for(hosts, soft, hard)
    if limit != soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
