"""Limit of open files for a driver, which has a connection to the agent of each host."""

from __future__ import annotations

import resource

from elastic.errors import Invalid

SPARE = 512  # file descriptors reserved for unauthenticated connections and other files
# Limit if the number of hosts is unknown. The hard limit of the system may be lower.
UNKNOWN = 16_384


def limit_for(hosts: int | None, soft: int, hard: int) -> int:
    """Return the soft limit of open files to set.

    While an agent reconnects, it may have two connections. Raises Invalid if the hard limit is too low.

    Args:
        hosts: number of hosts, or None if unknown.
        soft: current soft limit.
        hard: current hard limit.
    """
    unlimited = resource.RLIM_INFINITY
    wanted = SPARE + (UNKNOWN if hosts is None else 2 * hosts)
    if soft == unlimited or soft >= wanted:
        return soft
    if hard == unlimited or hard >= wanted:
        return wanted
    if hosts is not None and hard < SPARE + hosts:
        raise Invalid(
            f"{hosts} hosts need {wanted} open files, but the hard limit of this process is {hard}: raise the"
            f" limit with ulimit -Hn {wanted}, or with LimitNOFILE= in the systemd unit"
        )
    return hard


def allow_hosts(hosts: int | None) -> None:
    """Increase this process's limit of open files for a job with ``hosts`` hosts.

    Raises Invalid if the hard limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = limit_for(hosts, soft, hard)
    if limit != soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
