"""What `foreprop.profile` measures, against models of known cost, and that it leaves no trace."""

from __future__ import annotations

import copy
import functools
import random
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import foreprop
from foreprop.errors import ConfigError
from foreprop.plan import passes
from foreprop.plan.profile import Profile, ProfiledArray
from tests.cluster import worlds
from tests.conformance.parity import (
    build_seeded,
    check_same_bits,
    check_same_optimizer_state,
    make_batches,
    small_model,
    traces_of,
    train_classifier,
    with_sgd,
)
from tests.conformance.sequence_models import Attention, Recurrent, Tied, Transformer, UsedElsewhere

torch.sparse.check_sparse_tensor_invariants.disable()

FEW = {"steps": 3, "warm_up": 1}
BATCH = make_batches(1)[0]


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sleeper: Sleeper) -> torch.Tensor:
        ctx.sleeper = sleeper
        sleeper.host.sleep(sleeper.forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.sleeper.host.sleep(ctx.sleeper.backward_s)
        return gradient, None


class Host:
    """Stands for the module ``time``: time passes only by sleeping."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    host = Host()
    monkeypatch.setattr(passes, "time", host)
    return host


class Sleeper(nn.Module):
    """Uses its parameter, then takes as long as it is told to."""

    def __init__(
        self, host: Any, forward_s: float, backward_s: float, *, uses: bool = True
    ) -> None:
        super().__init__()
        self.host, self.forward_s, self.backward_s = host, forward_s, backward_s
        self.weight = nn.Parameter(torch.ones(3)) if uses else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.weight is not None:
            x = x * self.weight
        result: torch.Tensor = _Sleep.apply(x, self)
        return result


def mean(model: nn.Module, batch: Any) -> torch.Tensor:
    result: torch.Tensor = model(batch).mean()
    return result


def named(profile: Profile) -> dict[str, ProfiledArray]:
    return {array.name: array for array in profile.arrays}


def check_times(profile: Profile, wanted: dict[str, tuple[float, float]]) -> None:
    """Forward and backward seconds of each array, in order."""
    assert [array.name for array in profile.arrays] == list(wanted)
    for name, array in named(profile).items():
        assert (array.forward_s, array.backward_s) == pytest.approx(wanted[name]), name


# Times.
def test_times_are_those_of_the_layers(host: Host) -> None:
    model = nn.Sequential(Sleeper(host, 2, 1), Sleeper(host, 0, 4), Sleeper(host, 3, 0))
    profile = foreprop.profile(model, None, torch.ones(2, 3), mean, **FEW)
    check_times(profile, {"0.weight": (2, 1), "1.weight": (0, 4), "2.weight": (3, 0)})
    assert profile.measured_s == pytest.approx(10)
    assert (profile.before_first_use_s, profile.after_last_gradient_s) == (0, 0)
    assert profile.name == "Sequential"


class Affine(nn.Module):
    """As torch's, or as some have it with the bias first; the operation takes a while."""

    def __init__(self, host: Host, *, bias_first: bool) -> None:
        super().__init__()
        self.host, self.bias_first = host, bias_first
        self.weight, self.bias = nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.bias_first:
            x = torch.addmm(self.bias, x, self.weight)
        else:
            x = F.linear(x, self.weight, self.bias)
        result: torch.Tensor = _Sleep.apply(x, Sleeper(self.host, 5, 7, uses=False))
        return result


@pytest.mark.parametrize("bias_first", [False, True])
def test_a_layer_s_time_stands_at_its_weight(bias_first: bool, host: Host) -> None:
    model = nn.Sequential(Affine(host, bias_first=bias_first), Sleeper(host, 2, 1))
    profile = foreprop.profile(model, None, torch.ones(2, 3), mean, **FEW)
    assert [(a.name, a.forward_s, a.backward_s) for a in profile.arrays if a.forward_s] == [
        ("0.weight", pytest.approx(5), pytest.approx(7)),
        ("1.weight", pytest.approx(2), pytest.approx(1)),
    ]
    assert {array.name for array in profile.arrays} == {"0.weight", "0.bias", "1.weight"}
    layers = profile.layers(scale=1, compute_s=15.0)
    assert [(sorted(layer.sizes_elems), layer.forward_s, layer.backward_s) for layer in layers] == [
        ([3, 9], pytest.approx(5), pytest.approx(7)),
        ([3], pytest.approx(2), pytest.approx(1)),
    ]


def test_operations_of_one_module_have_their_own_times(host: Host) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = _Sleep.apply(x * self.a, Sleeper(host, 3, 2, uses=False))
            result: torch.Tensor = _Sleep.apply(x * self.b, Sleeper(host, 4, 1, uses=False))
            return result

    model = nn.Sequential(Two())
    profile = foreprop.profile(model, None, torch.ones(2, 3), mean, **FEW)
    check_times(profile, {"0.a": (3, 2), "0.b": (4, 1)})
    assert len(profile.layers(scale=1, compute_s=10.0)) == 2


def test_time_is_that_of_a_clock() -> None:
    """A sleep may end late, on a busy machine, but never early."""
    model = nn.Sequential(Sleeper(time, 0.02, 0.01), Sleeper(time, 0.01, 0.03))
    started = time.perf_counter()
    profile = foreprop.profile(model, None, torch.ones(2, 3), mean, steps=2, warm_up=0, name="mine")
    took_s = time.perf_counter() - started
    assert profile.forward_s >= 0.03
    assert profile.backward_s >= 0.04
    assert took_s >= 5 * 0.07
    assert profile.forward_s + profile.backward_s < took_s
    first, second = profile.arrays
    assert min(first.forward_s or 0, first.backward_s or 0, second.forward_s or 0) > 0
    assert profile.name == "mine"


def test_time_outside_of_arrays_is_kept_apart(host: Host) -> None:
    """Before the first use and after the last gradient; in between it is the array's before it."""
    model = nn.Sequential(
        Sleeper(host, 2, 3, uses=False), Sleeper(host, 1, 1), Sleeper(host, 1, 2, uses=False)
    )
    x = torch.ones(2, 3, requires_grad=True)
    profile = foreprop.profile(model, None, x, mean, **FEW)
    check_times(profile, {"1.weight": (2, 3)})
    assert (profile.before_first_use_s, profile.after_last_gradient_s) == pytest.approx((2, 3))


def test_a_module_that_is_used_twice_is_ready_after_its_first_use(host: Host) -> None:
    twice = Sleeper(host, 1, 1)
    model = nn.Sequential(twice, Sleeper(host, 2, 4), twice, Sleeper(host, 5, 2))
    profile = foreprop.profile(model, None, torch.ones(2, 3), mean, **FEW)
    # what is computed between its uses and the next array's use is the array's before that
    check_times(profile, {"0.weight": (1, 1), "1.weight": (2 + 1, 1 + 4), "3.weight": (5, 2)})


def test_frozen_parameters_leave_their_time_outside(host: Host) -> None:
    model = nn.Sequential(Sleeper(host, 2, 7), Sleeper(host, 1, 1))
    model[0].requires_grad_(False)
    profile = foreprop.profile(model, None, torch.ones(2, 3), mean, **FEW)
    check_times(profile, {"1.weight": (1, 1)})
    assert (profile.before_first_use_s, profile.after_last_gradient_s) == pytest.approx((2, 0))
    assert "gradient" not in profile.note


def test_parameters_that_the_optimizer_does_not_have_are_left_out(host: Host) -> None:
    model = nn.Sequential(Sleeper(host, 2, 7), Sleeper(host, 1, 1))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    profile = foreprop.profile(model, optimizer, torch.ones(2, 3), mean, **FEW)
    check_times(profile, {"1.weight": (1, 1)})
    assert (profile.before_first_use_s, profile.after_last_gradient_s) == pytest.approx((2, 7))


def test_earlier_backward_passes_of_a_step_are_forward_time(host: Host) -> None:
    """Gradient accumulation: gradients are complete in the last backward pass."""
    model = nn.Sequential(Sleeper(host, 1, 2), Sleeper(host, 3, 4))
    profile = foreprop.profile(model, None, torch.ones(2, 3), mean, backward_passes=3, **FEW)
    check_times(profile, {"0.weight": (1, 2), "1.weight": (3 + 2 * 10, 4)})


def test_what_watching_costs_is_not_in_the_profile(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watched passes give shares, those between them the times that are shared out."""
    counts = passes.Watch.counts

    def slow(self: passes.Watch, result: Any) -> bool:
        host.sleep(2)
        return counts(self, result)

    monkeypatch.setattr(passes.Watch, "counts", slow)
    model = nn.Sequential(Sleeper(host, 1, 1), Sleeper(host, 4, 1))
    profile = foreprop.profile(model, None, torch.ones(2, 3), mean, **FEW)
    check_times(profile, {"0.weight": (5 * 3 / 9, 1), "1.weight": (5 * 6 / 9, 1)})


def test_warm_up_passes_do_not_count(host: Host) -> None:
    """One that finds tensors with gradients, then in turn a plain and a watched one."""
    model = nn.Sequential(Sleeper(host, 100, 0))

    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        calls.append(0)
        model[0].forward_s = 100 if len(calls) <= 1 + 2 * 4 else 1
        return mean(model, x)

    calls: list[int] = []
    profile = foreprop.profile(model, None, torch.ones(2, 3), loss, steps=2, warm_up=4)
    assert len(calls) == 1 + 2 * (4 + 2)
    check_times(profile, {"0.weight": (1, 0)})


# Order.
def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randint(11, (2, 4, 6), generator=generator)
    return x, y


def token_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 11)
        self.body = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.words = nn.Embedding(11, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(self.body, self.words(x), use_reentrant=False)
        result: torch.Tensor = self.last(hidden)
        return result


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.utils.parametrizations.weight_norm(nn.Linear(6, 11))
        self.words = nn.Embedding(11, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.words(x))
        return result


SEQUENCE_MODELS = [
    Tied,
    UsedElsewhere,
    Attention,
    Transformer,
    Recurrent,
    Checkpointed,
    Normed,
]


@pytest.mark.parametrize("make", SEQUENCE_MODELS, ids=lambda make: make.__name__)
def test_order_and_shapes_are_those_that_a_session_sees(make: Any) -> None:
    model, optimizer = build_seeded(with_sgd(make))
    profile = foreprop.profile(model, optimizer, tokens(), token_loss, **FEW)
    with foreprop.parallelize(model, optimizer, world=worlds(1)[0]) as session:
        token_loss(model, tokens()).backward()
        optimizer.step()
        infos = [session._training.infos[index] for index in session._training.first.use_order]
    assert [(a.name, a.shape) for a in profile.arrays] == [(i.name, i.shape) for i in infos]
    assert all(
        array.forward_s is not None
        and array.backward_s is not None
        and array.forward_s >= 0
        and array.backward_s >= 0
        for array in profile.arrays
    )


def test_what_is_used_before_the_forward_pass_does_not_count() -> None:
    """A penalty on the last layer's weights, added up first; as in a session."""

    def loss(model: Any, batch: Any) -> torch.Tensor:
        penalty: torch.Tensor = model[4].weight.square().sum()
        return penalty + F.cross_entropy(model(batch[0]), batch[1])

    model, optimizer = build_seeded(with_sgd())
    profile = foreprop.profile(model, optimizer, BATCH, loss, **FEW)
    assert [array.name for array in profile.arrays] == [
        name for name, _ in model.named_parameters()
    ]


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bodies = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        for body in self.bodies:
            x = checkpoint(body, x, use_reentrant=True)
        return x.sum()


def test_what_is_first_seen_in_the_backward_pass_comes_in_the_models_order() -> None:
    """Used without gradients before, outside of the model's own forward pass."""
    profile = foreprop.profile(Recomputed(), None, X, Recomputed.loss, **FEW)
    names = [name for name, _ in Recomputed().named_parameters()]
    assert [array.name for array in profile.arrays] == names


def test_every_pass_begins_without_gradients() -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        seen.extend(parameter.grad for parameter in model.parameters())
        return mean(model, x)

    seen: list[Any] = []
    model = small_model()
    model(X).sum().backward()
    foreprop.profile(model, None, X, loss, **FEW)
    assert len(seen) == 6 * (1 + 2 * 4)
    assert set(seen) == {None}


def test_arrays_without_a_gradient_are_named_in_the_note() -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.never = nn.Linear(2, 2)
            self.used = nn.Linear(5, 3)
            self.detached = nn.Linear(5, 3)
            self.empty = nn.Parameter(torch.zeros(0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.used(x) + self.detached(x).detach()
            return result

    profile = foreprop.profile(Parts(), None, BATCH, nn.CrossEntropyLoss(), **FEW)
    assert [array.name for array in profile.arrays] == ["used.weight", "used.bias"]
    without = "never.weight, never.bias, detached.weight, detached.bias"
    assert profile.note.endswith(f"; without a gradient: {without}")
    assert without.split(", ", maxsplit=1)[0] in str(profile)


def test_a_branch_that_only_some_passes_take_is_there() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(5, 3), nn.Linear(5, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = (self.left if random.random() < 0.5 else self.right)(x)
            return result

    random.seed(4)
    profile = foreprop.profile(Branches(), None, BATCH, nn.CrossEntropyLoss(), steps=12)
    assert {array.name for array in profile.arrays} == {
        f"{branch}.{kind}" for branch in ("left", "right") for kind in ("weight", "bias")
    }


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_compiled_code_uses_all_arrays_at_its_entry() -> None:
    class Net(nn.Module):  # torch.compile leaves torch's own classes alone
        def __init__(self) -> None:
            super().__init__()
            self.body = small_model()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = torch.tanh(self.body(x))
            return result

    torch._dynamo.reset()
    model = torch.compile(Net(), backend="eager")
    profile = foreprop.profile(model, None, BATCH, nn.CrossEntropyLoss(), **FEW)
    torch._dynamo.reset()
    assert [a.name for a in profile.arrays] == [name for name, _ in model.named_parameters()]
    *before, weight, bias = (array.forward_s or 0.0 for array in profile.arrays)
    assert weight > 3 * max(before)
    assert bias == 0.0


# Sparsity.
class Words(nn.Module):
    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(100, 4, sparse=sparse)
        self.bags = nn.EmbeddingBag(10, 4, sparse=sparse)
        self.lstm = nn.LSTM(4, 4, batch_first=True)

    def loss(self, numbers: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.lstm(self.words(numbers))[0].sum()
        return found + self.bags(numbers % 5).sum()


@pytest.mark.parametrize("sparse", [True, False])
def test_alpha_is_the_share_of_rows_that_a_step_touches(sparse: bool) -> None:
    numbers = torch.tensor([[3, 3, 4], [50, 50, 99]])
    loss = Words.loss
    profile = foreprop.profile(Words(sparse=sparse), None, numbers, loss, **FEW)
    alphas = {array.name: array.alpha for array in profile.arrays}
    assert alphas.pop("words.weight") == 4 / 100
    assert alphas.pop("bags.weight") == 3 / 10
    assert set(alphas.values()) == {None}
    assert "4.00%" in str(profile)


def test_alpha_of_a_table_that_is_an_output_layer_too_is_one() -> None:
    profile = foreprop.profile(Tied(), None, tokens(), token_loss, **FEW)
    assert named(profile)["embedding.weight"].alpha == 1.0


def test_half_precision_is_noted() -> None:
    model = small_model().to(torch.bfloat16)
    x, y = BATCH
    profile = foreprop.profile(model, None, (x.bfloat16(), y), F.cross_entropy, **FEW)
    assert {array.dtype for array in profile.arrays} == {"bfloat16"}
    sizes = profile.layers(scale=1, compute_s=1.0)[1].sizes_elems
    assert sizes == (18, 4)  # 35 and 7 of two bytes


# What a loss may be.
class Named(nn.Module):
    """Takes keyword arguments, and returns the loss among other things, as many libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = small_model()

    def forward(self, *, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": F.cross_entropy(self.body(x), labels)}


def popping(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    labels = batch.pop("labels")
    result: torch.Tensor = model(**batch, labels=labels)["loss"]
    return result


X, Y = BATCH
LOSSES: dict[str, tuple[Callable[[], nn.Module], Any, Callable[..., Any]]] = {
    "module": (small_model, (X, Y), nn.CrossEntropyLoss()),
    "list": (small_model, [X, Y], nn.CrossEntropyLoss()),
    "function of torch": (small_model, (X, Y), F.cross_entropy),
    "partial": (small_model, (X, Y), functools.partial(F.cross_entropy, label_smoothing=0.1)),
    "two inputs": (lambda: nn.Bilinear(5, 5, 3), (X, X, Y), nn.CrossEntropyLoss()),
    "own": (small_model, (X, Y), lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])),
    "one tensor": (small_model, X, lambda model, batch: model(batch).square().mean()),
    "no batch": (small_model, None, lambda model, _: model(X).sum().reshape(1)),
    "dictionary": (Named, {"x": X, "labels": Y}, lambda model, batch: model(**batch)["loss"]),
    "popped": (Named, {"x": X, "labels": Y}, popping),
}


@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_batch_may_be(name: str) -> None:
    make, batch, loss = LOSSES[name]
    model = make()
    profile = foreprop.profile(model, None, batch, loss, **FEW)
    assert [array.name for array in profile.arrays] == [n for n, _ in model.named_parameters()]
    if isinstance(batch, dict):
        assert list(batch) == ["x", "labels"]


def test_gradients_may_be_off_where_it_is_called() -> None:
    with torch.no_grad():
        profile = foreprop.profile(small_model(), None, BATCH, F.cross_entropy, **FEW)
        assert not torch.is_grad_enabled()
    assert len(profile.arrays) == 6


# No trace.
class Changing(nn.Module):
    """Everything that a forward pass may change."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 5, max_norm=0.1)
        self.norm = nn.BatchNorm1d(5)
        self.dropout = nn.Dropout(0.5)
        self.body = small_model()
        self.register_buffer("average", torch.zeros(5))
        self.clipped = nn.Parameter(torch.full((5,), 3.0))
        self.unused = nn.Parameter(torch.ones(2))
        self.hidden = torch.zeros(5)
        self.calls = 0
        self.fails_at = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == self.fails_at:
            raise RuntimeError("as it was told")
        self.clipped.data.clamp_(-1, 1)
        random.random()
        np.random.random()
        x = self.norm(x) + self.table(torch.arange(len(x))) * self.clipped + self.hidden
        self.average = self.average * 0.9 + x.detach().mean(0)
        self.hidden = x.detach().mean(0)
        self.late = x  # not there before
        result: torch.Tensor = self.body(self.dropout(x))
        return result


class State:
    """All that must be as before."""

    def __init__(self, model: Changing, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
        self.values = copy.deepcopy(model.state_dict())
        self.optimizer = copy.deepcopy(optimizer.state_dict())
        self.traces = traces_of(model, optimizer)
        self.attributes = [list(vars(module)) for module in model.modules()]
        self.kept = [model.hidden, model.average, model.calls, x.grad]
        self.gradients = [parameter.grad for parameter in model.parameters()]
        self.gradient_values = [None if g is None else g.clone() for g in self.gradients]
        self.chance = [random.getstate(), np.random.get_state()[1].tolist()]  # type: ignore[index]
        self.torchs = torch.get_rng_state()

    def check(self, before: State) -> None:
        check_same_bits(self.values, before.values)
        check_same_optimizer_state(self.optimizer, before.optimizer)
        assert self.traces == before.traces
        assert self.attributes == before.attributes
        assert all(a is b for a, b in zip(self.kept, before.kept, strict=True))
        assert all(a is b for a, b in zip(self.gradients, before.gradients, strict=True))
        for ours, theirs in zip(self.gradient_values, before.gradient_values, strict=True):
            assert (ours is None) == (theirs is None)
            assert ours is None or theirs is None or torch.equal(ours, theirs)
        assert self.chance == before.chance
        assert torch.equal(self.torchs, before.torchs)


def changing() -> tuple[Changing, torch.optim.Optimizer, torch.Tensor]:
    """After a step, with gradients, also one of the batch, and one parameter without."""
    torch.manual_seed(1)
    model = Changing()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(6, 5, requires_grad=True)
    model(x).sum().backward()
    optimizer.step()
    model.clipped.grad = None
    del model.late
    model.clipped.data.fill_(3.0)
    return model, optimizer, x


def test_everything_is_as_before() -> None:
    model, optimizer, x = changing()
    before = State(model, optimizer, x)
    foreprop.profile(model, optimizer, (x, Y), F.cross_entropy, **FEW)
    State(model, optimizer, x).check(before)


class Broken(Exception):
    pass


def fail_backward(_: torch.Tensor) -> torch.Tensor:
    raise Broken


@pytest.mark.parametrize("call", [1, 2, 3, 4, 8])
def test_everything_is_as_before_after_an_error_in_the_forward_pass(call: int) -> None:
    """In the first pass, a plain one and watched ones."""
    model, optimizer, x = changing()
    model.fails_at = model.calls + call
    before = State(model, optimizer, x)
    with pytest.raises(RuntimeError, match="as it was told") as caught:
        foreprop.profile(model, optimizer, (x, Y), F.cross_entropy, **FEW)
    State(model, optimizer, x).check(before)
    assert caught.value.__notes__ == [
        "foreprop.profile() called loss(model(*batch[:-1]), batch[-1]), with loss=cross_entropy"
    ]


@pytest.mark.parametrize("call", [1, 2, 3])
def test_everything_is_as_before_after_an_error_in_the_backward_pass(call: int) -> None:
    model, optimizer, x = changing()
    before = State(model, optimizer, x)
    calls = iter(range(1, 100))

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        found = F.cross_entropy(model(batch), Y)
        if next(calls) == call:
            found.register_hook(fail_backward)
        return found

    with pytest.raises(Broken):
        foreprop.profile(model, optimizer, x, loss, **FEW)
    State(model, optimizer, x).check(before)


def test_another_model_in_the_loss_keeps_its_gradients() -> None:
    """A GAN's discriminator gets gradients from its generator's loss."""
    generator, judge = small_model(), nn.Linear(3, 1)
    optimizer = torch.optim.SGD(generator.parameters(), lr=0.1)
    judge.bias.grad = kept = torch.ones(1)
    foreprop.profile(generator, optimizer, X, lambda model, x: judge(model(x)).mean(), **FEW)
    assert judge.bias.grad is kept
    assert kept.item() == 1.0
    assert judge.weight.grad is None


def test_training_goes_on_with_the_same_bits() -> None:
    def train(profiles: bool) -> dict[str, torch.Tensor]:
        model, optimizer = build_seeded(
            with_sgd(lambda: nn.Sequential(nn.Dropout(), small_model()))
        )
        train_classifier(model, optimizer, make_batches(2))
        if profiles:
            foreprop.profile(model, optimizer, BATCH, nn.CrossEntropyLoss(), **FEW)
        train_classifier(model, optimizer, make_batches(3))
        return model.state_dict()

    check_same_bits(train(True), train(False))


# What cannot be measured.
def meta_model() -> nn.Module:
    with torch.device("meta"):
        return small_model()


def complex_model() -> nn.Module:
    return nn.Linear(2, 2, dtype=torch.complex64)


def buffered_on_meta() -> nn.Module:
    model = small_model()
    model.register_buffer("far", torch.zeros(2, device="meta"))
    return model


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        result: nn.Module = torch.jit.script(small_model())
    return result


def frozen() -> nn.Module:
    return small_model().requires_grad_(False)


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no model": (
        lambda: F.relu,
        {},
        "model is a function; it must be a torch.nn.Module",
    ),
    "scripted": (scripted, {}, "model is a ScriptModule, in which nobody sees"),
    "no optimizer": (
        small_model,
        {"optimizer": 0.1},
        "optimizer is a float; it must be a torch.op",
    ),
    "no loss": (
        small_model,
        {"loss": 3},
        r"loss is a int; it must be a function of \(model, batch",
    ),
    "steps": (small_model, {"steps": 0}, "steps is 0; at least 1"),
    "warm_up": (small_model, {"warm_up": -1}, "warm_up is -1; at least 0"),
    "backward_passes": (small_model, {"backward_passes": 0}, "backward_passes is 0; at least 1"),
    "meta": (meta_model, {}, r"parameter 4.bias are on the meta device, and profile\(\) runs"),
    "meta buffer": (buffered_on_meta, {}, "buffer far is on the meta device"),
    "lazy": (lambda: nn.LazyLinear(3), {}, "parameter weight is not initialised yet"),
    "complex": (complex_model, {}, "parameter weight is complex64; parameters must be one of"),
    "frozen": (frozen, {}, "model and optimizer have no parameters in common that can be trained"),
    "target": (
        small_model,
        {"batch": X},
        "loss is CrossEntropyLoss, which compares an output with",
    ),
    "target in a dictionary": (small_model, {"batch": {"x": X}}, r"batch is a dict: give a tuple"),
    "a list": (small_model, {"loss": lambda m, b: [m(b[0])]}, "loss returned a list; it must"),
    "many losses": (
        small_model,
        {"loss": lambda m, b: m(b[0])},
        r"loss returned a tensor of shape \(6, 3\); it must have one element",
    ),
    "no gradient": (
        small_model,
        {"loss": lambda m, b: m(b[0]).sum().detach()},
        "loss returned a tensor without a gradient; does it use the model",
    ),
    "another model": (
        small_model,
        {"loss": lambda m, b: nn.Linear(5, 1)(b[0]).sum()},
        "loss gave a gradient to none of the parameters that are trained",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_measured_is_refused(name: str) -> None:
    make, changes, message = REFUSED[name]
    given = {"optimizer": None, "batch": BATCH, "loss": nn.CrossEntropyLoss(), **FEW, **changes}
    with pytest.raises(ConfigError, match=message):
        foreprop.profile(make(), **given)


def test_an_open_session_is_refused() -> None:
    model, optimizer = build_seeded(with_sgd())
    with (
        foreprop.parallelize(model, optimizer, world=worlds(1)[0]),
        pytest.raises(
            ConfigError, match=r"parameter 0.weight belongs to an open session: call prof"
        ),
    ):
        foreprop.profile(model, optimizer, BATCH, nn.CrossEntropyLoss(), **FEW)
    foreprop.profile(model, optimizer, BATCH, nn.CrossEntropyLoss(), **FEW)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_times_on_a_gpu_are_the_gpus() -> None:
    """The host is long done when the GPU has multiplied."""
    model = nn.Sequential(nn.Linear(4096, 4096, bias=False), nn.Linear(4096, 4096, bias=False))
    profile = foreprop.profile(model.cuda(), None, torch.ones(8192, 4096, device="cuda"), mean)
    first, second = profile.arrays
    assert first.forward_s == pytest.approx(second.forward_s, rel=0.5)
    assert (second.backward_s or 0.0) > 1.3 * (second.forward_s or 0.0)
