"""Resources after a hundred broken worlds in the workers that survive all of them: none are leaked."""

import pytest

from harness.history import History, started

pytestmark = [pytest.mark.fakecuda, pytest.mark.slow, pytest.mark.timeout(900)]
WORLDS = 100
EACH = 12  # kernels: a few steps, and those that connect
# Old groups are closed beside the training, so a record may count one that is just ending.
ALLOWED = {
    "fds": 4,
    "threads": 4,
    "streams": 0,
    "communicators": 2,
    "device bytes": 0,
    "pinned bytes": 0,
}


def test_hundred_nccl_errors_leak_no_resources(job, fake_cuda):
    errors = ";".join(f"kernel:error,rank=1,nth={EACH * number}" for number in range(1, WORLDS + 1))
    env = fake_cuda(gpus=2, FAKE_FAULTS=errors, DEVICE="cuda", COUNT="1", ENDS="over")
    training = started(job, 2, **env)
    training.wait_for(r"slot 0 enters", 800, count=WORLDS)
    (training.folder / "over").touch()
    training.succeed(60)
    history = History(training)
    history.check(steps=None)
    assert len(history.by_worker) == 2
    for worker, records in history.by_worker.items():
        used = [record for record in records if record["what"] == "enter"]
        assert len(used) >= WORLDS
        early, late = used[2:12], used[-10:]  # the pools of streams and the like are full by then
        for name, allowed in ALLOWED.items():
            # The smallest but one: a world may be recorded before its connections are open.
            before, after = (sorted(record[name] for record in some)[1] for some in (early, late))
            curve = [record[name] for record in used]
            assert after <= before + allowed, (worker, name, curve)
