"""Known environment variables, used to detect mistyped names. Pure: no I/O, no clock."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping

# Variables that users set, except those that correspond to flags.
_OF_USERS = """
    ELASTIC_CHECKS ELASTIC_COLLECTIVE_TIMEOUT ELASTIC_DIGESTS ELASTIC_ETCD_PASSWORD ELASTIC_FAILPOINTS
    ELASTIC_JOB_SECRET ELASTIC_NATIVE ELASTIC_SECRET_FILE HOROVOD_CONTROLLER
    HOROVOD_CPU_OPERATIONS HOROVOD_DISABLE_GROUP_FUSION HOROVOD_DYNAMIC_PROCESS_SETS
    HOROVOD_FUSION_THRESHOLD HOROVOD_GLOO_IFACE
"""
# Variables that this program sets for workers, agents and itself. They may be in its own environment, because a worker
# may start another job.
_OURS = """
    ELASTIC_ALLOW_INEXACT ELASTIC_AZURE_METADATA_ENDPOINT ELASTIC_BIND ELASTIC_CALL
    ELASTIC_CALLS ELASTIC_CHECKPOINT_FLOOR ELASTIC_CHECKPOINT_FROM ELASTIC_CHECKPOINT_RUN
    ELASTIC_DIAGNOSTICS ELASTIC_DRIVER ELASTIC_ETCD_PASSWORD_FILE ELASTIC_GRACE_SECONDS ELASTIC_HOST ELASTIC_KERNELS
    ELASTIC_LIFE_LOCK ELASTIC_MASTER_PORT ELASTIC_MIN_WORKERS ELASTIC_PREPARED
    ELASTIC_PREPARED_ROOM ELASTIC_READY_FILE ELASTIC_SECRET ELASTIC_SLOT
    ELASTIC_TLS_CA ELASTIC_TLS_CERT ELASTIC_TLS_KEY ELASTIC_WAIT_TIMEOUT ELASTIC_WORKER
    HOROVOD_CROSS_RANK HOROVOD_CROSS_SIZE HOROVOD_ELASTIC HOROVOD_GLOO_RENDEZVOUS_ADDR
    HOROVOD_GLOO_RENDEZVOUS_PORT HOROVOD_HOSTNAME HOROVOD_LOCAL_RANK HOROVOD_LOCAL_SIZE
    HOROVOD_RANK HOROVOD_SECRET_KEY HOROVOD_SIZE
"""
OF_USERS, OURS = frozenset(_OF_USERS.split()), frozenset(_OURS.split())
# Variables of Horovod's native code and its build. Container images built for Horovod set them; they have no effect
# here.
_HOROVODS = re.compile(
    r"HOROVOD_(BATCH_D2D_MEMCOPIES|ENABLE_\w+|DISABLE_NVTX_RANGES|ADASUM_MPI_CHUNK_SIZE|CCL_\w+|WITH(OUT)?_\w+|BUILD_\w+"
    r"|GPU\w*|ALLOW_\w+|DEBUG|CMAKE|CUDA_\w+|ROCM_\w+|MPI_(HOME|CXX\w*)|NCCL_\w+|\w+_(HOME|INCLUDE|LIB|LINK)"
    r"|MPICXX_SHOW|VERSION|REPO)"
)
# Variables of Elasticsearch, which resemble those of this package.
_OF_ELASTICSEARCH = re.compile(r"ELASTIC_(APM_\w+|PORT)")
_ALIKE = 0.8  # minimum similarity (0 to 1), which allows for one or two wrong letters


def unread(environ: Mapping[str, str], flags: Collection[str]) -> list[str]:
    """Return a warning for each variable that resembles one of this package's variables but has no effect.

    Other programs also use the prefix ``ELASTIC_``. Therefore, of the variables with this prefix, only those similar to
    a known variable are reported.

    Args:
        environ: the environment.
        flags: names of the variables that correspond to flags.
    """
    sentences = []
    offered = OF_USERS.union(flags)
    names = {each.partition("_")[2]: each for each in sorted(offered)}
    known = offered | OURS
    # Kubernetes sets variables for all services of a namespace, for example HOROVOD_DRIVER_PORT for horovod-driver.
    services = [each for each in environ if each.endswith("_SERVICE_HOST")]
    starts = [each.removesuffix("SERVICE_HOST") for each in services]
    links = tuple(start + of for start in starts for of in ("SERVICE_", "PORT"))
    for name in sorted(environ.keys() - known):
        prefix, _, rest = name.partition("_")
        if prefix not in ("HOROVOD", "ELASTIC") or name.startswith(links):
            continue
        if _HOROVODS.fullmatch(name) or _OF_ELASTICSEARCH.fullmatch(name):
            continue
        near = difflib.get_close_matches(rest, names, 1, _ALIKE)
        if near:
            sentences.append(f"{name} has no effect; did you mean {names[near[0]]}?")
        elif prefix == "HOROVOD":
            sentences.append(f"{name} has no effect: it is not a variable of this program")
    return sentences
