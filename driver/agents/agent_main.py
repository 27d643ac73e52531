"""Entry point of an agent process. Reads its configuration as one line of JSON from standard input (see `Bootstrap`).

    python -m elastic.driver.agents.agent_main

After validation, the agent writes a line with READY and its release to standard output. It exits when standard input is
closed. An agent that must outlive its starter instead continues in the background when standard input is closed, or
after two minutes, but exits if standard output has no reader.
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

from elastic.driver.agents.driver_connection import NoDriver
from elastic.driver.agents.etcd_agent import serve_by_etcd
from elastic.driver.agents.host_agent import FIND_S, Find, HostAgent
from elastic.driver.launch.starter import READY, Bootstrap
from elastic.driver.network.host_lists import parse_address
from elastic.driver.network.name_lookup import numeric
from elastic.driver.network.secret import SECRET_BYTES
from elastic.driver.output_interfaces import Log
from elastic.driver.processes.console import Console, replace_closed_streams
from elastic.errors import Invalid
from elastic.version import __version__

BOOTSTRAP_LIMIT = 1 << 20  # maximum size of the configuration line, in bytes
STDOUT = 1


def main() -> int:
    replace_closed_streams()
    try:
        bootstrap = read_bootstrap(sys.stdin.buffer.readline(BOOTSTRAP_LIMIT))
        slots = bootstrap.slots or own_slots()
        check(bootstrap)
    except Invalid as error:
        print(f"hvd-elastic agent: {error}", file=sys.stderr)
        return 2
    print(f"{READY} {__version__}", flush=True)
    if bootstrap.outlives:
        if not _await_starter(FIND_S):
            return 1
        _daemonize()
    log = Console(write_stderr, level=bootstrap.log_level, colour=False, timestamps=True)
    return asyncio.run(serve(bootstrap, slots=slots, bound=True, log=log))


async def serve(bootstrap: Bootstrap, *, slots: int, bound: bool, log: Log) -> int:
    """Run one agent until it exits, and return its exit code.

    Args:
        bootstrap: configuration of the agent.
        slots: number of slots of this host.
        bound: whether a driver started the agent.
        log: called with the level and the text of each log line.

    Raises:
        Invalid: etcd cannot be used.
    """
    if bootstrap.etcd is None:
        find = _at_addresses(bootstrap.drivers, bootstrap.drivers_file)
        process = HostAgent(bootstrap, find, slots=slots, bound=bound, log=log)
        if bound and not bootstrap.outlives:
            _end_with_stdin(process)
        return await process.run()
    return await serve_by_etcd(bootstrap, bootstrap.etcd, slots=slots, bound=bound, log=log)


def read_bootstrap(line: bytes) -> Bootstrap:
    """Parse the configuration line.

    Raises:
        Invalid: the line is not a configuration of this release, has no secret, or names no driver. The message does
            not quote the line, because it may contain the secret.
    """
    try:
        bootstrap = msgspec.json.decode(line, type=Bootstrap)
        secret = bytes.fromhex(bootstrap.secret)
    except (msgspec.MsgspecError, ValueError):
        secret = b""
    if len(secret) < SECRET_BYTES:
        raise Invalid(
            "standard input contains no bootstrap message of this release: let elasticrun start the agent, or"
            " run elasticrun agent --job NAME --etcd HOST:PORT"
        )
    known = bootstrap.drivers or bootstrap.drivers_file
    if not known and bootstrap.etcd is None:
        raise Invalid(
            "the bootstrap message contains no driver address: start agents through elasticrun"
        )
    return bootstrap


def check(bootstrap: Bootstrap) -> None:
    """Validate the configuration before READY is written.

    Raises:
        Invalid: an interface, a driver address or a TLS file is invalid.
    """
    from elastic.driver.network.interface_selection import check_wanted

    check_wanted(bootstrap.interfaces)
    for address in bootstrap.drivers:
        parse_address(address)
    if bootstrap.tls is not None:
        from elastic.protocol import tls

        tls.check(bootstrap.tls.cert, bootstrap.tls.key, bootstrap.tls.ca)


def own_slots() -> int:
    """Return the number of usable GPUs of this host, or of its CPU cores if it has no GPU.

    GPUs are counted without importing torch, because the import takes seconds.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        devices = [word for word in visible.split(",") if word.strip() not in ("", "-1")]
        if devices:
            return len(devices)
    else:
        with contextlib.suppress(OSError):
            gpus = len(os.listdir("/proc/driver/nvidia/gpus"))
            if gpus:
                return gpus
    return len(os.sched_getaffinity(0))


# ---- addresses of the driver ---------------------------------------------------------------------------------------


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
            raise NoDriver(f"{'; '.join(troubles)}: check the addresses of --driver")
        return found

    return find


def _listed(file: str) -> list[str]:
    """Return the addresses in a file that the agent's starter may rewrite.

    Return no addresses if the file cannot be read.
    """
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return Path(file).read_text().split() if file else []
    return []


# ---- running in the background ---------------------------------------------------------------------------------------


def _await_starter(within_s: float) -> bool:
    """Wait until the starter has closed standard input, at most ``within_s`` seconds.

    Returns:
        Whether standard output still has a reader. If not, the starter or the ssh connection has ended, and the agent
        must exit.
    """
    deadline = time.monotonic() + within_s
    fd = sys.stdin.fileno()
    while (left_s := deadline - time.monotonic()) > 0:
        if select.select([fd], [], [], left_s)[0] and not os.read(fd, 4096):
            break
    stdout_poll = select.poll()
    stdout_poll.register(STDOUT, 0)
    return not stdout_poll.poll(0)


def _daemonize() -> None:
    """Continue as a child process in its own session, with only the environment that the starter sent."""
    sys.stdout.flush()
    if os.fork():
        os._exit(0)
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)


def _end_with_stdin(process: HostAgent) -> None:
    """Start a thread that ends the agent when its starter closes standard input."""
    loop = asyncio.get_running_loop()

    def wait() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 4096):
                pass
        with contextlib.suppress(RuntimeError):  # The event loop may already be closed.
            loop.call_soon_threadsafe(process.end, 0, "its parent process exited")

    threading.Thread(target=wait, name="stdin", daemon=True).start()


def write_stderr(data: bytes) -> None:
    with contextlib.suppress(OSError):
        os.write(2, data)


if __name__ == "__main__":
    sys.exit(main())
