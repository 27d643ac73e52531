"""init, shutdown and the queries; a hundred of them in one process leave no resources behind."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import horovod.torch as hvd
from conformance.worlds import SIZES, World, everywhere, form, raises, works
from harness import wording

CYCLES = Path(__file__).with_name("cycles.py")


@everywhere()
def test_rank_size_and_build_queries_have_correct_types_and_values(rank, size):
    assert hvd.is_initialized()
    for query, wanted in (
        (hvd.rank, rank),
        (hvd.size, size),
        (hvd.local_rank, rank),
        (hvd.local_size, size),
        (hvd.cross_rank, 0),
        (hvd.cross_size, 1),
    ):
        assert type(query()) is int and query() == wanted, query.__name__
    assert hvd.is_homogeneous() is True
    for flag in (
        hvd.mpi_threads_supported,
        hvd.mpi_enabled,
        hvd.mpi_built,
        hvd.gloo_enabled,
        hvd.gloo_built,
        hvd.ddl_built,
        hvd.ccl_built,
        hvd.cuda_built,
        hvd.rocm_built,
    ):
        assert isinstance(flag(), bool), flag.__name__
    assert type(hvd.nccl_built()) is int
    assert hvd.gloo_built() and not hvd.mpi_built()


@everywhere()
def test_repeated_init_has_no_effect(rank, size):
    hvd.init()
    hvd.init()
    assert (hvd.rank(), hvd.size()) == (rank, size)
    works(size)


def in_a_fork(body: Callable[[], Any]) -> Any:
    """Return the result in a forked child as JSON; or the error that it raises."""
    heard, said = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer: Any = body()
        except BaseException as error:
            answer = [type(error).__name__, str(error)]
        os.write(said, json.dumps(answer).encode())
        os._exit(0)
    os.close(said)
    with os.fdopen(heard) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return json.loads(answer)


def place() -> list[int]:
    return [
        hvd.rank(),
        hvd.size(),
        hvd.local_rank(),
        hvd.local_size(),
        hvd.cross_rank(),
        hvd.cross_size(),
        hvd.is_initialized(),
        hvd.is_homogeneous(),
    ]


@everywhere(3)
def test_forked_child_has_the_place_of_its_worker(rank, size):
    """Workers of a DataLoader shard a stream by it."""
    assert in_a_fork(place) == place()
    assert in_a_fork(lambda: (hvd.init(), place())[1]) == place()  # type: ignore[func-returns-value]
    assert in_a_fork(lambda: in_a_fork(place)) == place()
    sampler = hvd.elastic.ElasticSampler(list(range(10)), shuffle=False)
    assert in_a_fork(lambda: list(sampler)) == list(sampler)
    for call in (
        lambda: hvd.allreduce(torch.ones(2)),
        lambda: hvd.barrier(),
        lambda: hvd.broadcast_object(1),
        lambda: hvd.poll(1),
    ):
        kind, text = in_a_fork(call)
        assert kind == "NotInitialized", kind
        assert wording.FORKED_FROM_WORKER in text and "init" not in text, text
    ended = in_a_fork(lambda: (hvd.shutdown(), hvd.is_initialized())[1])  # type: ignore[func-returns-value]
    assert ended is False
    works(size)


def before_and_after(rank: int, size: int) -> None:
    hvd.shutdown()
    hvd.shutdown()
    assert not hvd.is_initialized()
    for call in (
        hvd.rank,
        hvd.size,
        hvd.local_rank,
        hvd.local_size,
        hvd.cross_rank,
        hvd.cross_size,
        hvd.barrier,
        lambda: hvd.allreduce(torch.ones(1)),
        lambda: hvd.broadcast_object(1),
    ):
        with raises(ValueError, r"Horovod has not been initialized; use hvd\.init\(\)\."):
            call()


@pytest.mark.parametrize("world", SIZES, indirect=True, ids="{}-ranks".format)
def test_api_raises_before_init_and_after_shutdown(world: World) -> None:
    world.run(lambda rank, size: works(size))
    world.run(before_and_after)
    form(world)
    world.run(lambda rank, size: works(size))


def abandoned(rank: int, size: int) -> None:
    """Rank 0 leaves while the others wait for it."""
    if rank == 0:
        hvd.barrier()
        hvd.shutdown()
        return
    handle = hvd.allreduce_async(torch.ones(2), name="waits for rank 0")
    hvd.barrier()
    with raises(hvd.HorovodInternalError):
        hvd.synchronize(handle)
    with raises(hvd.HorovodInternalError):
        hvd.allreduce(torch.ones(2), name="too late")
    hvd.shutdown()


@pytest.mark.parametrize("world", SIZES, indirect=True, ids="{}-ranks".format)
def test_rank_that_shuts_down_fails_pending_collectives_of_its_peers(world: World) -> None:
    world.run(abandoned)
    form(world)
    world.run(lambda rank, size: works(size))


def own_work_is_lost(rank: int, size: int) -> None:
    handle = hvd.allreduce_async(torch.ones(2), name="mine") if rank == 0 else None
    hvd.barrier()
    hvd.shutdown()
    if handle is not None:
        with raises((ValueError, hvd.HorovodInternalError)):
            hvd.synchronize(handle)


@pytest.mark.parametrize("world", SIZES, indirect=True, ids="{}-ranks".format)
def test_work_that_is_outstanding_at_shutdown_fails(world: World) -> None:
    world.run(own_work_is_lost)
    form(world)
    world.run(lambda rank, size: works(size))


@pytest.mark.forked
@pytest.mark.parametrize("workers", [3])
def test_hundred_init_and_shutdown_cycles_leak_no_resources(job, workers):
    """As horovodrun starts it: no descriptor, thread or memory is left behind."""
    running = job(f"-np {workers}", ["python", CYCLES])
    running.succeed()
    said = [line.partition("cycles ")[2] for line in running.lines if "cycles {" in line]
    assert len(said) == workers
    for found in map(json.loads, said):
        # The first twenty may fill pools and caches.
        assert found["descriptors"][-1] <= max(found["descriptors"][:20]), found
        assert found["threads"][-1] <= max(found["threads"][:20]), found
        assert found["tasks"][-1] <= max(found["tasks"][:20]) + 1, found
        assert found["grown_kb_per_cycle"] < 20, found
