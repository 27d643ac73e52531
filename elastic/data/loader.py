"""DataLoader whose position is part of the job's state, so that committed steps use each sample once per epoch.

torch's DataLoader loads the samples. This module determines the samples of each batch from the job's position (see
`sample_partition`), and counts progress when the loop receives batches and optimizers step (see `committed_batches`),
not when loader workers prefetch.
"""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Protocol

import torch

from elastic.data import optimizer_steps
from elastic.data.batch_gradients import BatchGradients
from elastic.data.committed_batches import DataProgress
from elastic.data.loader_arguments import LoaderArguments, Seeds, is_stream
from elastic.data.sample_partition import Position, SamplePartition
from elastic.data.sample_sources import IndexedSource, Loaded, Source, StreamSource
from elastic.data.sampler import present_world
from elastic.data.stream_dataset import NOBODY
from elastic.errors import Invalid, NotInitialized
from elastic.rendezvous import worker_settings
from elastic.runtime import lifecycle

World = tuple[int, int, int]  # rank, size and generation


class GivenShards(Protocol):
    """Interface of `elastic.Shards` that a loader needs."""

    count: int
    exact: bool

    @property
    def held(self) -> Sequence[int]:
        """Return the shards of this rank in the current world, ascending. Reading them counts as fetching a step."""

    @property
    def assigned(self) -> Sequence[int]:
        """Return the shards of this rank in the current world, ascending.

        Unlike `held`, this does not count as fetching a step.
        """


loaders: weakref.WeakSet[DataLoader] = weakref.WeakSet()  # all loaders of this process


class DataLoader:
    """Data loader that resumes in the middle of an epoch after a failure, in a world of any size.

    It yields this rank's batches of an epoch, starting at the job's position. Put the loader in the state, as in
    ``TorchState(model=model, optimizer=optimizer, loader=loader)``.

    Args:
        dataset: map-style (with ``__len__`` and ``__getitem__``) or iterable. Every rank reads the whole stream of an
            iterable dataset.
        batch_size: samples per rank and step, or None if a sample of the dataset is already a batch.
        global_batch_size: alternative to ``batch_size``: number of samples per step over all ranks, for any number of
            ranks.
        shuffle, seed: determine the order of the samples, as in torch's ``DistributedSampler``.
        sampler, batch_sampler: sampler of the indices of all ranks together, deterministic for given seeds of torch,
            random and numpy.
        drop_last: whether to omit an incomplete last step of an epoch.
        sample_seeds: True seeds the random generators before each sample is loaded (see `SeededDataset`), False never
            seeds them. By default, only loaders with exact ``shards`` seed them, before each batch, or before each
            sample of a stream.
        shards: ``elastic.Shards(8)``, with ``global_batch_size``: divide a step into 8 shards in any world; ``for step
            in loader: for batch in shards.over(step): ...`` iterates over the batches of this rank's shards. A plain
            number assigns shards to ranks in blocks.
        options: all other arguments of torch's DataLoader.

    After a recovery or a ``break``, iteration resumes at the same position. At the end of an epoch, the next epoch
    becomes current. A loader that is not in a state starts each iteration from the beginning.

    Attributes:
        weight: weight of the current batch. The average over ranks of a batch mean times ``weight`` is the mean over
            the whole step. The weight is 1.0 except in the last steps of an epoch, and 0.0 if this rank has no sample
            and received a placeholder.
        shard: number of the shard to which the current batch belongs.
        ahead: number of batches that the loop fetches before it trains on the current one; 0 by default.

    Raises:
        Invalid: an argument is invalid, or the dataset has changed.
        NotInitialized: this worker of a job has not called ``init()`` yet.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[Sequence[Any]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        *,
        global_batch_size: int | None = None,
        seed: int = 0,
        sample_seeds: bool | None = None,
        shards: int | GivenShards | None = None,
        **options: Any,
    ) -> None:
        self._shards = None if isinstance(shards, int) else shards
        seeds = Seeds.SAMPLE if sample_seeds else None
        if sample_seeds is None and self._shards is not None and self._shards.exact:
            seeds = Seeds.SAMPLE if is_stream(dataset) else Seeds.BATCH
        self.arguments = LoaderArguments(
            dataset=dataset,
            batch_size=batch_size,
            shuffle=bool(shuffle),
            sampler=sampler,
            batch_sampler=batch_sampler,
            num_workers=num_workers,
            collate_fn=collate_fn,
            drop_last=bool(drop_last),
            global_batch_size=global_batch_size,
            seed=seed,
            seeds=seeds,
            shards=shards if shards is None or isinstance(shards, int) else shards.count,
            options={"pin_memory": pin_memory, **options},
        )
        self.dataset = dataset
        self.batch_size = batch_size if global_batch_size is None else None
        self.drop_last = self.arguments.drop_last
        self.num_workers = num_workers
        self.weight = 1.0
        self.shard = 0
        streams = self.arguments.streams
        self._source: Source = (StreamSource if streams else IndexedSource)(self.arguments)
        self._progress = DataProgress()
        # number of iterations started so far, which identifies the current iterator
        self._passes = 0
        # whether batches on which an optimizer step may depend were handed out in this pass
        self._handed_some = False
        self._in_state = self._awaits_steps = False
        self._gradients = BatchGradients()
        self._dealt = SamplePartition(1, 1)  # partition of the samples in the current iteration
        self._began_in = 0  # epoch of the current iteration
        self._count = optimizer_steps.count()  # number of optimizer steps at the last check
        self._moves = 0  # number of times that the position was set other than by iterating
        self._noting = worker_settings.digests()
        # samples trained since the last `take_trained`, for tests
        self._handed: list[tuple[Position, int, list[int]]] = []
        optimizer_steps.watch()
        loaders.add(self)

    # ---- interface for scripts -------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Number of the current epoch, from 0."""
        return self._progress.position.epoch

    @property
    def position(self) -> Position:
        """The epoch, and the number of its samples that all ranks together have received."""
        return self._progress.position

    @property
    def shards(self) -> GivenShards | None:
        """The shards into which the loader's steps are divided, or None."""
        return self._shards

    @property
    def in_state(self) -> bool:
        """Whether the loader is part of a state, whose commits contain the position of the loader."""
        return self._in_state

    @property
    def ahead(self) -> int:
        """Number of batches that the loop has fetched beyond the current one."""
        return self._progress.ahead

    @ahead.setter
    def ahead(self, batches: int) -> None:
        self._progress.ahead = operator.index(batches)

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch, or continue it if it is the current one.

        Call this method before each epoch, as with torch's ``DistributedSampler``.

        Args:
            epoch: number of the epoch, from 0.

        Raises:
            Invalid: ``epoch`` is negative.
        """
        wanted = operator.index(epoch)
        if wanted < 0:
            raise Invalid(f"epoch is {epoch}: pass a number of 0 or more")
        if wanted != self.epoch:
            self._go_to(Position(wanted, 0))

    def settle(self) -> None:
        """Count all batches that the loop has received as trained, even without an optimizer step."""
        self._look_for_steps()
        self._progress.settle()

    def __len__(self) -> int:
        """Return the number of steps in a whole epoch in the current world.

        Raises TypeError if the dataset is a stream.
        """
        return self._dealing().steps(self._length())

    @property
    def remaining(self) -> int:
        """Return the number of steps left in the epoch in the current world.

        Raises TypeError if the dataset is a stream.
        """
        return self._dealing().steps(max(0, self._length() - self.position.consumed))

    def __iter__(self) -> Iterator[Any]:
        """Iterate from the job's position. Earlier iterators of this loader become invalid."""
        _check_joined()
        self._look_for_steps()
        self._passes += 1
        self._handed_some = False
        return LoaderIterator(self, self._passes)

    # ---- interface for states --------------------------------------------------------------------

    def attach(self, parameters: Callable[[], Iterable[torch.Tensor]], *, stepped: bool) -> None:
        """Make the loader part of a state with these parameters.

        Args:
            parameters: function that returns the parameters of the state.
            stepped: whether an optimizer of the state trains these parameters.
        """
        self._in_state = True
        self._gradients.parameters, self._awaits_steps = parameters, stepped

    def layout(self) -> str:
        """Return the loader's part of the state's layout.

        Its lines must be equal on all ranks and in a checkpoint.
        """
        arguments, length = self.arguments, self._source.length(self.epoch)
        by = arguments.batch_sampler if arguments.sampler is None else arguments.sampler
        order = "shuffled" if arguments.shuffle else "in order"
        exact = self._shards is not None and self._shards.exact
        return " ".join(
            [
                type(self).__name__,
                "of a stream" if length is None else f"of {length}",
                order if by is None else f"by {type(by).__name__}",
                f"seed {arguments.seed}",
                # Outside exact jobs, a restart may use a different batch size.
                *([f"batch {arguments.global_batch_size}"] if exact else []),
                *(["drop_last"] if exact and arguments.drop_last else []),
                *([arguments.seeds.value] if exact and arguments.seeds else []),
            ]
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's values for a commit. Their size does not depend on the dataset."""
        return self._progress.state_dict(before_steps=self._look_for_steps())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a committed position.

        Args:
            state: result of `state_dict` on any rank.
        """
        self._leave()
        self._progress.load_state_dict(state)
        self._handed = []  # Uncommitted samples are trained again, on any rank.

    def reset(self) -> bool:
        """Return to the trained position after a change of the world, and divide the remaining samples again.

        Returns:
            Whether the loop will receive the same batches again, so that their gradients must not count.
        """
        position = self._progress.committed(before_steps=self._look_for_steps())
        again = position != self.position
        self._go_to(position)
        self._handed = [each for each in self._handed if each[0] <= position]
        return again

    def take_trained(self) -> list[tuple[int, list[int]]]:
        """Return the IDs, by epoch, of the samples trained since the last call. For tests (ELASTIC_DIGESTS=1)."""
        upto = self._progress.committed(before_steps=self._look_for_steps())
        done: dict[int, list[int]] = {}
        for _, epoch, samples in (each for each in self._handed if each[0] <= upto):
            done.setdefault(epoch, []).extend(samples)
        self._handed = [each for each in self._handed if each[0] > upto]
        return sorted(done.items())

    # ---- implementation --------------------------------------------------------------------------

    def _length(self) -> int:
        length = self._source.length(self.epoch)
        if length is None:
            raise TypeError(
                f"the dataset {type(self.dataset).__name__} is a stream, so the number of its steps is unknown: do not"
                " call len() on this loader, or pass a dataset with a length"
            )
        return length

    def _dealing(self) -> SamplePartition:
        _check_joined()
        return self.arguments.dealing(present_world()[1])

    def _look_for_steps(self) -> bool:
        """Record optimizer steps.

        Returns:
            Whether batches of this iteration have produced gradients, but no optimizer step followed since the loader
            was created.
        """
        count, progress = optimizer_steps.count(), self._progress
        if count != self._count:
            self._count = count
            if self._handed_some:
                progress.stepped()
        return (
            self._handed_some
            and self._awaits_steps
            and not progress.by_steps
            # With shards, gradients are not checked: a rank with empty shards has none, but must make the same decision
            # as the other ranks.
            and (self.arguments.shards is not None or self._gradients.new)
        )

    def _go_to(self, position: Position) -> None:
        self._leave()
        self._progress.go_to(position)

    def _leave(self) -> None:
        self._moves += 1
        self._handed_some = False
        self._gradients.count()

    def _begin(self, world: World, again: bool) -> Iterator[Loaded]:
        """Divide the remaining samples of the epoch among the ranks of the world, and start to load this rank's part.

        Args:
            world: the current world.
            again: whether this iteration already began in this world with other parts.
        """
        progress = self._progress
        self._dealt = dealing = self.arguments.dealing(world[1])
        if not self._in_state and not again:
            progress.go_to(Position(self.epoch, 0))
        length = self._source.length(self.epoch)
        position = progress.begin(length)
        self._began_in = position.epoch
        if self._awaits_steps and not progress.by_steps:
            self._gradients.look()
        if length is not None and dealing.steps(length) == 0:
            raise Invalid(
                f"drop_last=True would make every epoch empty: the dataset has {length} samples, but a step"
                f" needs {dealing.batch} samples. Use a smaller batch size, or omit drop_last"
            )
        return self._source.begin(position, dealing, self._mine(world))

    def _mine(self, world: World) -> list[int]:
        rank, size, _ = world
        shards = self.arguments.shards
        if shards is None:
            return [rank]
        if self._shards is not None:
            return list(self._shards.assigned)
        return list(SamplePartition(size, shards).part(range(shards), rank))

    def _hand(self, consumed: int) -> None:
        self._progress.hand(consumed)
        self._handed_some = True

    def _finish(self) -> None:
        self._progress.finish()
        # whether some fetched batches have not been trained on yet
        self._handed_some = self.ahead > 0

    def _hand_out(self, step: range, part: int) -> None:
        dealing = self._dealt
        self.weight = 0.0 if part == NOBODY else dealing.weight(step, part)
        self.shard = part
        if self.arguments.shards is not None:
            self._gradients.count()  # The gradients of the previous shard are complete.
        if self.weight == 0.0 and part != NOBODY:
            self._gradients.silence()
        if self._noting and part != NOBODY:
            samples = self._source.ids(self.epoch, dealing.part(step, part))
            self._handed.append((Position(self.epoch, step.stop), self.epoch, samples))

    def _next_of(self, number: int) -> World:
        """Return the current world. This method is called before each batch.

        Raises:
            Invalid: a second iteration over the same loader has started.
        """
        if number != self._passes:
            raise Invalid(
                "a second iteration over this loader started, so the first iteration can't continue: create a"
                " second loader to iterate twice at the same time"
            )
        self._look_for_steps()
        self._gradients.count()
        return present_world()


class LoaderIterator(Iterator[Any]):
    """Iterator over the remaining batches of an epoch. It follows changes of the loader's position and of the world."""

    def __init__(self, loader: DataLoader, number: int) -> None:
        self._loader = loader
        self._number = number
        self._at: tuple[int, World, tuple[int, ...]] | None = None
        self._batches: Iterator[Loaded] = iter(())
        self._shards: StepShards | None = None
        self._over = False

    def __next__(self) -> Any:
        loader = self._loader
        world = loader._next_of(self._number)
        given = () if loader._shards is None else tuple(loader._shards.assigned)
        at = loader._moves, world, given
        if at != self._at:
            self._batches = iter(())  # End the old loader workers before new ones start.
            self._shards, self._over = None, False
            # Do not restart an epoch in progress if only the assignment of shards has changed.
            again = self._at is not None and self._at[:2] == at[:2]
            self._batches = loader._begin(world, again)
            self._at = at
        if self._shards is not None:
            self._shards.check_done()
        loaded = None if self._over else next(self._batches, None)
        if loaded is None:
            if not self._over:
                self._over = True
                self._batches = iter(())
                loader._finish()
            raise StopIteration
        step, part, batch = loaded
        loader._hand(step.stop)
        if loader.arguments.shards is None:
            loader._hand_out(step, part)
            return batch
        self._shards = StepShards(loader, loaded, self._batches, world)
        return self._shards


class StepShards(Iterator[Any]):
    """The shards of this rank in one step, with one batch per shard.

    A batch is loaded when it is requested. The script must iterate over all batches.

    Args:
        held: numbers of the shards. A rank without shards has an empty list.
    """

    def __init__(
        self, loader: DataLoader, first: Loaded, rest: Iterator[Loaded], world: World
    ) -> None:
        self.held = loader._mine(world) if loader._shards is None else list(loader._shards.held)
        self._loader = loader
        self._left = len(self.held)
        self._loaded = chain((first,), rest)
        self._step, self._epoch, self._dealt = first[0], loader._began_in, loader._dealt

    @property
    def in_state(self) -> bool:
        """Return whether commits contain the loader's position."""
        return self._loader.in_state

    @property
    def shards(self) -> GivenShards | None:
        """The shards of the step, or None if the loader was created with a number of shards."""
        return self._loader.shards

    @property
    def taken(self) -> bool:
        """Return whether the loop has received all batches of the step."""
        return self._left == 0

    def __getitem__(self, key: object) -> Any:
        raise Invalid(
            "this object is a step of all shards, not a batch: iterate over shards.over(step) to get the"
            " batches of this worker"
        )

    def __next__(self) -> Any:
        if self._left == 0:
            raise StopIteration
        self._left -= 1
        step, part, batch = next(self._loaded)
        self._loader._hand_out(step, part)
        return batch

    def take(self) -> tuple[Any, bool]:
        """Return the next batch, and whether loading it changed this process's random generators.

        If it did, the caller must seed the generators.
        """
        seeded = self._loader._source.seeded
        if seeded is None or self._loader.num_workers > 0:
            return next(self), False
        seeded.restores = False
        try:
            return next(self), True
        finally:
            seeded.restores = True

    @property
    def loads_any(self) -> bool:
        """Return whether `again` can load batches, including those of other ranks' shards."""
        return not self._loader.arguments.streams

    @contextlib.contextmanager
    def again(self, shard: int) -> Iterator[Any]:
        """Context manager that loads a shard's batch and makes it the loader's current batch within the block."""
        loader = self._loader
        before = loader.weight, loader.shard
        loader.weight, loader.shard = self._dealt.weight(self._step, shard), shard
        loader._gradients.count()
        if loader.weight == 0.0:
            loader._gradients.silence()
        try:
            yield loader._source.load(self._epoch, self._dealt, self._step, shard)
        finally:
            loader._gradients.count()
            loader.weight, loader.shard = before

    def check_done(self) -> None:
        """Raise Invalid if the script has left a batch of the step unused."""
        if self._left:
            raise Invalid(
                f"{self._left} shards of a step were skipped, and their samples would be lost: iterate over all"
                " shards of a step before the next step"
            )


def _check_joined() -> None:
    """Raise NotInitialized if this process is a worker that has not joined its job yet."""
    if lifecycle.position() is None:
        env = worker_settings.read()
        if env.driver is not None or (env.started is not None and env.started.way is not None):
            raise NotInitialized(
                "the loader was used before init(), so the rank of this worker is unknown: call init() before"
                " you iterate over the loader or use its length"
            )
