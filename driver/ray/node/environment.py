"""Environment of workers on a Ray node. Pure: no I/O, no clock.

A worker should run in the environment of the user's runtime_env, without the settings of the Ray worker process that
started its agent. Variables that Ray sets only for that process would limit a worker to one thread, hide its GPUs, or
interfere with its own connection to Ray.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# Variables that Ray sets for each Ray worker process, either in the raylet or when the process connects.
OF_RAYS_PROCESS = frozenset(
    {
        "RAY_JOB_ID",
        "RAY_RAYLET_PID",
        "RAY_LD_PRELOAD_ON_WORKERS",
        "RAY_CLIENT_MODE",
        "RAY_JOB_CONFIG_JSON_ENV_VAR",
        "RAY_RUNTIME_ENV",
        "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR",
        "SPT_NOENV",
    }
)
# Variables that Ray sets unless the user has set them. They give an actor without CPUs one thread, and hide all GPUs
# from an actor without GPUs.
UNLESS_GIVEN = frozenset({"OMP_NUM_THREADS", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"})
GPUS = "CUDA_VISIBLE_DEVICES"
BREAKPOINT = "PYTHONBREAKPOINT"  # Ray's debugger sets this variable for the process of the actor


def without_rays_own(
    environ: Mapping[str, str], given: Mapping[str, str], above: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment of a Ray worker process without the variables that Ray sets only for that process.

    Args:
        environ: environment of the Ray worker process.
        given: ``env_vars`` of the user's runtime_env.
        above: environment of the raylet, the parent of the process.
    """

    def stays(name: str, value: str) -> bool:
        if name in given and name != BREAKPOINT:
            return True
        if name in UNLESS_GIVEN:
            return above.get(name) == value
        if name == BREAKPOINT:
            return not value.startswith("ray.")
        return name not in OF_RAYS_PROCESS and name != GPUS

    clean = {name: value for name, value in environ.items() if stays(name, value)}
    if BREAKPOINT in given:  # Restore the user's value, which Ray has replaced.
        clean[BREAKPOINT] = given[BREAKPOINT]
    return clean


def workers_environ(
    environ: Mapping[str, str],
    given: Mapping[str, str],
    above: Mapping[str, str],
    *,
    programs: str,
    modules: Sequence[str],
    address: str,
    namespace: str,
    call: str,
    folder: str,
) -> dict[str, str]:
    """Return the environment that the workers of a node inherit. See `without_rays_own`.

    Workers see no GPUs unless the user or the driver assigns some to them.

    Args:
        environ: environment of the actor's process.
        given: ``env_vars`` of the user's runtime_env.
        above: environment of the raylet.
        programs: folder of the Python to run.
        modules: folders of modules in addition to Python's default path.
        address: address of the cluster that ``ray.init()`` in a worker joins.
        namespace: namespace for ``ray.init(namespace=os.environ["RAY_NAMESPACE"])``. Ray has no variable for it.
        call: path of the file with the workers' function.
        folder: working folder.
    """
    clean = without_rays_own(environ, given, above)
    path = [each for each in clean.get("PATH", "").split(":") if each and each != programs]
    result = {
        GPUS: "",
        **clean,
        "PATH": ":".join([programs, *path]),
        "PYTHONPATH": ":".join(modules),
        "PWD": folder,
        "RAY_ADDRESS": address,
        "RAY_NAMESPACE": namespace,
        "ELASTIC_CALL": call,
    }
    if not modules:
        del result["PYTHONPATH"]
    return result


def environ_of_bytes(block: bytes) -> dict[str, str]:
    """Parse the content of ``/proc/PID/environ``."""
    pairs = (entry.partition("=") for entry in block.decode("utf-8", "replace").split("\0"))
    return {name: value for name, sign, value in pairs if sign}
