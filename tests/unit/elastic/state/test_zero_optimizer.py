"""Optimizers of ZeRO-1 in a state: what is refused, going back in one world, and parameters divided anew."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn

import elastic
from elastic.checkpoints import commit_files
from elastic.checkpoints.files.manifest import CommitName, decode_share
from elastic.checkpoints.files.storage import Storage
from elastic.checkpoints.shard_reader import row_specs
from elastic.errors import Fixed, Invalid, NotElastic
from elastic.exact.shards import Shards
from elastic.sharding import tested_torch, unsupported_sharding, zero
from elastic.sharding.row_layout import rows_of
from elastic.sharding.shard_division import Division
from elastic.state import TorchState
from elastic.state.fully_sharded.zero_handlers import DividedOptimizerHandler, ZeroOptimizerHandler
from elastic.state.handled_state import shards_of
from elastic.state.handlers import optimizer_state
from elastic.state.state import hold
from elastic.torch_backend import sharding_guard
from harness.fakes.process_group import only_rank
from harness.golden import raises

pytestmark = [
    pytest.mark.slow,  # imports of torch's
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(autouse=True)
def four():
    """Four ranks, of which three are made up, and this one is rank 1."""
    with only_rank(1, 4):
        yield


def network() -> Any:
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3), nn.Linear(3, 2))


def divided(model: Any, kind: Any = torch.optim.AdamW, **options: Any) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(model.parameters(), kind, **{"lr": 0.1} | options)


def step(model: Any, optimizer: Any) -> None:
    for each in model.parameters():
        each.grad = torch.randn_like(each)
    optimizer.step()


def bits(model: Any, optimizer: Any) -> list[torch.Tensor]:
    found = [each.detach().clone() for each in (*model.parameters(), *model.buffers())]
    for parameter in model.parameters():
        entries = optimizer.optim.state.get(parameter, {})
        found += [entries[key].clone() for key in sorted(entries)]
    return found


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


class PythonEntries(torch.optim.SGD):
    """Keeps a number per parameter that is no tensor."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["seen"] = 1
        return super().step(closure)


def overlapping(model: Any) -> Any:
    return divided(model, overlap_with_ddp=True)


def own_group(model: Any) -> Any:
    return divided(model, process_group=distributed.new_group([0, 1, 2, 3]))


def other_rule(model: Any) -> Any:
    optimizer = divided(model)
    optimizer.optim.param_groups[0]["params"].append(model[0].weight)
    optimizer.optim.param_groups[0]["params"].append(model[2].weight)
    return optimizer


@pytest.mark.parametrize("made", [overlapping, own_group, other_rule])
def test_an_optimizer_that_cannot_follow_another_world_is_refused(made: Any):
    model = network()
    with pytest.raises(NotElastic) as refused:
        TorchState(model=model, optimizer=made(model))
    assert refused.value.kind is Fixed.OPTIMIZER


def test_untested_versions_of_torch_are_refused(monkeypatch: pytest.MonkeyPatch):
    model = network()
    monkeypatch.setattr(tested_torch, "TESTED", ("2.9",))
    with pytest.raises(NotElastic) as refused:
        TorchState(model=model, optimizer=divided(model))
    assert refused.value.kind is Fixed.OPTIMIZER


def test_divided_optimizer_without_its_model_or_with_shards_is_refused():
    model = network()
    with pytest.raises(Invalid):
        TorchState(optimizer=divided(model))
    with pytest.raises(Invalid):
        TorchState(model=model, optimizer=divided(model), shards=Shards(4))


def test_sharded_optimizer_outside_of_a_state_is_refused_before_an_update():
    model = network()
    optimizer = divided(model)
    with pytest.raises(NotElastic) as refused:
        sharding_guard.check(optimizer, 2, 4)
    assert refused.value.kind is Fixed.OPTIMIZER
    state = TorchState(model=model, optimizer=optimizer)
    assert state.is_sharded()
    sharding_guard.begin(state.handled())
    sharding_guard.check(optimizer, 2, 4)
    sharding_guard.check(optimizer.optim, 2, 4)


def test_trainer_that_saves_whole_optimizers_refuses_a_divided_one():
    model = network()
    unsupported_sharding.check_trainer("Accelerate", [torch.optim.SGD(model.parameters())])
    with pytest.raises(NotElastic) as refused:
        unsupported_sharding.check_trainer("Accelerate", [divided(model)])
    assert refused.value.kind is Fixed.OPTIMIZER


def test_a_sharded_value_cannot_be_assigned_to_a_state_that_was_made_before():
    model = network()
    state = TorchState(model=model, optimizer=torch.optim.SGD(model.parameters()))
    with pytest.raises(NotElastic):
        state.optimizer = divided(model)
    state = TorchState(model=model, optimizer=divided(model))
    with pytest.raises(NotElastic):
        state.optimizer = torch.optim.SGD(model.parameters())


def test_entries_that_are_no_tensors_are_refused_by_the_commit():
    model = network()
    optimizer = divided(model, PythonEntries)
    state = TorchState(model=model, optimizer=optimizer)
    step(model, optimizer)
    with pytest.raises(Invalid):
        state.commit()


@pytest.mark.parametrize("options", [{}, {"parameters_as_bucket_view": True}])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adafactor])
def test_restore_sets_exactly_the_committed_bits_in_a_single_worker_world(kind: Any, options: Any):
    model = network()
    optimizer = divided(model, kind, **options)
    state = TorchState(model=model, optimizer=optimizer, step=0)
    ids = [id(each) for each in model.parameters()]
    fresh = bits(model, optimizer)
    step(model, optimizer)
    state.restore()  # to the state as it was made, without entries
    assert equal(bits(model, optimizer), fresh)
    for number in range(3):
        step(model, optimizer)
        optimizer.param_groups[0]["lr"] = 0.01 * number
        state.step = number + 1
        state.commit()
    kept = bits(model, optimizer)
    step(model, optimizer)
    optimizer.param_groups[0]["lr"] = 7.0
    state.restore()
    assert state.step == 3
    assert optimizer.param_groups[0]["lr"] == 0.02
    assert equal(bits(model, optimizer), kept)
    assert ids == [id(each) for each in model.parameters()]
    assert all(each.grad is None for each in model.parameters())


def test_commit_contains_only_the_entries_of_parameters_of_this_rank():
    model = network()
    optimizer = divided(model)
    handler = ZeroOptimizerHandler(optimizer, "optimizer")
    step(model, optimizer)
    owners = zero.partition_of(optimizer).owners(4)
    numbers = {int(name.partition(".")[0]) for name in handler.live_shards()}
    assert numbers == {number for number, owner in enumerate(owners) if owner == 1}
    _, tensors = handler.pack()
    assert not tensors


@pytest.mark.parametrize("options", [{}, {"parameters_as_bucket_view": True}])
def test_parameters_are_stepped_by_the_owner_of_their_shard_in_another_world(options: Any):
    model = network()
    optimizer = divided(model, **options)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    handler = ZeroOptimizerHandler(optimizer, "optimizer")
    step(model, optimizer)
    schedule.step()
    before = [each.detach().clone() for each in model.parameters()]
    ids = [id(each) for each in zero.parameters(optimizer)]
    owners = zero.partition_of(optimizer).owners(3)
    for order in itertools.permutations(range(3)):
        stepped: list[int] = []
        for rank in range(3):
            handler.follow(Division.among(order, rank))
            assert handler.position == (order.index(rank), 3)
            mine = {id(p) for group in optimizer.optim.param_groups for p in group["params"]}
            assert mine == {
                id(each)
                for each, shard in zip(zero.parameters(optimizer), owners, strict=True)
                if order[shard] == rank
            }
            stepped += mine
            assert mine == {id(p) for p, r in optimizer._param_to_rank.items() if r == rank}
        assert sorted(stepped) == sorted(ids)
    assert ids == [id(each) for each in zero.parameters(optimizer)]
    assert all(map(torch.equal, before, model.parameters()))
    assert optimizer.optim.param_groups[0]["lr"] == pytest.approx(0.05)
    assert not handler.live_shards(), "entries of the world before are gone"


def test_entries_are_placed_on_their_new_owners_in_another_world():
    model = network()
    optimizer = divided(model)
    handler = ZeroOptimizerHandler(optimizer, "optimizer")
    everything: dict[str, Any] = {}
    for rank in range(4):
        handler.follow(Division.among(range(4), rank))
        step(model, optimizer)
        everything |= {
            name: (each.spec, each.local.clone()) for name, each in handler.live_shards().items()
        }
    for rank in range(3):
        handler.follow(Division.among(range(3), rank))
        handler.place_shards(everything)
        live = handler.live_shards()
        owners = zero.partition_of(optimizer).owners(3)
        wanted = {name for name, (spec, _) in everything.items() if owners[spec.number] == rank}
        assert set(live) == wanted
        assert all(torch.equal(live[name].local, everything[name][1]) for name in wanted)
        step(model, optimizer)


def test_consolidated_state_is_dropped_in_another_world():
    model = network()
    optimizer = divided(model)
    handler = ZeroOptimizerHandler(optimizer, "optimizer")
    handler.follow(Division.among(range(1), 0))
    optimizer.consolidate_state_dict()
    optimizer.state_dict()
    handler.follow(Division.among(range(3), 1))
    with pytest.raises(RuntimeError):
        optimizer.state_dict()


def test_parameters_that_are_added_in_a_world_with_another_order_of_ranks_are_refused():
    model = network()
    optimizer = divided(model)
    state = TorchState(model=model, optimizer=optimizer)
    optimizer.optim.param_groups[0]["params"].reverse()
    state.commit()
    optimizer.optim.param_groups[0]["params"].append(model[0].weight)
    optimizer.optim.param_groups[0]["params"].append(model[2].weight)
    with pytest.raises(Invalid):
        state.commit()


def test_a_module_replaced_after_the_state_was_made_is_refused_by_the_next_commit():
    model = network()
    state = TorchState(model=model, optimizer=divided(model))
    state.commit()
    model[2] = nn.Linear(7, 3)
    with pytest.raises(Invalid):
        state.commit()


def test_added_group_is_committed_only_when_its_parameters_are_in_the_state():
    model, head = network(), nn.Linear(2, 2)
    optimizer = divided(model)
    state = TorchState(model=model, head=head, optimizer=optimizer)
    optimizer.add_param_group({"params": head.parameters()})
    state.commit()
    optimizer.add_param_group({"params": nn.Linear(2, 2).parameters()})
    with pytest.raises(Invalid):
        state.commit()


# ---- DistributedOptimizer with zero=1 --------------------------------------------------------------------------------


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A world without a driver, of this process."""
    monkeypatch.delenv("RANK", raising=False)
    elastic.init()
    yield
    elastic.shutdown()


def distributed_optimizer(model: Any, kind: Any = torch.optim.AdamW) -> Any:
    plain = kind(model.parameters(), lr=0.1)
    return elastic.DistributedOptimizer(plain, model.named_parameters(), zero=1)


def parts(model: Any, optimizer: Any) -> list[torch.Tensor]:
    found = [each.detach().clone() for each in (*model.parameters(), *model.buffers())]
    return found + [
        each.clone() for entries in optimizer.state.values() for each in entries.values()
    ]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad])
def test_a_restore_sets_exactly_the_committed_bits_of_this_ranks_elements(own, kind: Any):
    model = network()
    optimizer = distributed_optimizer(model, kind)
    state = TorchState(model=model, optimizer=optimizer, step=0)
    assert state.is_sharded()
    fresh = parts(model, optimizer)
    step(model, optimizer)
    state.restore()
    assert equal(parts(model, optimizer), fresh)
    for number in range(3):
        step(model, optimizer)
        state.step = number + 1
        state.commit()
    kept = parts(model, optimizer)
    step(model, optimizer)
    state.restore()
    assert state.step == 3
    assert equal(parts(model, optimizer), kept)


def test_divided_distributed_optimizer_outside_of_a_state_is_refused_before_an_update(own):
    model = network()
    optimizer = distributed_optimizer(model)
    with pytest.raises(NotElastic) as refused:
        sharding_guard.check(optimizer, 2, 4)
    assert refused.value.kind is Fixed.OPTIMIZER
    with pytest.raises(Invalid):
        TorchState(optimizer=optimizer)
    sharding_guard.begin(TorchState(model=model, optimizer=optimizer).handled())
    sharding_guard.check(optimizer, 2, 4)


def test_parameters_of_no_model_are_refused_by_the_next_commit(own):
    model, head = network(), nn.Linear(2, 2)
    optimizer = distributed_optimizer(model)
    state = TorchState(model=model, head=head, optimizer=optimizer)
    optimizer.add_param_group({"params": head.parameters()})
    state.commit()
    head.weight = nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(Invalid):
        state.commit()


def test_layout_of_a_divided_optimizer_differs_from_a_whole_one(own):
    model = network()
    divided_one = TorchState(model=model, optimizer=distributed_optimizer(model))
    plain = torch.optim.AdamW(model.parameters(), lr=0.1)
    whole = elastic.DistributedOptimizer(plain, model.named_parameters())
    assert divided_one.layout() != TorchState(model=model, optimizer=whole).layout()


@pytest.mark.parametrize("kind", [divided, distributed_optimizer])
def test_entries_read_from_a_checkpoint_have_the_specs_of_the_committed_ones(
    own, kind: Any, tmp_path: Path
):
    model = network()
    optimizer = kind(model)
    state = TorchState(model=model, optimizer=optimizer)
    step(model, optimizer)
    state.commit()
    storage, held = Storage(str(tmp_path)), hold(state)
    commit_files.write_share(storage, CommitName(1, 2, 3), held, 0, 1, lambda: None)
    held.release()
    share = decode_share(storage.read(f"{CommitName(1, 2, 3)}/share-0.json"))
    commits = shards_of(state)
    assert commits is not None
    bank = commits.base()
    assert bank is not None and bank.specs
    assert commits.recognized(row_specs(share.tensors)) == bank.specs


def test_state_dict_contains_entries_missing_in_the_structure_of_this_rank():
    model = network()
    optimizer = divided(model)
    handler = ZeroOptimizerHandler(optimizer, "optimizer")
    structure, _ = handler.pack()
    whole = torch.ones(7)
    found = optimizer_state.described(structure, [8], {"3.exp_avg": whole})
    assert found["state"] == {3: {"exp_avg": whole}}
    assert found["param_groups"][0]["params"] == [*range(8)]


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_state_entries_have_the_elements_of_their_shard(own, shards: int):
    model = network()
    optimizer = distributed_optimizer(model)
    handler = DividedOptimizerHandler(optimizer, "optimizer")
    for shard in range(shards):
        order = [(rank + shard) % shards for rank in range(shards)]
        handler.follow(Division.among(order, order[shard]))
        assert handler.position == (shard, shards)
        for parameter in model.parameters():
            rows = rows_of(parameter.numel(), shard, shards)
            optimizer.state[parameter] = {
                "step": torch.tensor(1.0),
                "exp_avg": torch.zeros(len(rows)),
            }
        live = handler.live_shards()
        assert len(live) == len(list(model.parameters()))
        _, replicated = handler.pack()
        assert {name.partition(".")[2] for name in replicated} == {"step"}


@pytest.mark.parametrize("values", [{"copys": 2}, {"copie": 0}, {"Copies": 2}, {"least_shard": 2}])
def test_option_of_a_sharded_state_that_is_misspelled_is_refused(own, values: dict[str, Any]):
    model = network()
    plain = torch.optim.AdamW(model.parameters())
    assert TorchState(model=model, optimizer=plain, **values)  # not sharded: it has no such option
    with raises(Invalid):
        TorchState(model=model, optimizer=distributed_optimizer(model), **values)


@pytest.mark.parametrize("values", [{"copy": 2}, {"shards": 2}, {"copys": "two"}, {"copys": True}])
def test_value_of_a_sharded_state_that_resembles_no_option_is_kept(own, values: dict[str, Any]):
    model = network()
    state = TorchState(model=model, optimizer=distributed_optimizer(model), **values)
    assert all(getattr(state, name) == value for name, value in values.items())


@pytest.mark.parametrize("made", [divided, distributed_optimizer])
@pytest.mark.parametrize("other", [divided, distributed_optimizer, None])
def test_optimizer_that_is_replaced_after_the_state_was_made_is_refused_by_the_next_commit(
    own, made: Any, other: Any
):
    model = network()
    optimizer = made(model)
    state = TorchState(model=model, optimizer=optimizer)
    step(model, optimizer)
    state.commit()
    new = torch.optim.Adam(model.parameters()) if other is None else other(model)
    state.commit()  # it has not stepped
    step(model, new)
    with raises(NotElastic) as refused:
        state.commit()
    assert refused.value.kind is Fixed.OPTIMIZER
    TorchState(model=model, optimizer=new).commit()


def test_plain_optimizers_of_other_or_state_parameters_may_step(own):
    model, head = network(), nn.Linear(2, 2)
    both = torch.optim.SGD(model.parameters(), lr=0.1)
    state = TorchState(model=model, optimizer=distributed_optimizer(model), both=both)
    step(model, both)
    step(head, torch.optim.SGD(head.parameters(), lr=0.1))
    step(model, torch.optim.SGD(model.parameters(), lr=0.1))  # dropped at once
    state.commit()


def test_parameter_of_a_replaced_module_is_named():
    model = network()
    state = TorchState(model=model, optimizer=divided(model))
    model[2] = nn.Linear(7, 3)
    with raises(Invalid, "model.2.weight"):
        state.commit()
