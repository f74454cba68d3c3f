"""Other libraries' wrappers: taken off the model, or named. With two ranks: test_programs.py."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import foreprop
from foreprop.engine.world import solitary_world
from foreprop.errors import ConfigError, TrainingLoopError
from foreprop.params import wrappers
from foreprop.params.modelhooks import bare_model, bare_optimizer, watch_wrappers
from tests.cluster import worlds

pytestmark = pytest.mark.leaks_ok(
    reason="gloo keeps descriptors until the last DDP that uses it is collected"
)


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    """torch.distributed with this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def parallelize(model: nn.Module, optimizer: torch.optim.Optimizer) -> foreprop.Session:
    return foreprop.parallelize(model, optimizer, world=solitary_world())


# SyncBatchNorm: torch takes a rank's own statistics, silently, where it cannot synchronise them.
def synchronised(device: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4, device=device), nn.BatchNorm1d(4, device=device))
    return nn.SyncBatchNorm.convert_sync_batchnorm(model)


@pytest.mark.parametrize("affine", [True, False])
def test_sync_batch_norm_on_a_cpu_is_refused(affine: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.SyncBatchNorm(4, affine=affine))
    with pytest.raises(ConfigError, match=r"^model\.1 is a torch\.nn\.SyncBatchNorm on a CPU.*GPU"):
        foreprop.parallelize(model, sgd(model), world=worlds(2)[0])


def test_sync_batch_norm_without_a_process_group_is_refused() -> None:
    dist.destroy_process_group()
    model = synchronised("meta")
    with pytest.raises(ConfigError, match=r"^model\.1 is a .*SyncBatchNorm.*init_process_group"):
        foreprop.parallelize(model, sgd(model), world=worlds(2)[0])


def test_sync_batch_norm_with_a_process_group_is_left_as_it_is() -> None:
    model = synchronised("meta")
    assert bare_model(model, alone=False) is model


def test_sync_batch_norm_of_one_process_is_left_as_it_is() -> None:
    dist.destroy_process_group()
    model, plain = synchronised("cpu"), nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    plain.load_state_dict(model.state_dict())
    x = torch.randn(5, 3)
    with foreprop.parallelize(model, sgd(model)):
        assert torch.equal(model(x), plain(x))


# DistributedDataParallel
def test_ddp_given_to_parallelize_is_taken_off() -> None:
    inner = nn.Linear(3, 2)
    assert bare_model(DistributedDataParallel(inner)) is inner


def test_ddp_with_a_communication_hook_is_refused() -> None:
    model = DistributedDataParallel(nn.Linear(3, 2))
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    with pytest.raises(ConfigError, match=r"register_comm_hook.*wire_dtype"):
        parallelize(model, sgd(model))


def test_ddp_that_ignores_parameters_is_refused() -> None:
    inner = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(inner, ["0.weight"])
    model = DistributedDataParallel(inner)
    with pytest.raises(ConfigError, match="parameters that it ignores"):
        parallelize(model, sgd(model))


def test_ddp_in_the_model_is_checked_too() -> None:
    part = DistributedDataParallel(nn.Linear(3, 2))
    part.register_comm_hook(None, default_hooks.fp16_compress_hook)
    model = nn.Sequential(part, nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="register_comm_hook"):
        parallelize(model, sgd(model))


class Managed:
    """Parameters that a session has, for what is asked while it is open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, model: nn.Module) -> None:
        mine = {id(parameter) for parameter in model.parameters()}
        monkeypatch.setattr(wrappers, "is_managed", lambda parameter: id(parameter) in mine)
        self.release = watch_wrappers()

    def end(self) -> None:
        for release in self.release:
            release()


@pytest.fixture
def inner() -> nn.Module:
    return nn.Linear(3, 2)


@pytest.fixture
def managed(monkeypatch: pytest.MonkeyPatch, inner: nn.Module) -> Iterator[Managed]:
    found = Managed(monkeypatch, inner)
    yield found
    found.end()


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The wrappers whose own forward pass ran."""
    ran: list[Any] = []
    monkeypatch.setattr(
        DistributedDataParallel, "_post_forward", lambda self, x: ran.append(self) or x
    )
    return ran


def test_the_forward_pass_goes_past_ddp_while_a_session_has_its_parameters(
    inner: nn.Module, prepared: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = DistributedDataParallel(inner)
    plain = model(torch.ones(1, 3))
    assert prepared == [model]
    session = Managed(monkeypatch, inner)
    assert torch.equal(model(torch.ones(1, 3)), plain)
    assert prepared == [model]
    session.end()
    model(torch.ones(1, 3))
    assert prepared == [model, model]


def test_ddp_around_a_synchronised_model_passes_on(
    inner: nn.Module, managed: Managed, prepared: list[Any]
) -> None:
    model = DistributedDataParallel(inner)
    assert torch.equal(model(torch.ones(1, 3)), inner(torch.ones(1, 3)))
    assert not prepared


def test_ddp_around_another_model_stays_what_it_is(managed: Managed, prepared: list[Any]) -> None:
    model = DistributedDataParallel(nn.Linear(3, 2))
    model(torch.ones(1, 3))
    assert prepared == [model]


def test_ddp_around_more_than_the_synchronised_model_is_refused(
    inner: nn.Module, managed: Managed
) -> None:
    with pytest.raises(ConfigError, match=r"and others: 1\.weight, 1\.bias"):
        DistributedDataParallel(nn.Sequential(inner, nn.Linear(2, 2)))


@pytest.mark.parametrize(
    ("call", "advice"),
    [
        (lambda model: model.join(), "equally many batches"),
        (lambda model: model.register_comm_hook(None, None), "wire_dtype"),
    ],
)
def test_what_would_go_through_ddp_is_refused(
    inner: nn.Module, managed: Managed, call: Any, advice: str
) -> None:
    model = DistributedDataParallel(inner)
    with pytest.raises(TrainingLoopError, match=advice):
        call(model)


def test_a_wrapper_that_is_taken_off_keeps_nothing_of_foreprop(
    inner: nn.Module, managed: Managed
) -> None:
    model = DistributedDataParallel(inner)
    model(torch.ones(1, 3))
    attributes = {name: value for name, value in vars(model).items() if name != "reducer"}
    assert b"foreprop" not in pickle.dumps(sorted(attributes))
    assert not [value for value in attributes.values() if "foreprop" in type(value).__module__]


@pytest.mark.filterwarnings("ignore:.*broadcast_buffers:FutureWarning")
def test_rank_0s_buffers_are_broadcast_only_if_a_forward_pass_may_read_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    synchronised: list[Any] = []
    monkeypatch.setattr(
        DistributedDataParallel, "_sync_buffers", lambda self: synchronised.append(self)
    )
    center = nn.Linear(3, 3)
    center.register_buffer("center", torch.zeros(3))
    for inner, expected in ((nn.BatchNorm1d(3), 0), (center, 2)):
        session = Managed(monkeypatch, inner)
        model = DistributedDataParallel(inner)
        synchronised.clear()
        model(torch.ones(2, 3))
        with torch.no_grad():
            model(torch.ones(2, 3))
            model(torch.ones(2, 3))  # nothing has changed since
        DistributedDataParallel(inner, broadcast_buffers=False)(torch.ones(2, 3))
        session.end()
        assert len(synchronised) == expected


# Others
@pytest.mark.filterwarnings("ignore:FSDP")
def test_fsdp_is_named() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    plain = nn.Linear(3, 2)
    optimizer = sgd(plain)
    model = nn.Sequential(FullyShardedDataParallel(plain, device_id=torch.device("cpu")))
    with pytest.raises(ConfigError, match=r"model\.0 is a .*FullyShardedDataParallel \(FSDP\)"):
        parallelize(model, optimizer)


def test_fsdp2_is_named() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(3, 2))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(ConfigError, match=r"model is sharded by .*fully_shard \(FSDP2\)"):
        parallelize(model, sgd(model))


def test_a_dtensor_is_named() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    model = nn.Linear(3, 2)
    mesh = init_device_mesh("cpu", (1,))
    model.weight = nn.Parameter(distribute_tensor(model.weight.data, mesh, [Replicate()]))
    with pytest.raises(ConfigError, match="parameter weight of model is a DTensor"):
        parallelize(model, sgd(model))


def test_data_parallel_is_named_where_it_copies() -> None:
    model = nn.DataParallel(nn.Linear(3, 2))
    bare_model(model)  # without a GPU it passes on
    model.device_ids = [0, 1]
    with pytest.raises(ConfigError, match=r"torch\.nn\.DataParallel on devices \[0, 1\]"):
        parallelize(model, sgd(model))


def made_in(package: str, base: type, **members: Any) -> Any:
    return type("Engine", (base,), {"__module__": package, **members})


def test_deepspeeds_engine_is_named() -> None:
    model = made_in("deepspeed.runtime.engine", nn.Linear)(3, 2)
    with pytest.raises(ConfigError, match="model is deepspeed's Engine"):
        parallelize(model, sgd(model))


def test_horovods_optimizer_is_named() -> None:
    model = nn.Linear(3, 2)
    optimizer = made_in("horovod.torch.optimizer", torch.optim.SGD)(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="optimizer is horovod's Engine"):
        parallelize(model, optimizer)


def test_accelerates_optimizer_is_taken_off_also_with_a_scaler() -> None:
    """test_huggingface_ways_in.py does it with real ones."""
    model = nn.Linear(3, 2)
    inner = sgd(model)
    for scaler in (None, torch.amp.GradScaler("cpu")):
        outer = made_in("accelerate.optimizer", torch.optim.SGD, optimizer=inner, scaler=scaler)
        assert bare_optimizer(outer(model.parameters(), lr=0.1)) is inner


def test_ddp_in_a_world_of_one_trains_as_plain_pytorch_does() -> None:
    results = []
    for wrapped in (False, True):
        torch.manual_seed(0)
        model: nn.Module = nn.Linear(3, 2)
        optimizer = sgd(model)
        if wrapped:
            model = DistributedDataParallel(model)
            session = foreprop.parallelize(model, optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).square().sum().backward()
            optimizer.step()
        results.append([p.detach().clone() for p in model.parameters()])
    session.close()
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
