"""Starts an agent process: what it has to know comes as one line of JSON on standard input (see `Bootstrap`).

    python -m elastic.driver.agents.agent_process

Once that is checked it writes a line that begins with READY, and its release, to standard output. The end of its
standard input is its own. But where it is told to outlive who started it, it goes on in the background then, or after
two minutes, with nothing of its starter's, unless nobody reads its standard output any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import sys
import threading
import time
from pathlib import Path

import msgspec

from elastic.driver.agents.etcd_agent import serve_by_etcd
from elastic.driver.agents.host_agent import FIND_S, AgentProcess, Find
from elastic.driver.agents.uplink import NoDriver
from elastic.driver.launch.starter import READY, Bootstrap
from elastic.driver.network.hosts import parse_address
from elastic.driver.network.resolver import numeric
from elastic.driver.network.secret import SECRET_BYTES
from elastic.driver.processes.console import Console, stand_in_for_closed
from elastic.driver.sinks import Log
from elastic.errors import Invalid
from elastic.version import __version__

BOOTSTRAP_LIMIT = 1 << 20  # bytes
STDOUT = 1


def main() -> int:
    stand_in_for_closed()
    try:
        bootstrap = read_bootstrap(sys.stdin.buffer.readline(BOOTSTRAP_LIMIT))
        slots = bootstrap.slots or own_slots()
        check(bootstrap)
    except Invalid as error:
        print(f"hvd-elastic agent: {error}", file=sys.stderr)
        return 2
    print(f"{READY} {__version__}", flush=True)
    if bootstrap.outlives:
        if not _hear_out(FIND_S):
            return 1
        _leave()
    log = Console(write_stderr, level=bootstrap.log_level, colour=False, timestamps=True)
    return asyncio.run(serve(bootstrap, slots=slots, bound=True, log=log))


async def serve(bootstrap: Bootstrap, *, slots: int, bound: bool, log: Log) -> int:
    """One agent until its end; returns its exit code. Raises Invalid where etcd can't be used."""
    if bootstrap.etcd is None:
        find = _at_addresses(bootstrap.drivers, bootstrap.drivers_file)
        process = AgentProcess(bootstrap, find, slots=slots, bound=bound, log=log)
        if bound and not bootstrap.outlives:
            _end_with_stdin(process)
        return await process.run()
    return await serve_by_etcd(bootstrap, bootstrap.etcd, slots=slots, bound=bound, log=log)


def read_bootstrap(line: bytes) -> Bootstrap:
    """Raises Invalid; the text holds nothing of the line, which has a secret in it."""
    try:
        bootstrap = msgspec.json.decode(line, type=Bootstrap)
        secret = bytes.fromhex(bootstrap.secret)
    except (msgspec.MsgspecError, ValueError):
        secret = b""
    if len(secret) < SECRET_BYTES:
        raise Invalid(
            "standard input has no bootstrap message of this release: agents are started by elasticrun, or by hand"
            " with elasticrun agent --job NAME --etcd HOST:PORT"
        )
    known = bootstrap.drivers or bootstrap.drivers_file
    if not known and bootstrap.etcd is None:
        raise Invalid("the bootstrap message has no driver address")
    return bootstrap


def check(bootstrap: Bootstrap) -> None:
    """Before it is said to be ready. Raises Invalid."""
    from elastic.driver.network.choose_address import check_wanted

    check_wanted(bootstrap.interfaces)
    for address in bootstrap.drivers:
        parse_address(address)
    if bootstrap.tls is not None:
        from elastic.protocol import tls

        tls.check(bootstrap.tls.cert, bootstrap.tls.key, bootstrap.tls.ca)


def own_slots() -> int:
    """As many as this host has GPUs that may be used, else cores. Without torch, which takes seconds to import."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        named = [word for word in visible.split(",") if word.strip() not in ("", "-1")]
        if named:
            return len(named)
    else:
        with contextlib.suppress(OSError):
            gpus = len(os.listdir("/proc/driver/nvidia/gpus"))
            if gpus:
                return gpus
    return len(os.sched_getaffinity(0))


# ---- where the driver is -------------------------------------------------------------------------------------------


def _at_addresses(drivers: list[str], file: str = "") -> Find:
    async def find() -> list[tuple[str, int]]:
        found: list[tuple[str, int]] = []
        troubles = []
        for text in _listed(file) or drivers:
            try:
                found += await numeric(text)
            except OSError as error:
                troubles.append(str(error))
        if not found:
            raise NoDriver("; ".join(troubles))
        return found

    return find


def _listed(file: str) -> list[str]:
    """The addresses in a file that whoever started this agent may write anew; none if there is no such file."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return Path(file).read_text().split() if file else []
    return []


# ---- in the background -----------------------------------------------------------------------------------------------


def _hear_out(within_s: float) -> bool:
    """Until who has started it has heard that it is ready, and closed its standard input: it may be ended until then.
    After so long the host of that is gone, and nobody will. False: it was ended indeed, or the ssh between them was.
    """
    deadline = time.monotonic() + within_s
    fd = sys.stdin.fileno()
    while (left_s := deadline - time.monotonic()) > 0:
        if select.select([fd], [], [], left_s)[0] and not os.read(fd, 4096):
            break
    heard = select.poll()
    heard.register(STDOUT, 0)
    return not heard.poll(0)


def _leave() -> None:
    """Goes on as a child in a session of its own, with nothing that was its starter's but its environment."""
    sys.stdout.flush()
    if os.fork():
        os._exit(0)
    os.setsid()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nowhere, fd)
    os.close(nowhere)


def _end_with_stdin(process: AgentProcess) -> None:
    """Who holds the other end of standard input has started this process, and it ends with that."""
    loop = asyncio.get_running_loop()

    def wait() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 4096):
                pass
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(process.end, 0, "its parent process is gone")

    threading.Thread(target=wait, name="stdin", daemon=True).start()


def write_stderr(data: bytes) -> None:
    with contextlib.suppress(OSError):
        os.write(2, data)


if __name__ == "__main__":
    sys.exit(main())
