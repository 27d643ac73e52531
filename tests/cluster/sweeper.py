"""Ends the remains of a control plane whose starter is gone: ``python -m cluster.sweeper MARK FOLDER``.

Its standard input is a pipe from them. Where they are killed, the pipe ends.
"""

import shutil
import sys

from harness.processes import kill_all, marked

if __name__ == "__main__":
    mark, folder = sys.argv[1:]
    sys.stdin.read()
    kill_all(lambda: marked(mark))
    shutil.rmtree(folder, ignore_errors=True)
