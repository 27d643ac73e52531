"""``debugger.py PID``: holds all threads of a process as a debugger does, until its own standard input ends."""

from __future__ import annotations

import ctypes
import os
import sys

ATTACH, DETACH = 16, 17
WALL = 0x40000000  # includes threads

libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
libc.ptrace.restype = ctypes.c_long


def main() -> None:
    threads = [int(name) for name in os.listdir(f"/proc/{sys.argv[1]}/task")]
    for thread in threads:
        if libc.ptrace(ATTACH, thread, None, None) != 0:
            print(os.strerror(ctypes.get_errno()), flush=True)
            return
        os.waitpid(thread, WALL)
    print("holds it", flush=True)
    sys.stdin.read()
    for thread in threads:
        libc.ptrace(DETACH, thread, None, None)


if __name__ == "__main__":
    main()
