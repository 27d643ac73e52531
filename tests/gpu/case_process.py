"""One case in a process of its own: ``case_process.py NAME MACHINE.json RESULT.json FOLDER``. What it says stands in
the result's file, whatever becomes of the process.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from pathlib import Path

if __name__ == "__main__":
    tests = Path(__file__).parents[1]
    sys.path[:1] = [str(tests), str(tests.parent)]

from gpu import machine as machines
from gpu.results import Result, Skipped


def main(name: str, machine: str, written_to: str, folder: str) -> int:
    result = Result(Path(written_to))
    try:
        importlib.import_module(f"gpu.cases.{name}").run(
            machines.read(Path(machine)), result, Path(folder)
        )
    except Skipped as reason:
        result.end(None, str(reason))
    except BaseException as error:
        traceback.print_exc()
        result.end(False, f"{type(error).__name__}: {error}"[:6000])
        return 1
    else:
        result.end(True, "")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
