"""What a worker of ``elastic.launch`` runs: ``python -m elastic.run_function FILE``.

The file holds the pickled call. It was written by the process that launches this one, for its eyes
only, and never travels over the control plane; the value goes back as bytes that the driver does
not open.
"""

from __future__ import annotations

import sys
from pathlib import Path

import cloudpickle


def main(path: str) -> None:
    from elastic import runtime

    function, args, kwargs = cloudpickle.loads(Path(path).read_bytes())
    value = function(*args, **kwargs)
    runtime.send_result(cloudpickle.dumps(value))


if __name__ == "__main__":
    main(sys.argv[1])
