"""The entry point that `import torch` calls in a worker, for any order of imports."""

import os
import sys
from importlib.metadata import entry_points

import pytest
import torch

from elastic.errors import Invalid
from harness.golden import raises
from harness.program import stdout_of

PROGRAM = """
{first}
import torch
from elastic.torch_autoload import autoload
autoload()  # as torch has called it, if this is installed
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
print(type(torch.distributed.group.WORLD).__name__)
"""


def test_autoload_is_an_entry_point_of_the_installed_package():
    [ours] = [each for each in entry_points(group="torch.backends") if each.name == "elastic"]
    assert ours.value == "elastic.torch_autoload:autoload"


@pytest.mark.parametrize(
    ("first", "place", "group"),
    [
        pytest.param(
            "from elastic.runtime import lifecycle",
            "0 1",
            "ElasticProcessGroup",
            marks=pytest.mark.nightly,
        ),
        pytest.param("import torch", "0 1", "ElasticProcessGroup", marks=pytest.mark.slow),
        pytest.param(  # a separate group of this worker only
            "import horovod.torch", "1 2", "ProcessGroup", marks=pytest.mark.nightly
        ),
    ],
)
def test_backend_is_registered_for_any_order_of_imports(first, place, group):
    rank, size = place.split()
    env = os.environ | {"RANK": rank, "WORLD_SIZE": size, "ELASTIC_TORCH_BACKEND": "elastic"}
    program = PROGRAM.format(first=first)
    assert stdout_of(sys.executable, "-c", program, env=env).split() == [group]


def test_ddp_created_before_the_world_is_refused(monkeypatch):
    from torch.nn.parallel import distributed
    from torch.nn.parallel.distributed import DistributedDataParallel

    from elastic import torch_autoload

    monkeypatch.setattr(distributed, "_get_default_group", torch_autoload.group_for_ddp)
    with raises(Invalid):
        DistributedDataParallel(torch.nn.Linear(1, 1))
