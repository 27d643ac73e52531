"""Validation of the flags for a job on several hosts. Makes no decisions about the job.

Secrets are read here, from files and environment variables. They do not appear in any repr.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Mapping

from elastic.driver.commandline.options.flags import Options
from elastic.driver.etcd.keys import job_root
from elastic.driver.job.multi_host_plan import (
    AWAY_S,
    BOUND_AWAY_S,
    FORWARDED,
    MultiHostPlan,
    PodSource,
)
from elastic.driver.launch.ssh import SshOptions
from elastic.driver.network import interface_selection
from elastic.driver.network.credentials import EtcdAccess, TlsFiles
from elastic.driver.network.host_lists import parse_address
from elastic.driver.network.secret import SECRET_BYTES, read_secret
from elastic.errors import Invalid

ETCD_PORT = 2379
POD_ADDRESS = "POD_IP"  # variable that the chart sets through the Kubernetes downward API
PASSWORD = "ELASTIC_ETCD_PASSWORD"


def fleet_plan(options: Options, environ: Mapping[str, str], *, elsewhere: bool) -> MultiHostPlan:
    """Return the settings for agents and driver failover.

    Args:
        options: options of the job.
        environ: environment of the driver.
        elsewhere: whether one of the known hosts is another machine.

    Raises:
        Invalid: the options cannot be combined, or a file cannot be read.
    """
    etcd = etcd_access(options, environ)
    sources = (options.hosts, options.hostfile, options.host_discovery_script)
    listed = any(source is not None for source in sources)
    if options.standby and etcd is None:
        raise Invalid(
            "--standby needs --etcd HOST:PORT, because drivers elect a leader through etcd. On a single"
            " machine, rerun the command with --journal FILE --resume instead"
        )
    if options.resume and options.journal is None and etcd is None:
        raise Invalid(
            "--resume needs the journal of the job to continue: pass --journal FILE or --etcd"
        )
    if etcd is not None and options.job_name is None:
        raise Invalid("--etcd needs a job name for agents and drivers: pass --job NAME")
    name = options.job_name or f"job-{os.getpid()}"
    job_root(name)
    if options.driver_port is not None and options.driver_port > 65535:
        raise Invalid(f"--driver-port {options.driver_port} is not a port: pass 1 to 65535")
    if options.slurm and (etcd is not None or options.resume or options.standby):
        raise Invalid(
            "--slurm can't be combined with --etcd, --resume or --standby, because Slurm ends the agents in its job"
            " steps together with their driver: pass --checkpoint-dir to resume after the loss of the driver"
        )
    interface_selection.check_wanted(options.network_interfaces or [])
    secret = read_secret(options.secret_file, environ)
    pods = pod_source(options, environ)
    in_pods = pods is not None or options.kubernetes_service is not None
    by_etcd = etcd is not None and not listed and not in_pods
    if secret is None and (etcd is not None or in_pods):
        raise Invalid(
            "drivers and agents that are started separately need a shared secret: create a file with"
            " `elasticrun secret FILE`, copy the file to every host, and pass --secret-file FILE"
        )
    # Use the earlier job's secret with --fresh, because that job's agents must be notified that it has ended.
    left = options.fresh and os.path.exists(f"{options.journal}.secret")
    if secret is None and options.journal is not None and (options.resume or left):
        secret = _secret_beside(options.journal)
    outlived = options.resume or options.standby
    return MultiHostPlan(
        name=name,
        secret=secret or secrets.token_bytes(SECRET_BYTES),
        given_secret=secret is not None,
        etcd=etcd,
        tls=tls_files(options.tls_cert, options.tls_key, options.tls_ca),
        ssh=SshOptions(
            port=options.ssh_port,
            identity=options.ssh_identity_file,
            config=options.ssh_config,
            python=options.remote_python,
        ),
        resume=options.resume,
        standby=options.standby,
        fresh=options.fresh,
        interfaces=options.network_interfaces or [],
        port=options.driver_port or 0,
        away_s=options.driver_timeout or (AWAY_S if outlived else BOUND_AWAY_S),
        forwarded=_forwarded(options.exported or [], environ),
        by_etcd=by_etcd,
        service=options.kubernetes_service,
        pods=pods,
        needed=elsewhere or etcd is not None or outlived or in_pods or options.slurm,
    )


def pod_source(options: Options, environ: Mapping[str, str]) -> PodSource | None:
    """Return the selection of pods, or None if hosts are not pods.

    Raises:
        Invalid: a Kubernetes flag was given without ``--kubernetes``, or no selector or job name was given.
    """
    if not options.kubernetes:
        given = (options.kubernetes_selector, options.kubernetes_namespace, options.node_notices)
        if any(each is not None for each in given):
            raise Invalid(
                "--kubernetes-selector, --kubernetes-namespace and --node-notices require --kubernetes: pass"
                " --kubernetes"
            )
        return None
    selector = options.kubernetes_selector
    if selector is None:
        if options.job_name is None:
            raise Invalid(
                "--kubernetes can't select pods: pass the name of the release with --job NAME, or pass"
                " --kubernetes-selector LABELS"
            )
        selector = (
            f"app.kubernetes.io/instance={options.job_name},app.kubernetes.io/component=worker"
        )
    if not selector.strip():
        raise Invalid("--kubernetes-selector is empty, which selects all pods: pass labels")
    address = environ.get(POD_ADDRESS, "") if not options.network_interfaces else ""
    if address:
        interface_selection.check_wanted([address])
    return PodSource(
        selector,
        options.kubernetes_namespace,
        options.slots_per_host,
        address,
        tuple(options.node_notices or ()),
    )


def etcd_access(options: Options, environ: Mapping[str, str]) -> EtcdAccess | None:
    """Return endpoints and credentials of etcd, or None without etcd.

    Raises:
        Invalid: an endpoint or a TLS file is invalid, a user has no password, or ``--etcd`` is missing.
    """
    files = (options.etcd_cert, options.etcd_key, options.etcd_ca)
    if options.etcd is None:
        if options.etcd_user is not None or any(file is not None for file in files):
            raise Invalid("flags that start with --etcd- require --etcd: pass --etcd HOST:PORT")
        return None
    endpoints = []
    for word in options.etcd.split(","):
        text = word.strip().removeprefix("https://").removeprefix("http://").rstrip("/")
        if not re.search(r":\d+$", text):
            text = f"{text}:{ETCD_PORT}"
        try:
            parse_address(text)
        except Invalid as error:
            raise Invalid(f"--etcd {options.etcd}: {error}") from None
        endpoints.append(text)
    password = environ.get(PASSWORD, "")
    if options.etcd_user is not None and not password:
        raise Invalid(f"--etcd-user {options.etcd_user} has no password: set {PASSWORD}")
    return EtcdAccess(
        endpoints,
        tls_files(options.etcd_cert, options.etcd_key, options.etcd_ca, prefix="--etcd"),
        options.etcd_user or "",
        password if options.etcd_user is not None else "",
    )


def tls_files(
    cert: str | None, key: str | None, ca: str | None, *, prefix: str = "--tls"
) -> TlsFiles | None:
    """Return the absolute paths of certificate, key and CA certificate, or None without TLS.

    For etcd, a CA certificate alone is sufficient. Raises Invalid if one of the three is missing or cannot be used.
    """
    given = {f"{prefix}-cert": cert, f"{prefix}-key": key, f"{prefix}-ca": ca}
    missing = [flag for flag, path in given.items() if path is None]
    if len(missing) == len(given):
        return None
    if prefix == "--etcd" and ca is not None and cert is None and key is None:
        return TlsFiles("", "", os.path.abspath(ca))
    if cert is None or key is None or ca is None:
        raise Invalid(f"{' and '.join(missing)} missing: pass all of {', '.join(given)}")
    paths = (os.path.abspath(path) for path in (cert, key, ca))
    files = TlsFiles(*paths)
    if prefix == "--tls":
        from elastic.protocol import tls

        tls.check(files.cert, files.key, files.ca)
    return files


def _forwarded(exported: list[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the driver's environment variables that are passed to the workers on all hosts."""
    missing = [name for name in exported if name not in environ]
    if missing:
        raise Invalid(
            f"--export names variables that are not set: {','.join(missing)}. Set them, or omit them from --export"
        )
    names = {*exported, *(name for name in environ if FORWARDED.fullmatch(name))}
    return {name: environ[name] for name in sorted(names)}


def _secret_beside(journal: str) -> bytes:
    """Return the job's secret from a file next to the journal, from which the next driver reads it as well.

    If the file is missing, it is created with a new secret.
    """
    path = f"{os.path.abspath(journal)}.secret"
    if not os.path.exists(path):
        from elastic.driver.network.secret import make_secret_file

        folder = os.path.dirname(path)
        if not os.path.isdir(folder):
            raise Invalid(
                f"--journal {journal} is not writable, because the directory {folder} does not exist: create the"
                " directory"
            )
        if os.path.exists(journal) and not stat.S_ISREG(os.stat(journal).st_mode):
            raise Invalid(
                f"--journal {journal} is not a regular file, which --resume requires: pass a regular file"
            )
        make_secret_file(path)
    secret = read_secret(path, {})
    assert secret is not None
    return secret
