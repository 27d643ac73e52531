"""RANK and related variables after a change of the world, and lines of a script that kept old values."""

from types import SimpleNamespace

import pytest

from elastic.protocol.messages import Place
from elastic.rendezvous import rank_variables
from elastic.rendezvous.rank_variables import VariableRead

START = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
ALONE = Place(0, 1, 1, 1, 0, 1)  # slot 0 is lost
READS = [VariableRead("train.py", 3, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]


def names(reads):
    return [read.name for read in reads]


def test_existing_rank_variables_get_the_values_of_the_present_world():
    env = dict(START)
    rank_variables.follow(ALONE, env)
    assert env == {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"}


def test_local_rank_variables_do_not_follow_the_world():
    """It picks the GPU of a worker that lives on."""
    env = {"LOCAL_RANK": "1", "HOROVOD_LOCAL_RANK": "1"}
    rank_variables.follow(ALONE, env)
    assert env == {"LOCAL_RANK": "1", "HOROVOD_LOCAL_RANK": "1"}


@pytest.mark.parametrize(
    ("place", "stale"),
    [
        (ALONE, ["RANK", "WORLD_SIZE", "LOCAL_RANK"]),
        (Place(0, 2, 1, 2, 0, 1), ["RANK", "LOCAL_RANK"]),  # slot 0 has come back, as rank 1
        (Place(1, 3, 1, 3, 0, 1), ["WORLD_SIZE"]),  # a worker has joined
        (Place(1, 2, 1, 2, 0, 1), []),
    ],
)
def test_values_kept_by_a_script_are_stale_in_another_world(place, stale):
    assert names(rank_variables.stale(place, START, READS)) == stale


def test_slot_0_that_keeps_rank_0_has_only_a_stale_world_size():
    start = START | {"RANK": "0", "LOCAL_RANK": "0"}
    place = Place(0, 1, 0, 1, 0, 1)
    assert names(rank_variables.stale(place, start, READS)) == ["WORLD_SIZE"]


def test_lines_that_read_the_environment_are_found():
    text = """
rank = int(os.environ["RANK"])
# "RANK"
local_rank = int(os.getenv("LOCAL_RANK"))
torch.cuda.set_device(local_rank)
def is_main(): return int(os.environ["RANK"]) == 0
name = f"log.{os.environ['LOCAL_RANK']}"
if local_rank == 0: save()
if not args.local_rank: save()
if int(os.environ["LOCAL_RANK"]) == 0 and step > 5: save()
"""
    found = list(rank_variables.reads_in("a.py", text))
    assert found == [
        VariableRead("a.py", 2, "RANK"),
        *(VariableRead("a.py", line, "LOCAL_RANK") for line in (8, 9, 10)),
    ]


def test_only_modules_of_the_script_are_searched_for_variable_reads(tmp_path):
    mine, installed = tmp_path / "trainer.py", tmp_path / "site-packages" / "theirs.py"
    installed.parent.mkdir()
    for file in (mine, installed):
        file.write_text('rank = os.environ["RANK"]\n')
    modules = {
        "trainer": SimpleNamespace(__file__=str(mine)),
        "theirs": SimpleNamespace(__file__=str(installed)),
        "elastic.context": SimpleNamespace(__file__=str(mine)),
        "gone": SimpleNamespace(__file__=str(tmp_path / "gone.py")),
        "built": SimpleNamespace(),
    }
    assert rank_variables.reads_of_script(modules) == [VariableRead(str(mine), 1, "RANK")]
