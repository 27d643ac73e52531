"""Program of a compute job, which prepares data for training jobs.

Every rank runs a worker of TensorFlow's tf.data service.

horovodrun -np 4 python -m horovod.tensorflow.data.compute_worker CONFIGFILE
"""

from __future__ import annotations

import argparse
import contextlib
import math
import stat
from collections.abc import Sequence
from pathlib import Path

import horovod.tensorflow as hvd
from elastic.errors import Invalid
from horovod.runner.common.service.compute_service import ComputeService
from horovod.runner.common.util import secret
from horovod.tensorflow.data.compute_service import SIDES, TfDataServiceConfig, compute_worker_fn


def main(dispatchers: int, dispatcher_side: str, configfile: str, timeout: float) -> None:
    """Serve until a training job calls ``compute_client().shutdown()``. Must be called on every rank.

    Rank 0 writes ``configfile`` for the training jobs, and removes it at the end.

    Raises:
        Invalid: an option is invalid, or the file exists with other content.
        TimeoutException, ConnectionError: raised by `compute_worker_fn`.
    """
    hvd.init()
    if dispatchers < 1 or hvd.size() % dispatchers:
        raise Invalid(
            f"{hvd.size()} ranks can't be divided evenly among {dispatchers} dispatchers: use a multiple of"
            f" {dispatchers} ranks, for example -np {2 * max(dispatchers, 1)}"
        )
    service = config = None
    try:
        if hvd.rank() == 0:
            _make_way(Path(configfile))
            key = secret.make_secret_key()
            workers = hvd.size() // dispatchers
            service = ComputeService(dispatchers, workers, key)
            config = TfDataServiceConfig(
                dispatchers, workers, dispatcher_side, service.addresses(), key, timeout
            )
            config.write(configfile)
        compute_worker_fn(hvd.broadcast_object(config, name="TfDataServiceConfig"))
    finally:
        if config is not None:
            _remove(Path(configfile), config)
        if service is not None:
            service.shutdown()


def _make_way(file: Path) -> None:
    """Remove the configuration file of a killed compute job.

    Raises:
        Invalid: the file was not written by a compute job.
    """
    try:
        found = file.stat()
        if not stat.S_ISREG(found.st_mode):
            raise Invalid(f"{file} is not a regular file: pass a regular file")
        if found.st_size:
            TfDataServiceConfig.read(file)
        file.unlink()
    except FileNotFoundError:
        pass
    except Invalid as error:
        raise Invalid(
            f"{file} is not replaced, because it was not written by a compute job ({error}): pass another file"
        ) from None
    except OSError as error:
        raise Invalid(f"{file} can't be replaced: {error.strerror}. Pass another file") from error


def _remove(file: Path, config: TfDataServiceConfig) -> None:
    """Remove the configuration file, unless another job has replaced it."""
    with contextlib.suppress(OSError, Invalid):
        if TfDataServiceConfig.read(file) == config:
            file.unlink()


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"pass a whole number of at least 1, not {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"pass a number of seconds above 0, not {text!r}")
    return value


def _command(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m horovod.tensorflow.data.compute_worker",
        description="Run a worker of TensorFlow's tf.data service on every rank. Start with horovodrun.",
    )
    parser.add_argument(
        "configfile",
        help="configuration file for the training job, on storage that both jobs can read",
    )
    parser.add_argument(
        "--dispatchers",
        type=_count,
        default=1,
        help="number of dispatchers: 1, or the number of training ranks (default: 1)",
    )
    parser.add_argument(
        "--dispatcher-side",
        choices=SIDES,
        default="compute",
        help="job that runs the dispatchers (default: compute)",
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=60.0,
        help="seconds to wait until both jobs are connected (default: 60)",
    )
    given = parser.parse_args(words)
    main(given.dispatchers, given.dispatcher_side, given.configfile, given.timeout)


if __name__ == "__main__":
    _command()
