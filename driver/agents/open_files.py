"""Open-file limit of a driver, which has a connection to the agent of each host."""

from __future__ import annotations

import resource

from elastic.errors import Invalid

SPARE = 512  # descriptors for unauthenticated connections and other files
# Limit for an unknown number of hosts. The system's hard limit may reduce it.
UNKNOWN = 16_384


def limit_for(hosts: int | None, soft: int, hard: int) -> int:
    """Return the limit of open files to set.

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
    """Raise this process's limit of open files for a job with this number of hosts.

    Raises Invalid if the hard limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = limit_for(hosts, soft, hard)
    if limit != soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
