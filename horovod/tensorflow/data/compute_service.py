"""Data preparation in a separate job with TensorFlow's tf.data service, under Horovod's names."""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import logging
import os
import socket
import stat
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import tensorflow as tf

import horovod.tensorflow as hvd
from elastic import context
from elastic.errors import Invalid
from horovod.runner.common.service.compute_service import ComputeClient
from horovod.runner.common.util.timeout import Timeout

log = logging.getLogger("elastic")

SIDES = ("compute", "training")
_FILE_S = 600.0  # timeout for a compute job to start, in seconds
_FILE_LOOK_S = 0.2
_ANSWER_S = 2.0  # timeout for a running compute job to respond, in seconds


@dataclasses.dataclass(frozen=True)
class TfDataServiceConfig:
    """Configuration of the service of a compute job.

    The configuration contains a secret, so its file must be private.

    Args:
        dispatcher_side: job in which dispatchers run, "compute" or "training".
        addresses: addresses of the service through which the jobs find each other.
        key: secret key of that service.
        timeout: timeout for both jobs to become ready, in seconds.

    Raises:
        Invalid: a value is invalid.
    """

    dispatchers: int
    workers_per_dispatcher: int
    dispatcher_side: str
    addresses: Mapping[str, Sequence[tuple[str, int]]]
    key: bytes = dataclasses.field(repr=False)
    timeout: float = 60

    def __post_init__(self) -> None:
        for name in ("dispatchers", "workers_per_dispatcher"):
            if getattr(self, name) < 1:
                raise Invalid(f"{name} is {getattr(self, name)}: pass 1 or more")
        if self.dispatcher_side not in SIDES:
            raise Invalid(f"dispatcher_side is {self.dispatcher_side!r}: pass {' or '.join(SIDES)}")
        if not self.timeout > 0:
            raise Invalid(f"timeout is {self.timeout}: pass a positive number of seconds")
        if not any(self.addresses.values()):
            raise Invalid("addresses is empty: pass the addresses of the ComputeService")

    def compute_client(self, verbose: int = 1) -> ComputeClient:
        """Return a client of the service. A training job ends the compute job with ``compute_client().shutdown()``."""
        return ComputeClient(self.addresses, self.key, verbose, self.timeout)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a dict, with the key in hexadecimal."""
        return {**vars(self), "key": self.key.hex()}

    @staticmethod
    def from_dict(config: Mapping[str, Any]) -> TfDataServiceConfig:
        """Create a configuration from the result of `to_dict`, which may have been stored as JSON.

        Raises:
            Invalid: a key is missing, or a value has the wrong type.
        """
        try:
            made = {**config, "key": bytes.fromhex(config["key"])}
            return msgspec.convert(made, TfDataServiceConfig)
        except KeyError as error:
            raise Invalid(
                f"the config of the tf.data service lacks {error}: pass the config that the compute job wrote"
            ) from None
        except (msgspec.ValidationError, TypeError, ValueError) as error:
            raise Invalid(
                f"the config of the tf.data service is invalid ({error}): pass the config that the compute job wrote"
            ) from None

    def write(self, filename: str | os.PathLike[str]) -> None:
        """Write the configuration as JSON, atomically and readable only by this user.

        Raises:
            Invalid: the file cannot be written.
        """
        path = Path(filename)
        try:
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")
            try:
                with open(handle, "wb") as file:
                    file.write(msgspec.json.encode(self.to_dict()))
                os.replace(name, path)
            except OSError:
                os.unlink(name)
                raise
        except OSError as error:
            raise Invalid(
                f"{path} can't be written: {error.strerror}. Pass a file in a writable folder"
            ) from error

    @staticmethod
    def read(
        filename: str | os.PathLike[str],
        wait_for_file_creation: bool = False,
        timeout: float = _FILE_S,
    ) -> TfDataServiceConfig:
        """Read a configuration from a file.

        Args:
            wait_for_file_creation: whether to wait for the file, and for an answer from the compute job that it names,
                because the file may be outdated.
            timeout: time limit of the wait, in seconds.

        Raises:
            TimeoutException: the wait exceeded ``timeout`` seconds.
            FileNotFoundError: the file does not exist.
            Invalid: the file is invalid, belongs to another user, or is writable by other users.
        """
        path = Path(filename)
        deadline = Timeout(
            timeout, f"no compute job responded through {path} after {{timeout}}: {{activity}}"
        )
        start = f"start python -m horovod.tensorflow.data.compute_worker {path}"
        silent = ""
        while True:
            try:
                config = _read(path)
            except FileNotFoundError:
                if not wait_for_file_creation:
                    raise
            else:
                if not wait_for_file_creation or config._answers():
                    return config
                if not silent:
                    silent = (
                        f"the compute service at {config.compute_client().address} does not answer this host. If its"
                        " job runs on another host, restart it with --network-interface; otherwise "
                    )
                    log.warning("%s: %s%s", path, silent, start)
            deadline.check_time_out_for(silent + start)
            time.sleep(_FILE_LOOK_S)

    def _answers(self) -> bool:
        try:
            ComputeClient(self.addresses, self.key, timeout=_ANSWER_S).look()
        except ConnectionError:
            return False
        return True


def _read(path: Path) -> TfDataServiceConfig:
    fault, text = "belongs to another user", b""
    with contextlib.suppress(PermissionError), open(path, "rb") as file:
        status, text = os.fstat(file.fileno()), file.read()
        mode = stat.S_IMODE(status.st_mode)
        if status.st_uid == os.geteuid():
            others = mode & (stat.S_IWGRP | stat.S_IWOTH)
            fault = f"may be written by others (mode {mode:04o})" if others else ""
    if fault:
        raise Invalid(
            f"{path} {fault}, so other users could supply training data: start the compute job as this user,"
            " with a file in a folder that only this user can write to"
        )
    try:
        found = msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise Invalid(
            f"{path} is not a config of a tf.data service ({error}): pass the file that the compute job wrote"
        ) from None
    return TfDataServiceConfig.from_dict(found)


@contextlib.contextmanager
def tf_data_service(compute_config: TfDataServiceConfig, rank: int) -> Iterator[str]:
    """Context manager that waits for this rank's dispatcher and its workers, and yields the dispatcher's address.

    Used in training jobs. The address has the form ``grpc://HOST:PORT``. If dispatchers run in the training job, this
    rank's dispatcher stops at the end of the block. Rank 0 logs an error if the compute job ends early, because
    TensorFlow continues to wait for its data.

    Raises:
        Invalid: this rank has no dispatcher.
        TimeoutException: the compute job was not ready in time.
        ConnectionError: the compute job has ended, or the dispatcher cannot be reached.
    """
    one = compute_config.dispatchers == 1
    if not one and not 0 <= rank < compute_config.dispatchers:
        raise Invalid(
            f"rank {rank} has no dispatcher, because the service has {compute_config.dispatchers} dispatchers,"
            f" one per rank: train with {compute_config.dispatchers} ranks, or start the compute job with"
            " --dispatchers 1, which serves all ranks"
        )
    _bypass_proxies()
    compute = compute_config.compute_client(verbose=2)
    own = compute_config.dispatcher_side == "training" and (not one or rank == 0)
    dispatcher_id = 0 if one else rank
    with _dispatcher(dispatcher_id, compute) if own else contextlib.nullcontext():
        address = compute.wait_for_dispatcher_registration(dispatcher_id, compute_config.timeout)
        _check_reached(address, dispatcher_id, compute_config.timeout)
        compute.wait_for_dispatcher_worker_registration(dispatcher_id, compute_config.timeout)
        if rank == 0:
            _watch(compute)
        yield address


def send_to_data_service(
    dataset: tf.data.Dataset,
    compute_config: TfDataServiceConfig,
    rank: int,
    size: int | None = None,
    processing_mode: str = "distributed_epoch",
    reuse_dataset: bool = False,
    round_robin: bool = False,
) -> tf.data.Dataset:
    """Return a dataset with the same elements, which the compute job prepares.

    Also available as a method of ``tf.data.Dataset``.

    Args:
        size: world size of the training job. Required only by ``round_robin``.
        processing_mode: "distributed_epoch", in which the workers divide each epoch among them, or "parallel_epochs".
        reuse_dataset: whether all ranks share one pass over the data, so that each element is sent to only one of them.
            Requires a single dispatcher, and every rank must make this call. If False, each rank receives all elements.
        round_robin: with ``reuse_dataset``, whether the ranks receive elements in round-robin order. The dataset must
            be infinite.

    Raises:
        Invalid: dispatchers run in the training job; use `tf_data_service` instead.
        NotInitialized: ``reuse_dataset`` is set and ``hvd.init()`` was not called.
    """
    if compute_config.dispatcher_side == "training":
        raise Invalid(
            "the dispatchers run in the training job: use `with tf_data_service(...) as address` around the"
            " training, and dataset.apply(tf.data.experimental.service.distribute(..., service=address))"
        )
    turns = reuse_dataset and round_robin
    if turns and size is None:
        raise Invalid("round_robin=True requires the number of ranks: pass size=hvd.size()")
    with tf_data_service(compute_config, rank) as address:
        return dataset.apply(
            tf.data.experimental.service.distribute(
                processing_mode=processing_mode,
                service=address,
                job_name=_pass() if reuse_dataset else None,
                consumer_index=rank if turns else None,
                num_consumers=size if turns else None,
            )
        )


tf.data.Dataset.send_to_data_service = send_to_data_service


def compute_worker_fn(compute_config: TfDataServiceConfig) -> None:
    """Run one rank of a compute job until a training job ends it.

    Each rank runs a tf.data worker, and some ranks also run a dispatcher.

    Raises:
        Invalid: the world size of the job differs from the configuration.
        TimeoutException: the training job was not ready in time.
        ConnectionError: the service cannot be reached.
    """
    hvd.init()
    index, workers = hvd.rank(), compute_config.workers_per_dispatcher
    if hvd.size() != compute_config.dispatchers * workers:
        raise Invalid(
            f"{compute_config.dispatchers} dispatchers with {workers} workers each need"
            f" {compute_config.dispatchers * workers} ranks, but this job has {hvd.size()}: start the compute job"
            f" with -np {compute_config.dispatchers * workers}"
        )
    dispatcher_id = index // workers
    _bypass_proxies()
    compute = compute_config.compute_client(verbose=2)
    own = compute_config.dispatcher_side == "compute" and index % workers == 0
    with _dispatcher(dispatcher_id, compute) if own else contextlib.nullcontext():
        address = compute.wait_for_dispatcher_registration(dispatcher_id, compute_config.timeout)
        # Check the dispatcher first: if it did not answer, WorkerServer would hold the GIL and retry forever,
        # regardless of the timeout.
        _check_reached(address, dispatcher_id, compute_config.timeout)
        protocol, _, where = address.partition("://")
        worker = tf.data.experimental.service.WorkerServer(
            tf.data.experimental.service.WorkerConfig(
                dispatcher_address=where,
                worker_address=f"{_host(compute)}:%port%",
                protocol=protocol,
                heartbeat_interval_ms=1000,
                dispatcher_timeout_ms=int(compute_config.timeout * 1000),
            )
        )
        try:
            compute.register_worker_for_dispatcher(dispatcher_id, index)
            compute.wait_for_shutdown()
        finally:
            worker.stop()
            worker.join()
        # the dispatcher must outlive all workers, which would otherwise call it forever
        compute.leave(index)


@contextlib.contextmanager
def _dispatcher(dispatcher_id: int, compute: ComputeClient) -> Iterator[None]:
    """Context manager that runs a dispatcher in this process."""
    server = tf.data.experimental.service.DispatchServer()
    try:
        protocol, _, where = server.target.partition("://")
        # the host in ``target`` is always "localhost", so only the port is used
        port = where.rpartition(":")[2]
        compute.register_dispatcher(dispatcher_id, f"{protocol}://{_host(compute)}:{port}")
        yield
    finally:
        server.stop()
        server.join()


def _pass() -> str:
    """Return a new name for passes over a dataset, the same on all ranks.

    Each dataset and each training needs a separate name. Otherwise, it would reuse the finished passes of an earlier
    dataset or training.
    """
    drawn = uuid.uuid4().hex if hvd.rank() == 0 else None
    return str(hvd.broadcast_object(drawn, name="tf.data service, shared passes"))


def _host(compute: ComputeClient) -> str:
    """Return the host part of the address at which other processes reach this one.

    A job on a single host listens on loopback. For such a job, this is the address on the route to the compute job,
    because TensorFlow's servers listen on all addresses.
    """
    host = context.current().env.bind_host
    if ipaddress.ip_address(host).is_loopback:
        host = compute.own_host() or host
    return f"[{host}]" if ":" in host else host


def _bypass_proxies() -> None:
    """Disable proxies in gRPC.

    gRPC would use http_proxy even for hosts of the cluster, and a worker would wait forever.
    """
    others = [os.environ["no_proxy"]] if os.environ.get("no_proxy") else []
    os.environ.setdefault("no_grpc_proxy", ",".join([*others, "0.0.0.0/0", "::/0"]))


def _check_reached(address: str, dispatcher_id: int, timeout: float) -> None:
    """Raise ConnectionError unless the dispatcher accepts a connection within ``timeout`` seconds."""
    host, _, port = address.partition("://")[2].rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout).close()
    except OSError as error:
        raise ConnectionError(
            f"dispatcher {dispatcher_id} can't be reached at {address} ({error}): start the job of the"
            " dispatcher with --network-interface and an interface that is reachable from this host"
        ) from error


def _watch(compute: ComputeClient) -> None:
    """Start a thread that logs an error if the compute job exits before a training job has ended it."""

    def wait() -> None:
        try:
            compute.wait_for_shutdown()
        except ConnectionError as error:
            if threading.main_thread().is_alive():
                log.error(
                    "the compute job has ended, but TensorFlow keeps waiting for its data: end "
                    "this training"
                    " (%s)",
                    error,
                )

    name = f"elastic-compute-service {compute.address}"
    if all(each.name != name for each in threading.enumerate()):
        threading.Thread(target=wait, name=name, daemon=True).start()


__all__ = ["TfDataServiceConfig", "compute_worker_fn", "send_to_data_service", "tf_data_service"]
