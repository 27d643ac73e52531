"""Indexes of the roster."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from elastic.driver.membership.records.roster import Roster, WorkerRecord, WorkerStage
from elastic.driver.reasons import as_sentence
from elastic.protocol.messages import Place, Worker

STAGES = [WorkerStage.READY, WorkerStage.MEMBER, WorkerStage.RETURNED]


def filled(stages: list[WorkerStage], odd: dict[int, str]) -> Roster:
    """Return a roster with a worker in each of these stages. ``odd``: the workers in other indexes, by their index."""
    found = Roster()
    for slot, stage in enumerate(stages):
        worker = Worker("h", slot)
        record = WorkerRecord(worker, 0.0, Place(slot, len(stages), slot, len(stages), 0, 1))
        found[worker] = record
        record.stage = stage
        match odd.get(slot):
            case "leaving":
                record.leaving = as_sentence("SIGTERM")
            case "inside" | "frozen" as index:
                setattr(record, index, "stopped")
    return found


def indexes(of: Roster) -> object:
    stages = {stage: [*of._stages[stage]] for stage in WorkerStage}
    others = [*of.leavers], [*of.inside], [*of.frozen]
    recorded = [(worker, record.stage) for worker, record in of.items()]
    return stages, of._stage_of, others, recorded, of.shifts, of.version


def one_by_one(of: Roster, workers: list[Worker], stage: WorkerStage) -> None:
    for worker in workers:
        of[worker].stage = stage


def together(of: Roster, workers: list[Worker], stage: WorkerStage) -> None:
    of.move([of[worker] for worker in workers], stage)


@given(
    st.lists(st.sampled_from(STAGES), min_size=1, max_size=12),
    st.dictionaries(
        st.integers(0, 11), st.sampled_from(["leaving", "inside", "frozen"]), max_size=2
    ),
    st.lists(
        st.tuples(st.sampled_from([*STAGES, None]), st.sampled_from(STAGES), st.randoms()),
        max_size=6,
    ),
)
def test_stages_when_set_together_then_all_indexes_are_as_if_set_one_by_one(stages, odd, moves):
    """Each move sets the stage of all workers of one stage, in any order, or of some workers of any stage."""

    def run(move: Callable[[Roster, list[Worker], WorkerStage], None]) -> object:
        found = filled(stages, odd)
        for (origin, target, _), order in zip(moves, orders, strict=True):
            moved = [w for w in order if origin is None or found[w].stage is origin]
            move(found, moved if origin else moved[::2], target)
        return indexes(found)

    workers = [Worker("h", slot) for slot in range(len(stages))]
    orders = [random.sample(workers, len(workers)) for _, _, random in moves]
    assert run(together) == run(one_by_one)
