"""The named line is that of the script, for any callers."""

from __future__ import annotations

import contextlib
import inspect
import threading
from typing import Any

import pytest

from elastic.monitoring import script_line


def here() -> str:
    return script_line.of_thread(threading.get_ident())


@pytest.mark.parametrize("module", ["torch.distributed.made_up", "typing_extensions"])
def test_the_line_that_called_into_libraries_is_named(module):
    found: dict[str, str] = {}
    script = compile("\n\nadd()", "/somewhere/train.py", "exec")
    library: dict[str, Any] = {"__name__": module, "found": found}
    exec("def add():\n    with stack:\n        found['line'] = of(number)", library)
    library |= {
        "stack": contextlib.nullcontext(),
        "of": script_line.of_thread,
        "number": threading.get_ident(),
    }
    exec(script, {"__name__": "__main__", "add": library["add"]})
    assert found["line"] == "train.py:3"


def test_a_function_of_the_script_is_named_with_its_line():
    frame = inspect.currentframe()
    assert frame is not None
    assert here() == f"test_script_line.py:{inspect.getsourcelines(here)[1] + 1}"


def test_exited_thread_has_no_line():
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    assert thread.ident is not None
    assert script_line.of_thread(thread.ident) == ""
