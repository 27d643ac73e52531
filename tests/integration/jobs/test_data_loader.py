"""Jobs that train on a loader while workers are killed and return: each sample counts once per epoch."""

import pytest

from harness.history import RETURN, SCRIPTS, STAY_AWAY, History

pytestmark = pytest.mark.forked


@pytest.mark.parametrize(
    ("flags", "env"),
    [
        (STAY_AWAY, {"LOADER_WORKERS": "2"}),
        pytest.param(RETURN, {"FULL": "3"}, marks=pytest.mark.nightly),
        pytest.param(RETURN, {"FULL": "3", "STREAM": "1"}, marks=pytest.mark.nightly),
        pytest.param(
            RETURN, {"FULL": "3", "STREAM": "1", "LOADER_WORKERS": "1"}, marks=pytest.mark.nightly
        ),
    ],
    ids=["kills", "joins", "a stream", "a stream in loader workers"],
)
def test_each_sample_counts_once_per_epoch(job, flags, env):
    """Two workers die, one of them as rank 0; the journal has what each commit has of the samples."""
    training = job(
        f"-np 3 --min-np 1 {flags}",
        ["python", SCRIPTS / "data_loader.py"],
        env={"ELASTIC_DIGESTS": "1", "DIE": "2,8 0,27", **env},
    )
    training.succeed()
    size = int(env.get("FULL", "1"))
    training.wait_for(rf"each sample counts \[2.0\] size {size}", count=size)
    History(training).check_equal()
