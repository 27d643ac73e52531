"""A job of its own prepares the data: TensorFlow's tf.data service, started and found with Horovod's names."""

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
_FILE_S = 600.0  # for a compute job to be started
_FILE_LOOK_S = 0.2
_ANSWER_S = 2.0  # for a compute job that runs


@dataclasses.dataclass(frozen=True)
class TfDataServiceConfig:
    """How to find the service of a compute job, and what it is made of. The file of it holds a secret.

    ``dispatcher_side``: the job in which dispatchers run, "compute" or "training". ``addresses``: of the service by
    which both find each other, and ``key`` its secret. ``timeout``: seconds for all to be up. Raises Invalid.
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
            raise Invalid(f"timeout is {self.timeout}: pass a number of seconds, more than 0")
        if not any(self.addresses.values()):
            raise Invalid("addresses is empty: take those of the ComputeService")

    def compute_client(self, verbose: int = 1) -> ComputeClient:
        """Through which a training ends the service: ``compute_client().shutdown()``."""
        return ComputeClient(self.addresses, self.key, verbose, self.timeout)

    def to_dict(self) -> dict[str, Any]:
        """The fields, with the key in hexadecimal."""
        return {**vars(self), "key": self.key.hex()}

    @staticmethod
    def from_dict(config: Mapping[str, Any]) -> TfDataServiceConfig:
        """From what `to_dict` gives, be it read as JSON. Raises Invalid."""
        try:
            made = {**config, "key": bytes.fromhex(config["key"])}
            return msgspec.convert(made, TfDataServiceConfig)
        except KeyError as error:
            raise Invalid(f"not a config of a tf.data service: it lacks {error}") from None
        except (msgspec.ValidationError, TypeError, ValueError) as error:
            raise Invalid(f"not a config of a tf.data service: {error}") from None

    def write(self, filename: str | os.PathLike[str]) -> None:
        """As JSON. Readers see all of it or nothing, and nobody but this user may read it. Raises Invalid."""
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
            raise Invalid(f"{path} can't be written: {error.strerror}") from error

    @staticmethod
    def read(
        filename: str | os.PathLike[str],
        wait_for_file_creation: bool = False,
        timeout: float = _FILE_S,
    ) -> TfDataServiceConfig:
        """``wait_for_file_creation``: also until the compute job that it names answers; a file may be left of another.

        ``timeout``: seconds to wait. Raises TimeoutException, FileNotFoundError; Invalid, also where the file belongs
        to another user or others may write it.
        """
        path = Path(filename)
        deadline = Timeout(
            timeout, f"no compute job answers by {path} after {{timeout}}: {{activity}}"
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
                        f"{config.compute_client().address}, which it names, does not answer from here. If that job"
                        " runs on another host, start it again with --network-interface; else "
                    )
                    log.warning("%s: %s%s", path, silent, start)
            deadline.check_time_out_for(silent + start)
            time.sleep(_FILE_LOOK_S)

    def _answers(self) -> bool:
        """Whether the service is there now."""
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
            f"{path} {fault}, who could feed this training: start the compute job as the user who trains, with a"
            " file in a folder of this user"
        )
    try:
        found = msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise Invalid(f"{path} is not a config of a tf.data service: {error}") from None
    return TfDataServiceConfig.from_dict(found)


@contextlib.contextmanager
def tf_data_service(compute_config: TfDataServiceConfig, rank: int) -> Iterator[str]:
    """In a training job: the address of this rank's dispatcher, ``grpc://HOST:PORT``, once all of its workers serve.

    Where dispatchers run in the training job, this rank's ends with the block. Raises Invalid for a rank that has none;
    TimeoutException; ConnectionError where the compute job is gone or the dispatcher can't be reached. Rank 0 logs an
    error where the compute job goes before it is told to: TensorFlow goes on waiting for its data.
    """
    one = compute_config.dispatchers == 1
    if not one and not 0 <= rank < compute_config.dispatchers:
        raise Invalid(
            f"rank {rank} has no dispatcher: there are {compute_config.dispatchers}, one for each rank. Train with as"
            " many ranks as there are dispatchers, or give the compute job --dispatchers 1, which serves all"
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
    """The same data set, prepared by the compute job; a method of ``tf.data.Dataset`` too.

    Args:
        size: of the training; only ``round_robin`` needs it.
        processing_mode: "distributed_epoch", in which workers share an epoch, or "parallel_epochs".
        reuse_dataset: all ranks share one pass over the data, where there is one dispatcher: each element comes to
            one of them, and every rank makes this call. Otherwise each rank gets all.
        round_robin: with ``reuse_dataset``: they take turns. The data set has to be endless.

    Raises:
        Invalid: where dispatchers run in the training job, which takes `tf_data_service` instead; also as that does.
        NotInitialized: with ``reuse_dataset`` before ``hvd.init()``.
    """
    if compute_config.dispatcher_side == "training":
        raise Invalid(
            "dispatchers run in the training job: use `with tf_data_service(...) as address` around the training, and"
            " dataset.apply(tf.data.experimental.service.distribute(..., service=address))"
        )
    turns = reuse_dataset and round_robin
    if turns and size is None:
        raise Invalid("round_robin needs the size of the training: size=hvd.size()")
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
    """What each rank of a compute job does: one worker, some a dispatcher too, until a training ends it.

    Raises Invalid where the job has another size than the config says, TimeoutException, ConnectionError.
    """
    hvd.init()
    index, workers = hvd.rank(), compute_config.workers_per_dispatcher
    if hvd.size() != compute_config.dispatchers * workers:
        raise Invalid(
            f"{compute_config.dispatchers} dispatchers with {workers} workers each need"
            f" {compute_config.dispatchers * workers} ranks, and this job has {hvd.size()}"
        )
    dispatcher_id = index // workers
    _bypass_proxies()
    compute = compute_config.compute_client(verbose=2)
    own = compute_config.dispatcher_side == "compute" and index % workers == 0
    with _dispatcher(dispatcher_id, compute) if own else contextlib.nullcontext():
        address = compute.wait_for_dispatcher_registration(dispatcher_id, compute_config.timeout)
        # Without an answer WorkerServer would hold the GIL and try for ever, whatever the timeout.
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
        compute.leave(index)  # a worker whose dispatcher went first would call it in vain


@contextlib.contextmanager
def _dispatcher(dispatcher_id: int, compute: ComputeClient) -> Iterator[None]:
    """Runs in this process as long as the block."""
    server = tf.data.experimental.service.DispatchServer()
    try:
        protocol, _, where = server.target.partition("://")
        port = where.rpartition(":")[2]  # the host in it is always "localhost"
        compute.register_dispatcher(dispatcher_id, f"{protocol}://{_host(compute)}:{port}")
        yield
    finally:
        server.stop()
        server.join()


def _pass() -> str:
    """What the service calls the passes that all ranks share: another name for each data set and each training, which
    would find the passes of the one before over.
    """
    drawn = uuid.uuid4().hex if hvd.rank() == 0 else None
    return str(hvd.broadcast_object(drawn, name="tf.data service, shared passes"))


def _host(compute: ComputeClient) -> str:
    """At which others reach this process, as part of an address. Of a job on one host, which listens on loopback, where
    the compute job is reached from: TensorFlow's servers listen everywhere.
    """
    host = context.current().env.bind_host
    if ipaddress.ip_address(host).is_loopback:
        host = compute.own_host() or host
    return f"[{host}]" if ":" in host else host


def _bypass_proxies() -> None:
    """gRPC asks those of http_proxy also for the way to hosts of a cluster, where a worker would wait for ever."""
    others = [os.environ["no_proxy"]] if os.environ.get("no_proxy") else []
    os.environ.setdefault("no_grpc_proxy", ",".join([*others, "0.0.0.0/0", "::/0"]))


def _check_reached(address: str, dispatcher_id: int, timeout: float) -> None:
    """Raises ConnectionError."""
    host, _, port = address.partition("://")[2].rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout).close()
    except OSError as error:
        raise ConnectionError(
            f"dispatcher {dispatcher_id} can't be reached from here at {address} ({error}): start the job in which it"
            " runs with --network-interface, and an interface to which this host has a way"
        ) from error


def _watch(compute: ComputeClient) -> None:
    """Says it where the compute job is gone before a training has ended it, unless this process ends. One thread for
    each, as long as it is.
    """

    def wait() -> None:
        try:
            compute.wait_for_shutdown()
        except ConnectionError as error:
            if threading.main_thread().is_alive():
                log.error(
                    "the compute job is gone, but TensorFlow keeps waiting for its data: end this training"
                    " (%s)",
                    error,
                )

    name = f"elastic-compute-service {compute.address}"
    if all(each.name != name for each in threading.enumerate()):
        threading.Thread(target=wait, name=name, daemon=True).start()


__all__ = ["TfDataServiceConfig", "compute_worker_fn", "send_to_data_service", "tf_data_service"]
