"""Copies of a model and an optimizer in a session are ordinary PyTorch, without foreprop."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from foreprop.config import Config
from foreprop.engine.world import World
from foreprop.session.composition import connect
from tests.cluster import run_cluster, worlds
from tests.conformance.matrices import few
from tests.conformance.parity import (
    Batch,
    batches_of,
    build_seeded,
    check_same_bits,
    check_same_optimizer_state,
    make_batches,
    snapshot,
    train_classifier,
)
from tests.tiers import long_cases

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]


RING = Config.resolve().architecture == "ring"
UPDATES = ["servers"] if RING else ["servers", "workers"]


def _build() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3))
    model.register_forward_pre_hook(_users_hook)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def _users_hook(module: nn.Module, args: Any) -> None:
    """What the user has on the model himself stays on its copies."""


def _open(build: Any, world: World | None = None, **settings: Any) -> Any:
    world = world or worlds(1)[0]
    model, optimizer = build_seeded(build, seed=world.rank)
    return model, optimizer, connect(model, optimizer, Config.resolve(**settings), world=world)


def _saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "torch.save": lambda value: torch.load(io.BytesIO(_saved(value)), weights_only=False),
}
HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
)


def _hooks_of(model: nn.Module) -> list[int]:
    return [len(getattr(module, name)) for module in model.modules() for name in HOOKS]


def _check_twins(ours: Any, wanted: Any) -> None:
    """The same model and optimizer, which go on alike."""
    (model, optimizer), (plain, plain_optimizer) = ours, wanted
    assert vars(optimizer).keys() - {"_opt_called"} == vars(plain_optimizer).keys()
    check_same_bits(model.state_dict(), plain.state_dict())
    check_same_optimizer_state(optimizer.state_dict(), plain_optimizer.state_dict())
    assert _hooks_of(model) == _hooks_of(plain)
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(a is b for a, b in zip(held, model.parameters(), strict=True))
    for twin in (ours, wanted):
        train_classifier(*twin, make_batches(2, seed=5))
    check_same_bits(model.state_dict(), plain.state_dict())
    check_same_optimizer_state(optimizer.state_dict(), plain_optimizer.state_dict())


@pytest.mark.parametrize(
    ("steps", "way", "update", "state"),
    few([0, 3], COPIES, UPDATES, ["torch's", "own"], size=2),
)
def test_model_and_optimizer_together(
    steps: int, way: str, update: str, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if state == "own":  # as many write it: all attributes
        get: Any = lambda self: self.__dict__.copy()  # noqa: E731
        monkeypatch.setattr(torch.optim.AdamW, "__getstate__", get, raising=False)
    batches = make_batches(5)
    plain, plain_optimizer = build_seeded(_build)
    train_classifier(plain, plain_optimizer, batches[:steps])
    wanted = COPIES[way]((plain, plain_optimizer))
    model, optimizer, session = _open(_build, update=update, wait="modules")
    before = _hooks_of(model)
    with session:
        train_classifier(model, optimizer, batches[:steps])
        ours = COPIES[way]((model, optimizer))
        _check_twins(ours, wanted)
        if not steps:
            assert _hooks_of(model) == before
        for twin in ((plain, plain_optimizer), (model, optimizer)):
            train_classifier(*twin, batches[steps:])
        check_same_bits(model.state_dict(), plain.state_dict())
        check_same_optimizer_state(optimizer.state_dict(), plain_optimizer.state_dict())


@pytest.mark.parametrize("what", ["model", "part", "optimizer"])
def test_nothing_of_foreprop_is_in_a_pickle(what: str, tmp_path: Path) -> None:
    model, optimizer, session = _open(_build, trace=str(tmp_path), wait="modules")
    with session:
        train_classifier(model, optimizer, make_batches(3))
        value = {"model": model, "part": model[1], "optimizer": optimizer}[what]
        assert b"foreprop" not in pickle.dumps(value)
        assert b"foreprop" not in _saved(value)


def test_the_readers_own_copy_of_the_attributes() -> None:
    """Who copies a module's attributes himself gets hooks that do nothing, loadable anywhere."""
    model, optimizer, session = _open(_build)
    with session:
        train_classifier(model, optimizer, make_batches(1))
        for copied in (copy.deepcopy(vars(model)), pickle.loads(pickle.dumps(vars(model)))):
            for hook in copied["_forward_pre_hooks"].values():
                assert hook(model, ()) is None
        assert b"foreprop" not in pickle.dumps(vars(model))


_LOADER = """
import sys
class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("foreprop", "tests"):
            raise ImportError(name)
sys.meta_path.insert(0, Refused())
import torch
from torch import nn
folder = sys.argv[1] + "/"
x = torch.load(folder + "x.pt", weights_only=True)
wanted = torch.load(folder + "wanted.pt", weights_only=True)
safe = [nn.Sequential, nn.Linear, nn.BatchNorm1d, nn.Tanh]
with torch.serialization.safe_globals(safe):
    model = torch.load(folder + "model.pt", weights_only=True).eval()
both = torch.load(folder + "both.pt", weights_only=False)
state = torch.load(folder + "state.pt", weights_only=True)
fresh = torch.optim.AdamW(model.parameters(), lr=1.0)
fresh.load_state_dict(state["optimizer"])
exported = torch.export.load(folder + "model.pt2").module()
for output in (model(x), both[0].eval()(x), torch.jit.load(folder + "script.pt")(x), exported(x)):
    assert torch.equal(output, wanted), (output, wanted)
assert both[1].state_dict()["state"][0]["step"] == fresh.state_dict()["state"][0]["step"] == 3
both[1].step()
assert "foreprop" not in sys.modules
print("loaded")
"""


@pytest.mark.long
@pytest.mark.timeout(180)
def test_a_process_without_foreprop_loads_everything(tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3))
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    x = torch.randn(6, 5)
    model, optimizer, session = _open(build)
    with session:
        train_classifier(model, optimizer, make_batches(3))
        torch.save((model, optimizer), tmp_path / "both.pt")
        model.eval()
        torch.save(model, tmp_path / "model.pt")
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, tmp_path / "state.pt")
        torch.jit.script(model).save(str(tmp_path / "script.pt"))
        torch.export.save(torch.export.export(model, (x,)), tmp_path / "model.pt2")
    torch.save(x, tmp_path / "x.pt")
    torch.save(model(x), tmp_path / "wanted.pt")
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _LOADER, str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.stdout == "loaded\n", result.stderr


def _exported(model: nn.Module, *, strict: bool) -> Any:
    return torch.export.export(model, (torch.ones(6, 5),), strict=strict)


CONVERSIONS: dict[str, Callable[[nn.Module], Any]] = {
    "script": lambda model: torch.jit.script(model),
    "trace": lambda model: torch.jit.trace(model, torch.ones(6, 5), check_trace=not model.training),
    "trace_module": lambda model: torch.jit.trace_module(
        model, {"forward": torch.ones(6, 5)}, check_trace=not model.training
    ),
    "export": lambda model: _exported(model, strict=False),
    "strict export": lambda model: _exported(model, strict=True),
}


def _state(converted: Any) -> dict[str, torch.Tensor]:
    state = converted.state_dict
    return snapshot(state() if callable(state) else state)


def _code(converted: Any) -> str:
    graph = converted.graph_module if hasattr(converted, "graph_module") else converted
    return str(graph.code)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize(
    ("way", "mode"),
    few(
        ["script", "trace", "export", "strict export", *long_cases("trace_module")],
        ["train", "eval"],
    ),
)
def test_conversions_are_those_of_plain_pytorch(way: str, mode: str) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    batches = make_batches(3)
    plain, plain_optimizer = build_seeded(build)
    train_classifier(plain, plain_optimizer, batches)
    wanted = CONVERSIONS[way](plain.train(mode == "train"))

    def work(world: World) -> tuple[str, dict[str, torch.Tensor]]:
        model, optimizer, session = _open(build, world, wait="modules")
        with session:
            train_classifier(model, optimizer, batches)
            converted = CONVERSIONS[way](model.train(mode == "train"))
            hooks = _hooks_of(model)
            assert sum(hooks) > 0
            return _code(converted), _state(converted)

    code, state = work(worlds(1)[0])
    assert code == _code(wanted)
    check_same_bits(state, _state(wanted))


def test_copies_on_two_ranks_are_alike_with_rank_0s_buffers() -> None:
    by_rank = batches_of(2, count=3)

    def loop(world: World, batches: Sequence[Batch]) -> list[Any]:
        model, optimizer, session = _open(_build, world)
        with session:
            train_classifier(model, optimizer, batches)
            copied, optimizer_copy = pickle.loads(pickle.dumps((model, optimizer)))
            check_same_bits(copied.state_dict(), model.state_dict())
            return [copied.state_dict(), optimizer_copy.state_dict()]

    first, second = run_cluster(2, lambda world: loop(world, by_rank[world.rank]))
    check_same_bits(second[0], first[0])
    check_same_optimizer_state(second[1], first[1])


def test_a_copy_is_its_own_when_the_session_goes_on() -> None:
    model, optimizer, session = _open(_build)
    with session:
        train_classifier(model, optimizer, make_batches(2))
        duplicate, own = copy.deepcopy((model, optimizer))
        kept = snapshot(duplicate.state_dict())
        kept_state = snapshot(own.state_dict())
        train_classifier(model, optimizer, make_batches(2))
        check_same_bits(duplicate.state_dict(), kept)
        check_same_optimizer_state(own.state_dict(), kept_state)
    loss = F.cross_entropy(duplicate(make_batches(1)[0][0]), make_batches(1)[0][1])
    loss.backward()
    own.step()


def test_the_class_is_given_back() -> None:
    before = vars(nn.Module).get("__reduce_ex__")
    with _open(_build)[2]:
        assert "__reduce_ex__" in vars(nn.Module)
    assert vars(nn.Module).get("__reduce_ex__") is before
