"""The table of process sets, without processes: requests of ranks, and equal tables at the end in all cases."""

from __future__ import annotations

import random

import pytest

from elastic.errors import Invalid
from elastic.negotiation.process_set_table import (
    ADD,
    REMOVE,
    ProcessSetTable,
    TableProposal,
    checked_ranks,
    present,
)
from harness.golden import raises, recorded


def world(size: int) -> list[ProcessSetTable]:
    """The tables of workers that are in one world."""
    tables = [ProcessSetTable() for _ in range(size)]
    for table in tables:
        table.in_world(size)
    return tables


def ask(
    tables: list[ProcessSetTable], do: str, *sets: tuple[int, ...], generation: int = 1
) -> list[TableProposal]:
    """Return every rank's request, after its transfer."""
    return [TableProposal.parse(table.wish(do, sets, generation).text()) for table in tables]


def add(tables: list[ProcessSetTable], *sets: tuple[int, ...], generation: int = 1) -> list[int]:
    wishes = ask(tables, ADD, *sets, generation=generation)
    numbers = [[e.number for e in table.add(wishes, generation)] for table in tables]
    assert all(each == numbers[0] for each in numbers)
    return numbers[0]


def remove(tables: list[ProcessSetTable], ranks: tuple[int, ...]) -> bool:
    wishes = ask(tables, REMOVE, ranks)
    (removed,) = {table.remove(wishes) for table in tables}
    return removed


def content(table: ProcessSetTable) -> dict[int, tuple[int, ...]]:
    return {entry.number: entry.ranks for entry in table.entries()}


# ---- lists of ranks ----------------------------------------------------------------------------------------------


def test_ranks_of_a_process_set_are_sorted():
    assert checked_ranks([2, 0]) == checked_ranks({0, 2}) == checked_ranks(range(0, 4, 2)) == (0, 2)


@pytest.mark.parametrize("ranks", [[], [0, 0, 1], [0, -1], [0, 1.5], [True, 2], ["0"], "01", 3])
def test_invalid_rank_lists_are_refused(ranks):
    with raises(Invalid):
        checked_ranks(ranks)


def test_mpi_communicator_is_refused():
    class Comm:
        def Get_rank(self) -> int:
            return 0

    with raises(Invalid):
        checked_ranks(Comm())


def test_ranks_missing_in_a_world_are_omitted():
    assert present((0, 2, 5), 6) == (0, 2, 5)
    assert present((0, 2, 5), 3) == (0, 2)
    assert present((4, 5), 3) == ()


# ---- adding and removing -----------------------------------------------------------------------------------------


def test_set_numbers_start_at_one_and_are_never_reused():
    tables = world(3)
    assert add(tables, (0, 1), (1, 2)) == [1, 2]
    assert remove(tables, (0, 1)) is True
    assert add(tables, (0, 1)) == [3]
    assert [content(table) for table in tables] == [{2: (1, 2), 3: (0, 1)}] * 3


def test_held_entry_reflects_the_removal_of_its_set():
    tables = world(2)
    wishes = ask(tables, ADD, (0,))
    (held,) = tables[0].add(wishes, 1)
    assert (held.number, held.removed) == (1, False)
    tables[0].remove(ask(tables[:1], REMOVE, (0,)))
    assert (held.number, held.removed) == (0, True)
    assert held.ranks == (0,)


def test_duplicate_sets_are_refused_without_an_effect():
    tables = world(3)
    add(tables, (0, 2))
    for sets in [(0, 2)], [(0, 1), (0, 1)], [(1,), (0, 2)]:
        wishes = ask(tables, ADD, *sets)
        for table in tables:
            with raises(Invalid):
                table.add(wishes, 1)
    assert [content(table) for table in tables] == [{1: (0, 2)}] * 3


def test_a_rank_that_never_existed_is_refused():
    tables = world(3)
    wishes = ask(tables, ADD, (1, 3))
    with raises(Invalid):
        tables[0].add(wishes, 1)


def test_a_rank_that_existed_once_may_return():
    survivors, newcomer = world(4)[:2], ProcessSetTable()
    newcomer.in_world(3)
    for table in survivors:
        table.in_world(3)
    assert add([*survivors, newcomer], (1, 3), generation=2) == [1]


def test_set_of_all_ranks_is_refused_when_the_world_size_is_fixed():
    tables = world(2)
    wishes = ask(tables, ADD, (0, 1))
    with pytest.raises(Invalid, match="use global_process_set"):
        tables[0].add(wishes, 1, fixed_size=2)
    assert tables[0].add(wishes, 1)[0].number == 1


def test_different_requests_raise_an_error_with_the_requests_of_all_ranks():
    tables = world(4)
    wishes = [
        *ask(tables[:1], ADD, (0, 1)),
        *ask(tables[1:2], REMOVE, (0, 1)),
        *ask(tables[2:], ADD, (0, 2)),
    ]
    sentence = (
        r"rank 0 asked to add \[0, 1\]; rank 1 asked to remove \[0, 1\]; ranks 2, 3 asked to add \[0, 2\]\."
        " Add and remove"
    )
    for table in tables:
        with pytest.raises(Invalid, match=sentence):
            table.add(wishes, 1)
        with pytest.raises(Invalid, match=sentence):
            table.remove(wishes)


def test_removing_an_unknown_set_is_an_error():
    assert remove(world(2), (0, 1)) is False


def test_sets_and_numbers_are_reset_by_a_shutdown():
    (table,) = tables = world(1)
    add(tables, (0,))
    held = table.entries()[0]
    table.clear()
    assert held.removed and not table.entries() and not table.joined
    table.in_world(2)
    assert add([table], (1,)) == [1]


# ---- after the world has changed ---------------------------------------------------------------------------------


def test_set_of_an_earlier_generation_is_found_again():
    tables = world(3)
    assert add(tables, (0, 1), generation=1) == [1]
    assert add(tables, (0, 1), generation=2) == [1]
    with raises(Invalid):
        tables[0].add(ask(tables, ADD, (0, 1), generation=2), 2)


def test_partially_applied_change_is_completed_by_the_next_request():
    tables = world(3)
    add(tables, (0, 1))
    tables[0].add(ask(tables, ADD, (1, 2)), 1)  # the world broke before the others had the answer
    assert add(tables, (1, 2), generation=2) == [2]
    tables[2].remove(ask(tables, REMOVE, (0, 1)))
    assert remove(tables, (0, 1)) is True
    assert add(tables, (0,), generation=2) == [3]
    assert [content(table) for table in tables] == [{2: (1, 2), 3: (0,)}] * 3


def test_conflicting_set_number_is_abandoned():
    tables = world(2)
    tables[0].add(ask(tables[:1], ADD, (0,)), 1)
    tables[1].add(ask(tables[1:], ADD, (1,)), 1)  # both call theirs 1
    assert add(tables, (0,), generation=2) == [2]
    assert add(tables, (1,), generation=2) == [3]
    assert [content(table) for table in tables] == [{2: (0,), 3: (1,)}] * 2


def test_joining_rank_adopts_the_table_of_the_world():
    """It registered what the script's first lines say; the world has removed a set since, and added one."""
    tables = world(3)
    add(tables, (0, 1), (1, 2))
    remove(tables, (0, 1))
    add(tables, (0, 2), generation=3)
    newcomer = ProcessSetTable()
    first, second = newcomer.add(ask([newcomer], ADD, (0, 1), (1, 2), generation=0), 0)
    news = newcomer.adopt(tables[0].text())
    assert content(newcomer) == content(tables[0]) == {2: (1, 2), 3: (0, 2)}
    assert second.number == 2 and first.removed
    recorded("messages", news)
    newcomer.in_world(3)
    assert add([tables[0], newcomer], (0, 2), generation=4) == [3]


def test_a_newcomer_that_saw_another_size_gets_the_set_of_the_same_statement():
    tables = world(4)
    add(tables, (0, 2), (1, 3))  # range(0, size, 2), range(1, size, 2)
    newcomer = ProcessSetTable()  # promised a world of three
    even, odd = newcomer.add(ask([newcomer], ADD, (0, 2), (1,), generation=0), 0)
    (news,) = newcomer.adopt(tables[0].text())
    assert (even.number, even.ranks) == (1, (0, 2))
    assert (odd.number, odd.ranks) == (2, (1, 3))
    recorded("messages", news)


def test_lagging_survivor_adopts_the_table_without_a_message():
    ahead, behind = world(2)
    add([ahead, behind], (0,))
    behind.add(ask([behind], ADD, (0, 1)), 1)  # the others never had the answer
    assert behind.adopt(ahead.text()) == []
    assert content(behind) == content(ahead) == {1: (0,)}
    assert add([ahead, behind], (0, 1), generation=2) == [3]  # 2 was used, if only by one


# ---- random changes ----------------------------------------------------------------------------------------------

FIRST_LINES = [(0, 1), (1, 2), (0, 3)]


class Job:
    """Random changes among workers that join and leave; a world may break when only some have made a change."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.generation = 1
        self.tables = world(4)
        add(self.tables, *FIRST_LINES)
        self.since: set[tuple[int, ...]] = set(FIRST_LINES)  # added in this generation

    def sets(self) -> list[tuple[int, ...]]:
        return [entry.ranks for entry in self.tables[0].entries()]

    def change(self) -> None:
        """One change, agreed by all; before it comes through, the world may break, even more than once."""
        ranks = tuple(sorted(self.random.sample(range(4), self.random.randint(1, 3))))
        do = REMOVE if ranks in self.sets() and self.random.random() < 0.5 else ADD
        if do == ADD and ranks in self.since:
            return
        while self.random.random() < 0.4:
            wishes = ask(self.tables, do, ranks, generation=self.generation)
            for table in self.random.sample(self.tables, self.random.randint(0, len(self.tables))):
                self.perform(table, do, wishes)
            self.next_world()
        wishes = ask(self.tables, do, ranks, generation=self.generation)
        for table in self.tables:
            self.perform(table, do, wishes)
        (self.since.add if do == ADD else self.since.discard)(ranks)

    def perform(self, table: ProcessSetTable, do: str, wishes: list[TableProposal]) -> None:
        table.add(wishes, self.generation) if do == ADD else table.remove(wishes)

    def next_world(self) -> None:
        """Some are lost, some hold an older commit, newcomers have run the first lines."""
        self.generation += 1
        self.since.clear()
        kept = self.random.sample(self.tables, self.random.randint(1, len(self.tables)))
        holders = self.random.randint(1, len(kept))
        newcomers = [ProcessSetTable() for _ in range(self.random.randint(0, 5 - len(kept)))]
        for table in newcomers:
            table.add(ask([table], ADD, *FIRST_LINES, generation=0), 0)
        self.tables = kept + newcomers
        for table in self.tables[holders:]:
            table.adopt(self.tables[0].text())
        for table in self.tables:
            table.in_world(len(self.tables))


def test_tables_of_all_ranks_are_equal_after_each_change():
    """Repeated training is repeated by all; so the tables are equal after every completed change."""
    for seed in range(50):
        job = Job(seed)
        for _ in range(30):
            job.change()
            assert all(content(table) == content(job.tables[0]) for table in job.tables), seed
            if job.random.random() < 0.3:
                job.next_world()
