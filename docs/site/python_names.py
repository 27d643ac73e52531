"""The public names of `elastic`, grouped as docs/reference/python.md shows them, with an example of each.

Every example runs unchanged after `PRELUDE` and the previous examples of its group.
"""

from __future__ import annotations

from typing import NamedTuple

PRELUDE = """\
import torch
import elastic

elastic.init(process_sets="dynamic")
model = torch.nn.Linear(4, 1)
inputs, targets = torch.randn(8, 4), torch.randn(8, 1)
"""


class Entry(NamedTuple):
    """Names that are shown together, and the example lines that use them."""

    names: str
    example: str


class Group(NamedTuple):
    """A section of the page. ``alone``: its examples start jobs, and run without the prelude."""

    title: str
    entries: tuple[Entry, ...]
    alone: bool = False


GROUPS = (
    Group(
        "Initialization and ranks",
        (
            Entry(
                "init is_initialized shutdown",
                """
                elastic.init()
                assert elastic.is_initialized()
                elastic.shutdown()  # optional: runs automatically when the process exits
                elastic.init(process_sets="dynamic")
                """,
            ),
            Entry(
                "rank size",
                """
                if elastic.rank() == 0:  # do not cache the rank or the size: both change with the world
                    print(f"{elastic.size()} workers")
                """,
            ),
            Entry(
                "local_rank local_size cross_rank cross_size is_homogeneous",
                """
                if torch.cuda.is_available():
                    torch.cuda.set_device(elastic.local_rank())
                hosts = elastic.cross_size()  # number of hosts with a worker of this local rank
                assert elastic.cross_rank() < hosts and elastic.local_size() >= 1
                # whether all hosts have the same number of workers
                assert elastic.is_homogeneous() in (True, False)
                """,
            ),
        ),
    ),
    Group(
        "Elastic training",
        (
            Entry(
                "run State TorchState data",
                """
                from elastic.data import DataLoader

                dataset = torch.utils.data.TensorDataset(inputs, targets)
                loader = DataLoader(dataset, batch_size=4, shuffle=True)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                optimizer = elastic.DistributedOptimizer(optimizer, model.named_parameters())


                @elastic.run
                def train(state: elastic.State) -> None:
                    for state.epoch in range(state.epoch, 2):
                        loader.set_epoch(state.epoch)
                        for x, y in loader:
                            optimizer.zero_grad()
                            torch.nn.functional.mse_loss(model(x), y).backward()
                            optimizer.step()
                            state.commit()


                state = elastic.TorchState(model=model, optimizer=optimizer, loader=loader, epoch=0)
                train(state)
                """,
            ),
            Entry(
                "ObjectState",
                """
                progress = elastic.ObjectState(best=0.0, names=["a"])  # any values that can be pickled
                progress.best = 0.5
                progress.commit()
                """,
            ),
            Entry(
                "ElasticSampler",
                """
                sampler = elastic.ElasticSampler(dataset, shuffle=True)
                batches = torch.utils.data.DataLoader(dataset, batch_size=4, sampler=sampler)
                state = elastic.TorchState(model=model, sampler=sampler, epoch=0)
                for number, batch in enumerate(batches):
                    sampler.record_batch(number, 4)  # these samples are not repeated in this epoch
                sampler.set_epoch(1)
                """,
            ),
            Entry(
                "Checkpoints",
                """
                checkpoints = elastic.Checkpoints()
                print(checkpoints.newest)  # None: no --checkpoint-dir was given
                """,
            ),
            Entry(
                "long_phase",
                """
                with elastic.long_phase("evaluation"):  # other workers may wait for this worker
                    loss = torch.nn.functional.mse_loss(model(inputs), targets)
                """,
            ),
        ),
    ),
    Group(
        "Model and optimizer",
        (
            Entry(
                "DistributedOptimizer Compression",
                """
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                optimizer = elastic.DistributedOptimizer(
                    optimizer, model.named_parameters(), compression=elastic.Compression.fp16
                )
                torch.nn.functional.mse_loss(model(inputs), targets).backward()
                optimizer.step()
                """,
            ),
            Entry(
                "SyncBatchNorm",
                """
                layer = elastic.SyncBatchNorm(4)
                assert layer(inputs).shape == inputs.shape
                """,
            ),
            Entry(
                "Shards",
                """
                model = torch.nn.Linear(4, 1)
                shards = elastic.Shards(4, seed=1)  # bitwise identical weights in every world
                exact = elastic.DistributedOptimizer(
                    torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), shards=shards
                )
                mine = [(inputs[shard::4], targets[shard::4]) for shard in shards.held]
                for x, y in shards.over(mine):
                    torch.nn.functional.mse_loss(model(x), y).backward()
                exact.step()
                """,
            ),
            Entry(
                "DiLoCo LocalSGD",
                """
                model = torch.nn.Linear(4, 1)
                inner = torch.optim.SGD(model.parameters(), lr=0.1)
                diloco = elastic.DiLoCo(model, inner, every=100)  # or elastic.LocalSGD(model, inner, every=20)
                torch.nn.functional.mse_loss(model(inputs), targets).backward()
                inner.step()
                diloco.step()  # after each step of the inner optimizer
                """,
            ),
            Entry(
                "island_group",
                """
                replica = torch.nn.parallel.DistributedDataParallel(
                    torch.nn.Linear(4, 1), process_group=elastic.island_group()
                )
                inner = torch.optim.SGD(replica.parameters(), lr=0.1)
                diloco = elastic.DiLoCo(replica, inner, every=100)
                """,
            ),
            Entry(
                "island_mesh",
                """
                from torch.distributed.fsdp import fully_shard

                torch.distributed.init_process_group()
                sharded = fully_shard(torch.nn.Linear(4, 1), mesh=elastic.island_mesh())
                inner = torch.optim.SGD(sharded.parameters(), lr=0.1)
                diloco = elastic.DiLoCo(sharded, inner, every=100)
                """,
            ),
            Entry(
                "broadcast_parameters broadcast_optimizer_state",
                """
                elastic.broadcast_parameters(model.state_dict(), root_rank=0)
                elastic.broadcast_optimizer_state(optimizer, root_rank=0)
                """,
            ),
            Entry(
                "join",
                """
                last = elastic.join()  # this rank has no more data; returns the last rank that joined
                """,
            ),
        ),
    ),
    Group(
        "Collectives",
        (
            Entry(
                "Average Sum Min Max Product Adasum",
                """
                largest = elastic.allreduce(torch.tensor([1.0]), op=elastic.Max)
                for op in (elastic.Average, elastic.Sum, elastic.Min, elastic.Product, elastic.Adasum):
                    elastic.allreduce(torch.ones(2), op=op)
                """,
            ),
            Entry(
                "allreduce allreduce_ allreduce_async allreduce_async_",
                """
                mean = elastic.allreduce(torch.ones(3), name="loss")
                tensor = torch.ones(3)
                elastic.allreduce_(tensor, op=elastic.Sum)  # in place
                handle = elastic.allreduce_async(torch.ones(3))
                mean = elastic.synchronize(handle)
                elastic.synchronize(elastic.allreduce_async_(tensor))
                """,
            ),
            Entry(
                "grouped_allreduce grouped_allreduce_ grouped_allreduce_async grouped_allreduce_async_",
                """
                pair = [torch.ones(2), torch.ones(3)]
                means = elastic.grouped_allreduce(pair)  # both tensors are reduced in one collective
                elastic.grouped_allreduce_(pair)
                means = elastic.synchronize(elastic.grouped_allreduce_async(pair))
                elastic.synchronize(elastic.grouped_allreduce_async_(pair))
                """,
            ),
            Entry(
                "sparse_allreduce_async",
                """
                sparse = torch.eye(3).to_sparse()
                total = elastic.sparse_allreduce_async(sparse, name="rows", op=elastic.Sum)()
                """,
            ),
            Entry(
                "broadcast broadcast_ broadcast_async broadcast_async_",
                """
                received = elastic.broadcast(torch.ones(3), root_rank=0)
                elastic.broadcast_(tensor, root_rank=0)
                received = elastic.synchronize(elastic.broadcast_async(torch.ones(3), root_rank=0))
                elastic.synchronize(elastic.broadcast_async_(tensor, root_rank=0))
                """,
            ),
            Entry(
                "allgather allgather_async grouped_allgather grouped_allgather_async",
                """
                rows = elastic.allgather(torch.ones(2, 3))  # the rows of all ranks, in the order of ranks
                rows = elastic.synchronize(elastic.allgather_async(torch.ones(2, 3)))
                several = elastic.grouped_allgather([torch.ones(2), torch.ones(3)])
                several = elastic.synchronize(elastic.grouped_allgather_async([torch.ones(2)]))
                """,
            ),
            Entry(
                "alltoall alltoall_async",
                """
                splits = torch.full((elastic.size(),), 2, dtype=torch.int32)
                received, from_each = elastic.alltoall(torch.ones(2 * elastic.size(), 3), splits)
                received = elastic.synchronize(elastic.alltoall_async(torch.ones(2 * elastic.size())))
                """,
            ),
            Entry(
                "reducescatter reducescatter_async grouped_reducescatter grouped_reducescatter_async",
                """
                rows = torch.ones(elastic.size(), 3)
                part = elastic.reducescatter(rows)
                part = elastic.synchronize(elastic.reducescatter_async(rows))
                parts = elastic.grouped_reducescatter([rows])
                parts = elastic.synchronize(elastic.grouped_reducescatter_async([rows]))
                """,
            ),
            Entry(
                "barrier poll synchronize",
                """
                elastic.barrier()
                handle = elastic.allreduce_async(torch.ones(3))
                ready = elastic.poll(handle)  # whether synchronize() would return immediately
                mean = elastic.synchronize(handle)
                """,
            ),
            Entry(
                "broadcast_object allgather_object",
                """
                settings = elastic.broadcast_object({"lr": 0.1}, root_rank=0)
                everyone = elastic.allgather_object({"rank": elastic.rank()})
                """,
            ),
        ),
    ),
    Group(
        "Process sets",
        (
            Entry(
                "ProcessSet add_process_set remove_process_set global_process_set",
                """
                even = elastic.add_process_set(elastic.ProcessSet(range(0, elastic.size(), 2)))
                if even.included():
                    mean = elastic.allreduce(torch.ones(3), process_set=even)
                elastic.remove_process_set(even)
                assert elastic.global_process_set.size() == elastic.size()
                """,
            ),
        ),
    ),
    Group(
        "Reports and time",
        (
            Entry(
                "report",
                """
                elastic.report({"step": 1, "loss": 0.5})
                """,
            ),
            Entry(
                "goodput Goodput",
                """
                spent: elastic.Goodput = elastic.goodput()
                print(f"{spent.goodput:.1%} of {spent.wall_s:.0f} s was training")
                """,
            ),
            Entry(
                "start_timeline stop_timeline",
                """
                elastic.start_timeline("timeline.json")
                elastic.allreduce(torch.ones(3), name="traced")
                elastic.stop_timeline()
                """,
            ),
        ),
    ),
    Group(
        "Start and control jobs",
        (
            Entry(
                "launch Report JobFailed",
                """
                import elastic


                def train(step: int) -> int:
                    elastic.init()
                    elastic.report({"step": step})
                    return elastic.rank()


                def show(report: elastic.Report) -> None:
                    print(report.rank, report.metrics)


                try:
                    ranks = elastic.launch(train, (1,), np=2, on_report=show)
                except elastic.JobFailed as failed:
                    print(failed)
                """,
            ),
            Entry(
                "Job RequestRefused",
                """
                try:
                    elastic.Job("nightly").scale(4)
                except elastic.RequestRefused as refused:  # the message contains the reason
                    print(refused)
                except ValueError as error:  # no job has this name
                    print(error)
                """,
            ),
        ),
        alone=True,
    ),
    Group(
        "Errors and warnings",
        (
            Entry(
                "ElasticError NotInitialized NotElastic StateMismatch TensorMismatch",
                """
                try:
                    elastic.allreduce(torch.ones(3))
                except elastic.NotInitialized:  # init() was not called
                    raise
                except (elastic.TensorMismatch, elastic.StateMismatch) as error:  # ranks differ
                    print(error)
                except elastic.NotElastic as error:  # not supported when the world changes
                    print(error)
                except elastic.ElasticError as error:  # base class of the errors of this package
                    print(error)
                """,
            ),
            Entry(
                "PeerLost WorldChanging Interrupted",
                """
                try:
                    elastic.barrier()
                except (elastic.PeerLost, elastic.WorldChanging, elastic.Interrupted):
                    raise  # elastic.run handles these exceptions: clean up, then re-raise
                """,
            ),
            Entry(
                "StaleValueWarning",
                """
                import warnings

                warnings.simplefilter("error", elastic.StaleValueWarning)  # a stale copy of RANK ends the worker
                """,
            ),
        ),
    ),
)
