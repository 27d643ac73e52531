"""What a worker of ``elastic.launch`` runs: ``python -m elastic.run_function FILE``.

The file holds the pickled call; without one, the variable ELASTIC_CALL names it, since on other machines it may be
anywhere. It was written by the process that launches this one, for its eyes only, and never travels over the control
plane; the value goes back as bytes that the driver does not open.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import cloudpickle

from elastic.errors import Invalid
from elastic.protocol import RESULT_LIMIT


def main(path: str = "") -> None:
    """Raises Invalid where nothing says which file it is."""
    from elastic import runtime

    path = path or os.environ.get("ELASTIC_CALL", "")
    if not path:
        raise Invalid(
            "no call to run: give its file, or start this by elastic.launch or elastic.ray"
        )

    function, args, kwargs = cloudpickle.loads(Path(path).read_bytes())
    value = function(*args, **kwargs)
    name = getattr(function, "__name__", "the function")
    try:
        blob = cloudpickle.dumps(value)
    except Exception as error:
        what = f"what {name} returned, a {type(value).__name__}, can't be pickled and sent back"
        raise TypeError(f"{what}: {error}") from error
    if len(blob) > RESULT_LIMIT:
        raise ValueError(
            f"what {name} returned has {len(blob):,} bytes, and {RESULT_LIMIT:,} can be sent back;"
            " write it to a file or to storage, and return where it is"
        )
    runtime.send_result(blob)


if __name__ == "__main__":
    main(*sys.argv[1:2])
