"""Horovod's API: every name that a Horovod script may use exists, under the usual paths."""

from __future__ import annotations

import importlib
import os
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest
import torch

import horovod
import horovod.torch as hvd
from elastic.errors import Invalid
from elastic.horovod_errors import HorovodVersionMismatchError
from elastic.launcher import launch_function
from elastic.optimizer.adasum_optimizer import AdasumDistributed
from elastic.optimizer.distributed_optimizer import _subclass
from elastic.optimizer.wrapped_optimizer import WrappedOptimizer
from elastic.optimizer.zero1_optimizer import DividedOptimizer
from harness.golden import raises, warns
from harness.program import output_of
from horovod import unavailable
from horovod.common import util
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from horovod.runner.elastic.discovery import FixedHosts, HostDiscoveryScript, HostManager
from horovod.runner.elastic.worker import HostUpdateResult
from horovod.runner.launch import run_commandline
from horovod.torch.optimizer import _DistributedOptimizer


def test_misspelt_name_raises_attribute_error():
    with raises(AttributeError):
        _ = hvd.allredcue  # type: ignore[attr-defined]
    with raises(AttributeError):
        _ = horovod.tensorflow


def test_star_import_provides_the_api():
    names: dict[str, object] = {}
    exec("from horovod.torch import *", names)
    assert names["allreduce"] is hvd.allreduce


PATHS = {  # in addition to those in docs/horovod.md
    "horovod": "run",
    "horovod.common.process_sets": "ProcessSet global_process_set add_process_set remove_process_set"
    " process_sets process_set_by_id get_process_set_ids_and_ranks",
    "horovod.common.util": "gloo_built mpi_built nccl_built ddl_built ccl_built cuda_built rocm_built"
    " extension_available gpu_available",
    "horovod.runner": "run",
    "horovod.runner.elastic.discovery": "HostDiscovery HostDiscoveryScript FixedHosts HostManager",
    "horovod.runner.launch": "run_commandline",
    "horovod.torch": "_check_has_gpu Compression elastic",
    "horovod.torch.compression": "Compression",
    "horovod.torch.elastic": "run TorchState ElasticSampler State ObjectState",
    "horovod.torch.elastic.sampler": "ElasticSampler",
    "horovod.torch.elastic.state": "TorchState",
    "horovod.torch.mpi_ops": "HorovodInternalError allreduce size is_homogeneous Average nccl_built",
    "horovod.torch.optimizer": "_DistributedOptimizer",
}


def test_names_exist_under_the_import_paths_of_scripts():
    for path, names in PATHS.items():
        module = importlib.import_module(path)
        missing = [name for name in names.split() if getattr(module, name, None) is None]
        assert not missing, path


def test_env_context_sets_variables_and_restores_them(monkeypatch):
    """As in Horovod's tests."""
    monkeypatch.setenv("WAS_SET", "before")
    monkeypatch.delenv("WAS_NOT", raising=False)
    with pytest.raises(KeyError), util.env(WAS_SET="in", WAS_NOT="in", LEFT=None):
        assert (os.environ["WAS_SET"], os.environ["WAS_NOT"]) == ("in", "in")
        assert "LEFT" not in os.environ
        raise KeyError
    assert os.environ["WAS_SET"] == "before"
    assert "WAS_NOT" not in os.environ


def test_reduction_constants_have_horovods_numbers():
    numbers = [hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product]
    assert numbers == [0, 1, 2, 3, 4, 5]


def test_version_is_that_of_horovod_with_a_local_part():
    assert horovod.__version__ == "0.28.1+hvd.elastic"


def test_gloo_is_available_and_mpi_is_not():
    assert hvd.gloo_built() and hvd.gloo_enabled()
    assert not (hvd.mpi_built() or hvd.mpi_enabled() or hvd.mpi_threads_supported())
    assert not (hvd.ddl_built() or hvd.ccl_built())
    assert isinstance(hvd.nccl_built(), int) and isinstance(hvd.cuda_built(), bool)


def test_exceptions_have_horovods_bases_and_attributes():
    assert hvd.HorovodInternalError is HorovodInternalError
    assert issubclass(HorovodInternalError, RuntimeError)
    assert issubclass(HostsUpdatedInterrupt, RuntimeError)
    assert HostsUpdatedInterrupt().skip_sync is False
    assert HostsUpdatedInterrupt(skip_sync=True).skip_sync is True
    error = HorovodVersionMismatchError("torch", "2.8", "2.9")
    assert isinstance(error, ImportError)
    assert (error.name, error.version, error.installed_version) == ("torch", "2.8", "2.9")


def test_horovod_installed_in_the_environment_is_warned_of(monkeypatch):
    monkeypatch.setattr(metadata, "version", {"horovod": "0.28.1"}.__getitem__)
    with warns(UserWarning):
        hvd._warn_of_another_horovod()


def test_importing_horovod_imports_neither_torch_nor_the_launcher():
    program = "import horovod, sys; assert not {'torch', 'horovod.runner'} & set(sys.modules)"
    output_of(sys.executable, "-c", program, cwd=Path(__file__).parents[3])


# ---- horovod.run ---------------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch):
    """Return the arguments of ``launch``."""
    calls = []

    def launch(*args, **kwargs):
        calls.append((args, {name: value for name, value in kwargs.items() if value}))
        return ["value"]

    monkeypatch.setattr(launch_function, "launch", launch)
    return calls


def test_run_passes_its_arguments_to_launch(launched):
    values = horovod.run(
        print, (1,), {"end": ""}, num_proc=4, min_num_proc=2, slots=2, network_interfaces=["a", "b"]
    )
    assert values == ["value"]
    options = {"np": 4, "min_np": 2, "slots_per_host": 2, "network_interface": "a,b"}
    assert launched == [((print, (1,), {"end": ""}), options)]
    horovod.run(print, network_interfaces="eth0")
    assert launched[1][1]["network_interface"] == "eth0"


def test_run_starts_one_worker_or_the_minimum_by_default(launched):
    horovod.run(print)
    horovod.run(print, min_num_proc=3)
    assert [kwargs["np"] for _, kwargs in launched] == [1, 3]


def test_deprecated_argument_names_are_accepted_with_a_warning(launched):
    with pytest.warns(DeprecationWarning, match="use num_proc"):
        horovod.run(print, np=2)
    assert launched[0][1]["np"] == 2


def test_ssh_options_of_run_are_passed_to_launch(launched):
    horovod.run(print, num_proc=2, hosts="h1:1,h2:1", ssh_port=2222, ssh_identity_file="key")
    given = launched[0][1]
    assert (given["ssh_port"], given["ssh_identity_file"]) == (2222, "key")


@pytest.mark.parametrize(
    "options",
    [
        {"use_mpi": True},
        {"mpi_args": "--x"},
        {"network_interface": "a", "network_interfaces": ["a"]},
        {"np": 2, "num_proc": 2},
    ],
)
def test_unsupported_options_of_run_are_refused(launched, options):
    with pytest.raises(Invalid):
        horovod.run(print, **options)
    assert launched == []


def test_build_options_are_available_without_a_framework():
    assert util.gloo_built() and not util.mpi_built(verbose=True)
    assert util.extension_available("torch") and not util.extension_available("mxnet")
    assert [n for n in range(9) if util.num_rank_is_power_2(n)] == [1, 2, 4, 8]
    assert util.split_list(list(range(5)), 3) == [[0, 1], [2, 3], [4]]


def test_run_commandline_prints_the_version(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["horovodrun", "--version"])
    assert run_commandline() == 0
    assert metadata.version("hvd-elastic") in capsys.readouterr().out


def test_wrapped_optimizer_is_recognized_by_its_class():
    for added in (WrappedOptimizer, AdasumDistributed, DividedOptimizer):
        assert issubclass(_subclass(torch.optim.SGD, added), _DistributedOptimizer)
    assert not issubclass(torch.optim.SGD, _DistributedOptimizer)


def test_discovery_script_is_run_and_its_failure_raised(tmp_path):
    script = tmp_path / "hosts.sh"
    script.write_text("#!/bin/sh\necho h1:3\necho h2\n")
    with pytest.raises(Invalid, match="chmod"):
        HostDiscoveryScript(str(script)).find_available_hosts_and_slots()
    script.chmod(0o755)
    found = HostDiscoveryScript(str(script), default_slots=2).find_available_hosts_and_slots()
    assert found == {"h1": 3, "h2": 2}
    script.write_text("#!/bin/sh\nexit 3\n")
    with raises(RuntimeError):
        HostDiscoveryScript(str(script)).find_available_hosts_and_slots()


def test_a_host_manager_reports_changes():
    hosts = FixedHosts({"a": 2, "b": 1})
    manager = HostManager(hosts)
    assert manager.update_available_hosts() is HostUpdateResult.added
    assert manager.update_available_hosts() is HostUpdateResult.no_update
    hosts.set({"a": 2})
    assert manager.update_available_hosts() is HostUpdateResult.removed
    hosts.set({"a": 1, "c": 1})
    assert manager.update_available_hosts() is HostUpdateResult.mixed
    assert (manager.available_hosts, manager.host_slots) == ({"a", "c"}, {"a": 1, "c": 1})
    with pytest.raises(Invalid, match="find_available_hosts_and_slots"):
        HostManager(object())  # type: ignore[arg-type]


def test_an_import_without_its_framework_names_the_extra_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with raises(ImportError) as raised:
        unavailable.need("tensorflow", "horovod.tensorflow")
    assert raised.value.name == "tensorflow"


def test_the_error_of_a_broken_framework_is_unchanged(monkeypatch, tmp_path):
    (tmp_path / "keras.py").write_text("import a_module_that_is_missing\n")
    monkeypatch.delitem(sys.modules, "keras", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_missing"):
        unavailable.need("keras", "horovod.keras")


@pytest.mark.parametrize("version", ["2.15.1", "2.210.0", "3.0.0"])
def test_a_framework_of_another_release_is_warned_of(monkeypatch, version):
    found = ModuleType("tensorflow")
    found.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorflow", found)
    with warns(UserWarning, version):
        unavailable.need("tensorflow", "horovod.tensorflow")
    found.__version__ = "2.21.3"  # type: ignore[attr-defined]
    unavailable.need("tensorflow", "horovod.tensorflow")
