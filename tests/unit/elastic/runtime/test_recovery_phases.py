"""The report of the parts of a recovery."""

from elastic.runtime.recovery_phases import Phases


def test_groups_of_the_previous_world_are_not_counted_in_the_recovery():
    phases = Phases()
    phases.mark("world", 1.0)
    phases.formed(4.0)  # before elastic.run, for a broadcast
    phases.mark("ready", 6.0)
    phases.mark("world", 6.0)
    phases.formed(0.25)
    phases.formed(0.25)
    phases.mark("synced", 7.0)
    report = phases.stepped(2, 7.0)
    assert report is not None
    assert report[0]["formed"] == 500.0


def test_only_the_report_of_a_world_resumed_from_a_checkpoint_has_its_flag():
    phases = Phases()
    found = []
    for generation, stored in ((2, False), (3, True), (4, False)):
        phases.mark("ready", generation)
        phases.mark("world", generation)
        phases.from_checkpoint = stored
        phases.mark("synced", generation)
        report = phases.stepped(generation, generation)
        assert report is not None
        found.append(report[2])
    assert found == [False, True, False]
