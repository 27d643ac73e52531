"""Assignment of ranks, and composition of the next world."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic.driver.membership.records.roster import WorkerRecord
from elastic.driver.membership.scheduling.rank_order import (
    COPIES_LIMIT,
    arrange,
    copy_groups,
    next_place,
    places,
    slots,
)
from elastic.driver.membership.worlds.composition import Composition, compose
from elastic.driver.reasons import as_sentence
from elastic.protocol.messages import Commit, Place, Worker
from harness.conversation import worker

A, B, C, D = (worker(name) for name in ("h1:0", "h1:1", "h2:0", "h2:1"))


def test_holders_of_the_newest_commit_are_ordered_first_in_their_old_order():
    commits = {A: Commit(2, 6), B: None, C: Commit(2, 7), D: Commit(2, 7)}
    arrangement = arrange([A, B, C, D], [], commits)
    assert arrangement.order == [C, D, A, B]
    assert (arrangement.holders, arrangement.commit) == (2, Commit(2, 7))


def test_commit_of_a_later_generation_is_newer_for_any_number():
    assert arrange([A, B], [], {A: Commit(2, 99), B: Commit(3, 0)}).order == [B, A]


def test_newcomer_is_never_a_source():
    arrangement = arrange([A], [B], {A: None, B: Commit(9, 9)})
    assert (arrangement.order, arrangement.holders) == ([A, B], 0)


def test_order_is_kept_without_commits():
    assert arrange([C, A], [B], {}).order == [C, A, B]


def test_state_is_sent_by_a_holder_on_the_receivers_host():
    e, f = worker("h2:2"), worker("h3:0")
    assert copy_groups([A, C, B, D, e, f], 2) == [[0, 2, 5], [1, 3, 4]]
    assert copy_groups([C, A, D], 2) == []  # rank 0 sends, as without groups
    assert copy_groups([A, C], 2) == []
    assert copy_groups([A, C, D], 0) == []  # nobody has committed


def test_senders_of_many_receivers_are_not_listed():
    many = [worker(f"h2:{slot}") for slot in range(1, COPIES_LIMIT + 2)]
    assert len(copy_groups([A, C, *many[1:]], 2)) == 1
    assert copy_groups([A, C, *many], 2) == []


def test_places_count_within_world_host_and_across_hosts():
    assert places([C, A, B]) == [
        Place(0, 3, 0, 1, 0, 2),
        Place(1, 3, 0, 2, 1, 2),
        Place(2, 3, 1, 2, 0, 1),
    ]


def test_places_when_a_slot_occurs_twice_then_both_workers_have_the_last_cross_rank():
    order = [A, C, C.next(), D]
    assert places(order) == [
        Place(0, 4, 0, 1, 0, 2),
        Place(1, 4, 0, 3, 2, 2),
        Place(2, 4, 0, 3, 2, 2),
        Place(3, 4, 1, 3, 0, 1),
    ]


def test_places_from_a_rank_on_are_the_last_places():
    assert places([C, A, B, D], 3) == places([C, A, B, D])[3:]


def test_next_place_is_the_last_place():
    assert next_place([C, A, B], D) == places([C, A, B, D])[-1]
    assert next_place([], A) == places([A])[0]


def test_next_place_of_a_member_is_after_the_others():
    assert next_place([C, A, B], A) == places([C, B, A])[-1]


def test_slots_are_assigned_host_by_host_in_the_order_of_the_list():
    assert list(slots({"b": 2, "a": 1})) == [("b", 0), ("b", 1), ("a", 0)]


# ---- composition --------------------------------------------------------------------------------


def record(who: Worker, *, leaving: str = "", unlisted: bool = False) -> WorkerRecord:
    made = WorkerRecord(who, 0.0, Place(0, 1, 0, 1, 0, 1), layout="x", running=True)
    made.leaving = as_sentence(leaving) if leaving else None
    made.unlisted = unlisted
    return made


def composed(old, new=(), commits=None, low=1, high=4) -> Composition:
    held = commits or {s.worker: Commit(2, 5) for s in old}
    return compose(old, list(new), held, workers_min=low, workers_max=high)


def going(composition: Composition) -> list[Worker]:
    return [s.worker for s in composition.leaving]


def test_leaving_worker_is_released_when_a_staying_one_holds_the_same_commit():
    made = composed([record(A, leaving="SIGTERM"), record(B)])
    assert going(made) == [A] and made.arrangement.order == [B]


def test_leaving_worker_stays_when_no_other_worker_holds_the_newest_commit():
    commits = {A: Commit(2, 6), B: Commit(2, 5)}
    made = composed([record(A, leaving="SIGTERM"), record(B)], commits=commits)
    assert going(made) == [] and made.arrangement.order == [A, B]


def test_worker_of_an_unlisted_host_waits_for_a_replacement_but_not_after_sigterm():
    assert going(composed([record(A), record(B, leaving="gone", unlisted=True)], low=2)) == []
    assert going(composed([record(A), record(B, leaving="SIGTERM")], low=2)) == [B]


def test_first_world_has_the_layout_of_its_source_and_rejects_different_ones():
    odd = record(B)
    odd.layout = "y"
    made = composed([record(A), odd, record(C)], commits={A: None})
    assert made.arrangement.order == [A, C] and made.rejected == [odd] and made.layout == "x"


people = st.lists(
    st.tuples(st.sampled_from(["", "SIGTERM", "gone"]), st.integers(0, 3)), max_size=6
)


@given(people, people, st.integers(1, 6), st.integers(1, 6))
def test_no_commit_is_lost_and_no_world_exceeds_the_maximum(old, new, low, high):
    low, high = min(low, high), max(low, high)
    members = [
        record(Worker("h", n), leaving=why, unlisted=why == "gone")
        for n, (why, _) in enumerate(old)
    ]
    commits = {
        s.worker: Commit(1, n) if n else None for s, (_, n) in zip(members, old, strict=True)
    }
    joining = [record(Worker("g", n)) for n in range(len(new))]
    made = compose(members, joining, commits, workers_min=low, workers_max=high)
    order, newest = made.arrangement.order, made.arrangement.commit
    held = [c for c in commits.values() if c is not None]
    assert newest == max(held, default=None)
    assert all(commits[w] == newest for w in order[: made.arrangement.holders])
    assert not {s.worker for s in made.leaving} & set(order)
    hurried = [s for s in members if s.hurried]
    assert sum(s.worker in order for s in hurried) <= 1
    assert len(order) <= max(high, len(members), 2)
