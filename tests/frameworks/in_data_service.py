"""`horovod.tensorflow.data`: in each rank a thread belongs to the compute job, and the main thread trains."""

import contextlib
import dataclasses
import json
import os
import tempfile
import threading
import time
from pathlib import Path
from unittest.mock import DEFAULT, create_autospec

import pytest
import tensorflow as tf

import horovod.tensorflow as hvd
from harness import wording
from harness.ports import free_port
from horovod.runner.common.service.compute_service import ComputeClient, ComputeService
from horovod.runner.common.util.timeout import TimeoutException
from horovod.tensorflow.data import compute_service, compute_worker
from horovod.tensorflow.data.compute_service import (
    TfDataServiceConfig,
    compute_worker_fn,
    send_to_data_service,
    tf_data_service,
)

CONFIG = TfDataServiceConfig(1, 2, "compute", {"10.0.0.1": [("10.0.0.1", 5000)]}, b"\x00key", 30)
KEY = b"k" * 32
SAMPLES = 64
END_S = 30.0


@contextlib.contextmanager
def computing(rank, dispatchers, side):
    """Yield the configuration of a compute job, which ends with the block."""
    folder = hvd.broadcast_object(tempfile.mkdtemp() if rank == 0 else None)
    file = Path(folder, "compute.json")
    failed = []

    def compute():
        try:
            compute_worker.main(dispatchers, side, str(file), END_S)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=compute)
    thread.start()
    yield TfDataServiceConfig.read(file, wait_for_file_creation=True, timeout=END_S)
    hvd.allgather_object(None)  # all have their data
    if rank == 0:
        config = TfDataServiceConfig.read(file)
        assert file.stat().st_mode & 0o077 == 0
        config.compute_client(verbose=2).shutdown()
    thread.join(END_S)
    assert not thread.is_alive() and not failed, failed
    hvd.allgather_object(None)
    assert not file.exists()


def test_each_sample_is_sent_to_one_rank_in_every_epoch(rank, size):
    with computing(rank, 1, "compute") as config:
        assert (config.dispatchers, config.workers_per_dispatcher) == (1, size)
        made = tf.data.Dataset.range(SAMPLES).map(lambda x: x + 1).batch(4)

        def epoch(dataset):
            mine = [int(x) for batch in dataset for x in batch]
            every = hvd.allgather_object(mine)
            return sorted(x for mine in every for x in mine)

        dataset = made.send_to_data_service(config, rank, size, reuse_dataset=True)
        assert epoch(dataset) == epoch(dataset) == list(range(1, SAMPLES + 1))
        # As in a later training, and another dataset of the same one.
        again = made.send_to_data_service(config, rank, size, reuse_dataset=True)
        other = made.map(lambda x: -x).send_to_data_service(config, rank, size, reuse_dataset=True)
        assert epoch(again) == list(range(1, SAMPLES + 1))
        assert epoch(other) == list(range(-SAMPLES, 0))


def test_each_rank_gets_all_samples_without_sharing(rank, size):
    with computing(rank, 1, "compute") as config:
        dataset = send_to_data_service(tf.data.Dataset.range(SAMPLES), config, rank, size)
        assert sorted(dataset.as_numpy_iterator()) == list(range(SAMPLES))


def test_training_job_may_have_one_dispatcher_per_rank(rank, size):
    with computing(rank, size, "training") as config:
        with pytest.raises(ValueError, match=wording.TF_DATA_SERVICE_AS):
            send_to_data_service(tf.data.Dataset.range(3), config, rank)
        with pytest.raises(ValueError, match=wording.RANK_NO_DISPATCHER % size):
            tf_data_service(config, size).__enter__()
        with tf_data_service(config, rank) as address:
            assert len(set(hvd.allgather_object(address))) == size
            service = tf.data.experimental.service
            dataset = tf.data.Dataset.range(SAMPLES)
            dataset = dataset.apply(service.distribute("distributed_epoch", address))
            assert sorted(dataset.as_numpy_iterator()) == list(range(SAMPLES))


def test_an_http_proxy_is_not_used(rank, size):
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("no_grpc_proxy", raising=False)
        patch.delenv("no_proxy", raising=False)
        patch.setenv("http_proxy", "http://127.0.0.1:1")
        with computing(rank, 1, "compute") as config:
            dataset = send_to_data_service(tf.data.Dataset.range(SAMPLES), config, rank, size)
            assert sorted(dataset.as_numpy_iterator()) == list(range(SAMPLES))


def test_an_unreachable_dispatcher_is_named_immediately(rank, size):
    port = free_port()  # nothing listens on it
    calls = {
        "training": compute_worker_fn,  # the job with the dispatcher
        "compute": lambda config: tf_data_service(config, rank).__enter__(),
    }
    for side, call in calls.items():
        service = ComputeService(1, size, KEY, host="127.0.0.1")
        config = TfDataServiceConfig(1, size, side, service.addresses(), KEY, 30)
        config.compute_client().register_dispatcher(0, f"grpc://127.0.0.1:{port}")
        with pytest.raises(ConnectionError, match=wording.DISPATCHER_CANT_BE_REACHED):
            call(config)
        service.shutdown()


def test_one_thread_on_rank_0_watches_for_the_compute_job(rank, size):
    def watching():
        return [each for each in threading.enumerate() if "compute-service" in each.name]

    with computing(rank, 1, "compute") as config:
        for _ in range(2):
            send_to_data_service(tf.data.Dataset.range(SAMPLES), config, rank, size)
        watched = watching()
        assert len(watched) == (rank == 0)
    for each in watched:
        each.join(END_S)
    assert not watching()


def test_the_end_of_a_compute_job_is_logged_unless_the_training_ends(rank, size):
    told = create_autospec(compute_service.log.error)
    main_thread = create_autospec(threading.main_thread)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compute_service.log, "error", told)
        patch.setattr(threading, "main_thread", main_thread)
        for trains in (False, True):
            main_thread.return_value.is_alive.return_value = trains
            client = create_autospec(ComputeClient, instance=True, address=f"of {trains}")
            client.wait_for_shutdown.side_effect = ConnectionError("gone")
            before = set(threading.enumerate())
            compute_service._watch(client)
            for thread in set(threading.enumerate()) - before:
                thread.join(END_S)
            assert told.call_count == trains


def test_a_config_is_written_and_read(rank, size):
    assert TfDataServiceConfig.from_dict(CONFIG.to_dict()) == CONFIG
    assert CONFIG.to_dict()["key"] == "006b6579" and "key" not in repr(CONFIG)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "compute.json")
        CONFIG.write(file)
        assert list(Path(folder).iterdir()) == [file]
        assert TfDataServiceConfig.read(file) == CONFIG
        for damaged in ("", "[]", "{}", json.dumps({**CONFIG.to_dict(), "key": "xyz"})):
            file.write_text(damaged)
            with pytest.raises(ValueError, match=wording.NO_CONFIG_TF_DATA):
                TfDataServiceConfig.read(file)
        with pytest.raises(ValueError, match=wording.CANT_BE_WRITTEN_NO):
            CONFIG.write(Path(folder, "nowhere", "compute.json"))
        file.unlink()
        with pytest.raises(TimeoutException, match=wording.ANSWERS_AFTER_SECONDS_START):
            TfDataServiceConfig.read(file, wait_for_file_creation=True, timeout=0.0)


def test_a_waiter_ignores_the_file_of_an_earlier_compute_job(rank, size):
    service = ComputeService(1, 2, KEY, host="127.0.0.1")
    runs = dataclasses.replace(CONFIG, addresses=service.addresses(), key=KEY)
    left = dataclasses.replace(runs, key=b"of the job before")
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        file = Path(folder, "compute.json")
        left.write(file)
        said = r"responded through .* does not answer this host\. .* --network-interface; otherwise start"
        with pytest.raises(TimeoutException, match=said):
            TfDataServiceConfig.read(file, wait_for_file_creation=True, timeout=0.0)
        patch.setattr(time, "sleep", lambda _: runs.write(file))  # while it waits
        assert TfDataServiceConfig.read(file, wait_for_file_creation=True) == runs
    service.shutdown()


def test_config_file_exists_only_while_its_service_runs(rank, size):
    there = []
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        file = Path(folder, "compute.json")
        CONFIG.write(file)  # as a killed one leaves it

        def looks(*_):
            there.append(file.exists())
            return DEFAULT

        service = create_autospec(ComputeService, side_effect=looks)
        service.return_value.addresses.return_value = CONFIG.addresses
        service.return_value.shutdown.side_effect = looks
        patch.setattr(compute_worker, "ComputeService", service)
        patch.setattr(hvd, "rank", lambda: 0)
        lost = create_autospec(hvd.broadcast_object, side_effect=ConnectionError("lost"))
        patch.setattr(hvd, "broadcast_object", lost)
        with pytest.raises(ConnectionError, match="lost"):
            compute_worker.main(1, "compute", str(file), 1.0)
    assert there == [False, False]


def test_a_compute_job_replaces_only_files_of_compute_jobs(rank, size):
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(hvd, "rank", lambda: 0)
        service = create_autospec(ComputeService)
        patch.setattr(compute_worker, "ComputeService", service)
        notes = Path(folder, "notes.json")
        for text in ("mine", "{}"):
            notes.write_text(text)
            with pytest.raises(ValueError, match=wording.NOTES_JSON_NO_FILE):
                compute_worker.main(1, "compute", str(notes), 1.0)
            assert notes.read_text() == text
        pipe = Path(folder, "pipe")
        os.mkfifo(pipe)
        for other in (folder, str(pipe)):
            with pytest.raises(ValueError, match=wording.NO_FILE_GIVE_ANOTHER):
                compute_worker.main(1, "compute", other, 1.0)
        assert pipe.is_fifo()
        service.assert_not_called()
        notes.write_text("")  # as created by mktemp
        service.side_effect = ConnectionError("begun")
        with pytest.raises(ConnectionError, match="begun"):
            compute_worker.main(1, "compute", str(notes), 1.0)


def test_config_file_writable_by_other_users_is_refused(rank, size):
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        file = Path(folder, "compute.json")
        CONFIG.write(file)
        file.chmod(0o620)
        with pytest.raises(ValueError, match=wording.OTHERS_MODE_FOLDER_USERS):
            TfDataServiceConfig.read(file)
        patch.setattr(os, "geteuid", lambda: file.stat().st_uid + 1)
        with pytest.raises(ValueError, match=wording.BELONGS_ANOTHER_USER):
            TfDataServiceConfig.read(file, wait_for_file_creation=True)


def test_invalid_config_values_are_refused(rank, size):
    for wrong, said in (
        ({"dispatchers": 0}, "dispatchers is 0: pass 1 or more"),
        ({"dispatcher_side": "both"}, "pass compute or training"),
        ({"timeout": 0}, "positive"),
        ({"addresses": {}}, wording.NONE),
    ):
        with pytest.raises(ValueError, match=said):
            dataclasses.replace(CONFIG, **wrong)
        with pytest.raises(ValueError, match=said):
            TfDataServiceConfig.from_dict({**CONFIG.to_dict(), **wrong})
    with pytest.raises(ValueError, match="Expected `int`"):
        TfDataServiceConfig.from_dict({**CONFIG.to_dict(), "dispatchers": "2"})
    with pytest.raises(ValueError, match=wording.JOB % size):
        compute_worker_fn(dataclasses.replace(CONFIG, dispatchers=7))
    with pytest.raises(ValueError, match=wording.CANT_BE_SHARED_OUT):
        compute_worker.main(size + 1, "compute", "nowhere", 1.0)
    with pytest.raises(ValueError, match=wording.NEEDS_SIZE):
        send_to_data_service(
            tf.data.Dataset.range(3), CONFIG, rank, reuse_dataset=True, round_robin=True
        )
    for words in (["--dispatchers", "0"], ["--timeout", "nan"], ["--dispatcher-side", "x"]):
        with pytest.raises(SystemExit, match="2"):
            compute_worker._command(["nowhere", *words])
