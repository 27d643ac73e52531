"""Horovod's ``horovod.run``, which calls a function on several workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from elastic.errors import Invalid
from horovod.common.renamed import renamed


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: tuple[float, float] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: int | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: str | Sequence[str] | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Call ``func(*args, **kwargs)`` on ``num_proc`` workers, and return the values by rank.

    ``num_proc`` is 1 by default, or ``min_num_proc`` if that is given. The job is elastic if ``min_num_proc``,
    ``max_num_proc`` or ``host_discovery_script`` is given. The result then contains the values of all ranks in the last
    world.

    Times are in seconds. The other arguments are Horovod's. ``disable_cache`` and ``use_gloo`` have no effect, because
    checks are not cached and MPI is not supported. ``np``, ``min_np`` and ``max_np`` are old names of ``num_proc``
    and its limits. HOROVOD_* variables, such as HOROVOD_LOG_LEVEL, have the same effect as for ``horovodrun``.

    Raises:
        Invalid: (a ValueError) an argument is not supported.
        JobFailed: (a RuntimeError) the job failed.
    """
    for name, value in {"use_mpi": use_mpi, "mpi_args": mpi_args}.items():
        if value:
            raise Invalid(
                f"horovod.run({name}=...) is not supported, because MPI is not used: omit {name}"
            )
    if network_interface and network_interfaces:
        raise Invalid(
            "network_interface and network_interfaces have the same meaning: pass only one of them"
        )

    from elastic.launcher.launch_function import launch

    least = renamed("horovod.run", "min_num_proc", min_num_proc, "min_np", min_np)
    return launch(
        func,
        args,
        kwargs,
        np=renamed("horovod.run", "num_proc", num_proc, "np", np) or least or 1,
        min_np=least,
        max_np=renamed("horovod.run", "max_num_proc", max_num_proc, "max_np", max_np),
        slots_per_host=slots,
        reset_limit=reset_limit,
        cooldown_range=cooldown_range,
        hosts=hosts,
        hostfile=hostfile,
        host_discovery_script=host_discovery_script,
        start_timeout=start_timeout,
        output_filename=output_filename,
        verbose=bool(verbose),
        network_interface=network_interface or _joined(network_interfaces),
        ssh_port=ssh_port,
        ssh_identity_file=ssh_identity_file,
        executable=executable,
    )


def _joined(names: str | Sequence[str] | None) -> str | None:
    return names if isinstance(names, str) else ",".join(names or ()) or None


__all__ = ["run"]
