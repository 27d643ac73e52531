"""Environment variables of a job: options that they set for the driver, and variables that flags set for workers."""

from __future__ import annotations

import uuid
from collections.abc import Mapping

from elastic.driver.commandline.options import flags, torchrun_flags
from elastic.driver.commandline.options.argument_parser import or_default
from elastic.driver.commandline.options.flags import Options
from elastic.driver.commandline.options.hang_timeouts import collective_timeout_s
from elastic.driver.network.local_interfaces import free_port
from elastic.errors import Invalid
from elastic.protocol.switches import digests, switch
from elastic.rendezvous.nccl_settings import CONNECT_TIMEOUT_S

# Variables that only workers use. They are checked here to report an error once, before workers are started.
_WORKERS_SWITCHES = (
    "ELASTIC_CHECKS",
    "ELASTIC_NATIVE",
    "HOROVOD_DYNAMIC_PROCESS_SETS",
    "HOROVOD_DISABLE_GROUP_FUSION",
)
_DEFAULT_VALUES = {
    # These values equal Horovod's defaults, so the user may not have set them.
    ("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "0"),
    ("HOROVOD_NUM_NCCL_STREAMS", "0"),
    ("HOROVOD_NUM_NCCL_STREAMS", "1"),
    ("HOROVOD_TIMELINE", "DYNAMIC"),  # with DYNAMIC, the script passes the file to start_timeline()
}
_MIB = 1 << 20


def flags_from_environment(environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the flags that environment variables stand for, each with its source for error messages.

    Raises:
        Invalid: the value of a variable is invalid.
    """
    words = [
        (f"{flag}={environ[name]}", f"environment variable {name}")
        for name, flag in flags.parser().variables.items()
        if environ.get(name) and (name, environ[name]) not in _DEFAULT_VALUES
    ]
    return words + _switches(environ) + _fusion(environ)


def _switches(environ: Mapping[str, str]) -> list[tuple[str, str]]:
    switches = flags.parser().switches
    on = [name for name in (*switches, *_WORKERS_SWITCHES) if switch(environ, name)]
    digests(environ)
    return [(switches[name], f"environment variable {name}") for name in on if name in switches]


def _fusion(environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """Convert Horovod's environment variable for the fusion threshold, in bytes, to this package's flag, in MiB."""
    name = "HOROVOD_FUSION_THRESHOLD"
    text = environ.get(name)
    if not text:
        return []
    if not text.isdecimal():
        raise Invalid(f"{name} is {text!r}: set it to a whole number of bytes")
    return [(f"--fusion-threshold-mb={int(text) / _MIB!r}", f"environment variable {name}")]


def worker_additions(options: Options, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that flags add to every worker's environment, replacing inherited values."""
    env = {
        "HOROVOD_GLOO_TIMEOUT_SECONDS": f"{CONNECT_TIMEOUT_S:g}",
        "ELASTIC_COLLECTIVE_TIMEOUT": f"{collective_timeout_s(options, environ):g}",
        **flags.worker_variables(options),
    }
    if options.tcp:
        env["NCCL_IB_DISABLE"] = "1"
    if options.allow_inexact:
        env["ELASTIC_ALLOW_INEXACT"] = "1"
    if options.digests:
        env["ELASTIC_DIGESTS"] = "tensors"
    if options.fusion_threshold_mb is not None:
        env["HOROVOD_FUSION_THRESHOLD"] = str(int(options.fusion_threshold_mb * _MIB))
    return env


def torch_additions(
    options: Options, environ: Mapping[str, str], bind: str, first_host: str
) -> dict[str, str]:
    """Return the environment variables that a script written for torch.distributed needs.

    Rank 0 listens at the address in these variables unless the script uses this package's backend.

    Args:
        options: options of the job.
        environ: environment of the driver.
        bind: address at which workers listen, or empty if they run on several hosts.
        first_host: host of rank 0, if it is known.
    """
    name = options.job_name or uuid.uuid4().hex
    env = {
        "ELASTIC_TORCH_BACKEND": or_default(options.torch_backend, torchrun_flags.BACKENDS[0]),
        "TORCHELASTIC_RUN_ID": name,
    }
    address = options.master_addr or environ.get("MASTER_ADDR") or bind or first_host
    port = options.master_port or environ.get("MASTER_PORT") or (free_port(bind) if bind else 29500)
    return env | ({"MASTER_ADDR": address, "MASTER_PORT": str(port)} if address else {})
