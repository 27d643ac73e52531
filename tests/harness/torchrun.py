"""torch's own launcher, for comparisons."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

LIMIT_S = 100.0
TRIES = 3
ABORTED = "terminate called without an active exception"


def torchrun(script: Path, *words: str, env: Mapping[str, str], restarts: int = 0) -> str:
    """All that two workers print. torch 2.13 now and then aborts in the end of its interpreter, where a thread of Gloo
    drops its last tensor (pytorch/pytorch#190489): then once more.
    """
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run += ["--max-restarts", str(restarts), "--local-addr", "127.0.0.1", str(script), *words]
    for _ in range(TRIES):
        done = subprocess.run(
            run,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
            # Independent of this machine's name and its resolution.
            env={**env, "GLOO_SOCKET_IFNAME": "lo"},
        )
        if ABORTED not in done.stdout:
            break
    assert done.returncode == 0, done.stdout
    return done.stdout
