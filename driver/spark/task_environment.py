"""Environment of an agent in a Spark task, and names of hosts. Pure: no I/O, no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# Variables that Spark sets only for its own Python worker processes. The first one contains a secret.
OF_SPARKS_PROCESS = (
    "PYTHON_WORKER_FACTORY_",
    "PYSPARK_",
    "SPARK_REUSE_WORKER",
    "SPARK_BUFFER_SIZE",
)
GPUS = "CUDA_VISIBLE_DEVICES"
THREADS = "OMP_NUM_THREADS"
LOCAL = "driver"  # ID of the executor if Spark runs in local mode


def agents_environ(
    environ: Mapping[str, str],
    *,
    programs: str,
    modules: Sequence[str],
    gpus: Sequence[str] | None,
    threads: int | None,
    call: str,
    folder: str,
) -> dict[str, str]:
    """Return the environment of an agent, which its workers inherit.

    Args:
        environ: environment of Spark's Python worker process.
        programs: folder of the Python to run.
        modules: folders of modules in addition to Python's default path.
        gpus: addresses of the GPUs that Spark assigned. None means that Spark assigns no GPUs.
        threads: number of threads for each worker: the cores of a task. None keeps the number in ``environ``.
        call: path of the file with the workers' function.
        folder: working folder.
    """
    clean = {name: each for name, each in environ.items() if not name.startswith(OF_SPARKS_PROCESS)}
    path = [each for each in clean.get("PATH", "").split(":") if each and each != programs]
    clean |= {"PATH": ":".join([programs, *path]), "PWD": folder, "ELASTIC_CALL": call}
    clean.pop("PYTHONPATH", None)
    if modules:
        clean["PYTHONPATH"] = ":".join(modules)
    if gpus is not None:
        clean[GPUS] = ",".join(dict.fromkeys(gpus))
    if threads is not None:
        clean[THREADS] = str(threads)
    return clean


def executor_of_command(command: bytes) -> str:
    """Return the executor ID in the content of an executor's ``/proc/PID/cmdline``, or `LOCAL` if it contains none."""
    words = command.decode("utf-8", "replace").split("\0")
    at = words.index("--executor-id") + 1 if "--executor-id" in words else len(words)
    return words[at] if at < len(words) else LOCAL


def host_of(machine: str, executor: str, attempt: int) -> str:
    """Return the host name under which the driver lists an agent.

    ``attempt`` is the ID of the task attempt, which Spark never uses twice.
    """
    return f"{machine}-{executor}-{attempt}"


def executor_of(host: str) -> str:
    """Return the executor ID that a host name contains."""
    return host.rsplit("-", 2)[1]
