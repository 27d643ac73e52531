"""Number of workers of a job, and the slots of its hosts, from -np, --min-np, --max-np and the flags for hosts."""

from __future__ import annotations

from elastic.driver.commandline.options.argument_parser import or_default
from elastic.driver.commandline.options.command_names import command_meant
from elastic.driver.commandline.options.flags import Options
from elastic.driver.job.job_hosts import most_workers
from elastic.driver.network.host_lists import parse_hosts, read_hostfile
from elastic.driver.reasons import counted
from elastic.driver.settings import UNBOUNDED
from elastic.errors import Invalid


def is_elastic(options: Options) -> bool:
    elastic_flags = (
        options.min_num_proc,
        options.max_num_proc,
        options.host_discovery_script,
        options.kubernetes or None,
        options.kubernetes_service,
        options.etcd if options.hosts is None and options.hostfile is None else None,
    )
    return any(each is not None for each in elastic_flags)


def worker_counts(options: Options) -> tuple[int, int, int, bool]:
    """Return the values of -np, --min-np and --max-np, and whether the job is elastic.

    Raises:
        Invalid: a value is missing, or the values contradict each other.
    """
    np, least, most = options.num_proc, options.min_num_proc, options.max_num_proc
    elastic = is_elastic(options)
    if not elastic:
        if np is None:
            late = " before the program" if "-np" in options.command else ""
            meant = command_meant(options.command)
            raise Invalid(
                f"-np is missing: pass the number of workers to start, as in -np 4{late}{meant}"
            )
        return np, np, np, False
    if np is None and least is None:
        raise Invalid(
            "-np and --min-np are both missing, so the number of workers is unknown: pass the number, as in -np 4"
        )
    if np is None:
        assert least is not None, "one of the two is given"
        np = least
    least = or_default(least, np)
    growing = (options.host_discovery_script, options.etcd, options.kubernetes_service)
    grows = options.kubernetes or any(each is not None for each in growing)
    most = or_default(most, UNBOUNDED if grows else np)
    # The order of the checks ensures that no error mentions a value that the user has not set.
    if np < least:
        raise Invalid(f"-np {np} is smaller than --min-np {least}: pass --min-np {np} or less")
    if options.num_proc is not None and np > most:
        raise Invalid(f"-np {np} is greater than --max-np {most}: lower -np, or raise --max-np")
    if least > most:
        raise Invalid(
            f"--min-np {least} is greater than --max-np {most}: lower --min-np, or raise --max-np"
        )
    return np, least, most, True


def slots_of_hosts(
    options: Options, workers_max: int, standbys: int, cores: int
) -> dict[str, int] | None:
    """Return the number of slots of each host, or None if hosts are discovered.

    Raises:
        Invalid: several sources of hosts were passed, a host entry is invalid, or this machine has too few cores.
    """
    sources = {
        "-H": options.hosts,
        "--hostfile": options.hostfile,
        "--host-discovery-script": options.host_discovery_script,
        "--kubernetes": options.kubernetes or options.kubernetes_service or None,
        "--slurm": options.slurm or None,
    }
    given = [flag for flag, value in sources.items() if value is not None]
    if len(given) > 1:
        raise Invalid(f"{' and '.join(given)} can't be combined: keep only one of them")
    slots = or_default(options.slots_per_host, 1)
    if options.hosts is not None:
        hosts = parse_hosts(options.hosts, default_slots=slots)
    elif options.hostfile is not None:
        hosts = read_hostfile(options.hostfile, default_slots=slots)
    elif given or options.etcd is not None:
        return None
    else:
        workers, most = workers_max + standbys, most_workers(cores)
        if workers > most:
            raise Invalid(
                f"{workers} workers are too many for this machine, which has {counted(cores, 'core')}: pass at"
                f" most {most}. To start more anyway, pass -H localhost:{workers}"
            )
        return {"localhost": workers}
    return hosts
