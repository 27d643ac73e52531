"""Types of the keyword arguments of functions that start jobs. Made by docs/site/reference.py: do not edit."""

from __future__ import annotations

from typing import TypedDict


class RayOptions(TypedDict, total=False):
    """Keyword options of `elastic.ray.run` and `Executor`. The default is None or False."""

    standbys: int | None
    elastic_timeout: float | None
    start_timeout: float | None
    reset_limit: int | None
    commit_budget: float | None
    cooldown_range: tuple[float, float] | None
    network_interface: str | None
    checkpoint_dir: str | None
    checkpoint_every: str | None
    checkpoint_keep: int | None
    begin_from: str | None
    restarts: int | None
    preemption: str | None
    preload: str | None
    fresh: bool
    islands: str | None
    health_check: str | None
    health_check_timeout: float | None
    bandwidth_factor: float | None
    quarantine: str | None
    keep_faulty: str | None
    straggler_factor: float | None
    replace_stragglers: bool
    summary: bool
    dashboard: str | None
    verbose: bool


class LaunchOptions(RayOptions, total=False):
    """Keyword options of `elastic.launch`. The default is None or False."""

    np: int | None
    min_np: int | None
    max_np: int | None
    hosts: str | None
    hostfile: str | None
    host_discovery_script: str | None
    slots_per_host: int | None
    ssh_port: int | None
    ssh_identity_file: str | None
    gloo_timeout: float | None
    output_filename: str | None
    stdin: int | None
    journal: str | None
    report: str | None
    log_level: str | None
