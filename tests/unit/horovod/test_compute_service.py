"""Communication of a compute job and training jobs, over real sockets of this machine."""

from __future__ import annotations

import threading

import pytest

from harness.golden import raises
from horovod.runner.common.service.compute_service import ComputeClient, ComputeService
from horovod.runner.common.util.timeout import TimeoutException

KEY = b"k" * 32


@pytest.fixture
def service():
    made = ComputeService(2, 2, KEY, host="127.0.0.1")
    yield made
    made.shutdown()


def test_a_waiter_gets_the_address_of_a_dispatcher_once_its_workers_serve(service):
    compute, training = (ComputeClient(service.addresses(), KEY) for _ in range(2))
    found: list[str] = []

    def train() -> None:
        found.append(training.wait_for_dispatcher_registration(1, 10))
        training.wait_for_dispatcher_worker_registration(1, 10)
        training.shutdown()

    thread = threading.Thread(target=train)
    thread.start()
    compute.register_dispatcher(1, "grpc://a:1")
    compute.register_dispatcher(1, "grpc://a:1")  # repeated
    for worker in (2, 3):
        compute.register_worker_for_dispatcher(1, worker)
    compute.wait_for_shutdown()
    thread.join(10)
    assert found == ["grpc://a:1"]


def test_missing_or_conflicting_registrations_raise_errors(service):
    client = ComputeClient(service.addresses(), KEY)
    client.register_dispatcher(0, "grpc://a:1")
    client.register_worker_for_dispatcher(0, 0)
    with raises(TimeoutException):
        client.wait_for_dispatcher_worker_registration(0, 0.01)
    with pytest.raises(TimeoutException, match="dispatcher 1 has"):
        client.wait_for_dispatcher_registration(1, 0.01)
    with raises(ValueError):
        client.register_dispatcher(0, "grpc://b:1")
    with raises(IndexError):
        client.register_dispatcher(2, "grpc://a:1")


def test_caller_without_the_key_is_refused(service):
    with raises(ConnectionError):
        ComputeClient(service.addresses(), b"another").shutdown()


def test_a_waiter_for_the_end_notices_that_the_service_vanished():
    made = ComputeService(1, 1, KEY, host="127.0.0.1")
    client = ComputeClient(made.addresses(), KEY, timeout=0.05)
    waiting = threading.Event()
    ended: list[BaseException] = []

    def wait() -> None:
        waiting.set()
        try:
            client.wait_for_shutdown()
        except ConnectionError as error:
            ended.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    waiting.wait(10)
    made._store.close()  # as at the end of its process
    thread.join(10)
    assert len(ended) == 1


def test_a_service_that_this_process_shut_down_may_vanish_before_the_next_query():
    made = ComputeService(1, 1, KEY, host="127.0.0.1")
    clients = [ComputeClient(made.addresses(), KEY, timeout=0.05) for _ in range(2)]
    clients[0].shutdown()
    made.shutdown()
    clients[1].wait_for_shutdown()
    with pytest.raises(ConnectionError):  # another service at its address
        ComputeClient(made.addresses(), b"another", timeout=0.05).wait_for_shutdown()


def test_compute_service_without_dispatchers_or_workers_is_refused():
    for dispatchers, workers in ((0, 1), (1, 0)):
        with raises(ValueError):
            ComputeService(dispatchers, workers, KEY, host="127.0.0.1")
