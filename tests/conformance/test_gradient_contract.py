"""Who reads or edits ``p.grad`` between `backward()` and `step()` finds what DDP would show."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

import foreprop
from foreprop import Session
from foreprop.core.frames import PACE_STEPS
from foreprop.engine.world import World
from tests.cluster import run_cluster
from tests.conformance.averaging_by_hand import (
    Average,
    ReadingLoop,
    backward,
    check_contract,
    gradients,
)
from tests.conformance.matrices import few
from tests.conformance.parity import (
    Batch,
    batches_of,
    build_seeded,
    servers_only,
    small_model,
    with_sgd,
)
from tests.tiers import long_cases

CLOSE = 1e-5
"""Norms are added up otherwise than torch does."""

Use = Callable[[nn.Module], Any]
"""Of gradients, after `backward()`; what it returns is compared."""


def using(use: Use, *, set_to_none: bool = True) -> ReadingLoop:
    def loop(model: nn.Module, optimizer: Any, batches: Sequence[Batch], average: Average) -> Any:
        results = []
        for batch in batches:
            optimizer.zero_grad(set_to_none=set_to_none)
            backward(model, batch)
            average(model)
            results.append(use(model))
            optimizer.step()
        return results

    return loop


def _grads(model: nn.Module) -> list[Any]:
    return [parameter.grad for parameter in model.parameters()]


def _scaled_list(model: nn.Module) -> Any:
    torch._foreach_mul_(_grads(model), 0.5)
    return gradients(model)


def _foreach(operation: Callable[..., Any], factor: Use) -> Use:
    """Nobody reads what it has made before `step()`."""
    return lambda model: operation(_grads(model), factor(model)) is None


def _out_of_place(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad * 0.3


def _edit(edit: Callable[[Any], Any]) -> Use:
    def use(model: nn.Module) -> Any:
        for grad in _grads(model):
            edit(grad)
        return gradients(model)

    return use


def _read(read: Callable[[Any], Any]) -> Use:
    return lambda model: [read(grad) for grad in _grads(model)]


def _drop_first(model: nn.Module) -> None:
    next(model.parameters()).grad = None


def _reassigned_data(model: nn.Module) -> Any:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.data = parameter.grad.data * 0.5 + 0.1
    return gradients(model)


READS: dict[str, Use] = {
    "clone": gradients,
    "numpy": _read(lambda g: torch.from_numpy(g.numpy().copy())),
    "detach": _read(lambda g: g.detach().clone()),
    "data": _read(lambda g: g.data.clone()),
    "tolist": _read(lambda g: g.tolist()),
    "item": _read(lambda g: g.sum().item()),
    "repr": _read(repr),
    "format": _read(lambda g: f"{g.flatten()[0]:.7f}"),
    "deepcopy": _read(copy.deepcopy),
    "copy": _read(lambda g: copy.copy(g).clone()),
    "pickle": _read(lambda g: pickle.loads(pickle.dumps(g))),
    "histogram": _read(lambda g: torch.histc(g, bins=8, min=-1, max=1)),
    "foreach_add": lambda m: list(torch._foreach_add(_grads(m), 1.0)),
    "foreach_abs": lambda m: list(torch._foreach_abs(_grads(m))),
    "cat": lambda m: torch.cat([g.flatten() for g in _grads(m)]),
    "stack_dot": lambda m: torch.stack([(g * g).sum() for g in _grads(m)]),
    "isfinite": _read(lambda g: torch.isfinite(g).all()),
    "index": _read(lambda g: g[0].clone()),
    "iterate": _read(lambda g: [row.clone() for row in g]),
    "bool_mask": _read(lambda g: g[g > 0]),
    "first_only": lambda m: m[0].weight.grad.clone(),
    "dlpack": _read(lambda g: torch.from_dlpack(g).clone()),
    "array": _read(lambda g: torch.from_numpy(__import__("numpy").asarray(g).copy())),
    "storage": _read(lambda g: torch.tensor(list(g.untyped_storage()), dtype=torch.uint8)),
    "parameters_to_vector": lambda m: torch.nn.utils.parameters_to_vector(_grads(m)),
    "max_norm": lambda m: get_total_norm(_grads(m), float("inf")),
    "one_norm": lambda m: get_total_norm(_grads(m), 1.0),
    "max_each": _read(lambda g: g.norm(float("inf"))),
}
NORMS: dict[str, Use] = {
    "total": lambda m: get_total_norm(_grads(m)),
    "total_foreach": lambda m: get_total_norm(_grads(m), foreach=True),
    "each": _read(lambda g: g.norm()),
    "each_item": _read(lambda g: g.data.norm(2).item()),
    "linalg": _read(lambda g: torch.linalg.vector_norm(g)),
    "linalg_norm": _read(lambda g: torch.linalg.norm(g)),
    "torch_norm": _read(lambda g: torch.norm(g, 2)),
    "clip_2": lambda m: clip_grad_norm_(m.parameters(), 0.5),
    "clip_foreach": lambda m: clip_grad_norm_(m.parameters(), 0.5, foreach=True),
    "clip_loose": lambda m: clip_grad_norm_(m.parameters(), 1e6),
    "clip_finite": lambda m: clip_grad_norm_(m.parameters(), 0.5, error_if_nonfinite=True),
    "clip_subset": lambda m: clip_grad_norm_(m[0].parameters(), 0.1),
    "clip_each": lambda m: [clip_grad_norm_(p, 0.1) for p in m.parameters()],
    "clip_twice": lambda m: [clip_grad_norm_(m.parameters(), c) for c in (0.5, 0.2)],
    "clip_and_read": lambda m: [clip_grad_norm_(m.parameters(), 0.5), gradients(m)],
    "norm_then_scale": lambda m: [get_total_norm(_grads(m)), _scaled_list(m)],
    "scale_then_norm": lambda m: [_scaled_list(m), get_total_norm(_grads(m))],
    "read_then_clip": lambda m: [gradients(m), clip_grad_norm_(m.parameters(), 0.5)],
    "clip_value_then_norm": lambda m: [
        clip_grad_value_(m.parameters(), 0.05),
        clip_grad_norm_(m.parameters(), 0.1),
    ],
    "clip_then_value": lambda m: [
        clip_grad_norm_(m.parameters(), 0.5),
        clip_grad_value_(m.parameters(), 0.02),
    ],
}
EDITS: dict[str, Use] = {
    "clip_value": lambda m: clip_grad_value_(m.parameters(), 0.05),
    "clip_inf": lambda m: clip_grad_norm_(m.parameters(), 0.05, norm_type=float("inf")),
    "clip_1": lambda m: clip_grad_norm_(m.parameters(), 0.5, norm_type=1.0),
    "clip_3": lambda m: clip_grad_norm_(m.parameters(), 0.1, norm_type=3.0),
    "mul_number": _edit(lambda g: g.mul_(0.3)),
    "mul_tensor": _edit(lambda g: g.mul_(torch.tensor(0.3))),
    "div_number": _edit(lambda g: g.div_(3)),
    "mul_like": _edit(lambda g: g.mul_(torch.full_like(g, 0.5))),
    "scaled_and_left": lambda m: [None for g in _grads(m) if g.mul_(0.3) is None],
    "imul_data": _edit(lambda g: g.data.mul_(0.3)),
    "foreach_mul": _scaled_list,
    "foreach_mul_list": _foreach(torch._foreach_mul_, lambda m: [0.1] * len(_grads(m))),
    "foreach_mul_tensor": _foreach(torch._foreach_mul_, lambda _: torch.tensor(0.25)),
    "foreach_div": _foreach(torch._foreach_div_, lambda _: 4.0),
    "add": _edit(lambda g: g.add_(0.01)),
    "nan_to_num": _edit(lambda g: torch.nan_to_num(g, out=g)),
    "setitem": _edit(lambda g: g.__setitem__(0, 0.0)),
    "view_edit": _edit(lambda g: g.view(-1)[0].mul_(2)),
    "copy": _edit(lambda g: g.copy_(torch.ones_like(g))),
    "zero": _edit(lambda g: g.zero_()),
    "numpy_edit": _edit(lambda g: g.numpy().__imul__(0.5)),
    "out_of_place": _out_of_place,
    "data_set": _reassigned_data,
    "dropped": _drop_first,
}


def usual(uses: dict[str, Use], alike: str) -> list[Any]:
    """All uses; those ``alike`` another one are `long`."""
    rest = alike.split()
    return [*(name for name in uses if name not in rest), *long_cases(*rest)]


@pytest.mark.parametrize(
    "name",
    usual(READS, "array foreach_abs stack_dot isfinite iterate one_norm max_each histogram copy"),
)
def test_reading(name: str) -> None:
    check_contract(with_sgd(), using(READS[name]))


@pytest.mark.parametrize(
    "name",
    usual(
        NORMS,
        "each_item linalg_norm torch_norm clip_finite clip_and_read",
    ),
)
def test_norms(name: str) -> None:
    check_contract(with_sgd(), using(NORMS[name]), rtol=CLOSE)


@pytest.mark.parametrize(
    "name",
    usual(
        EDITS, "clip_1 clip_3 mul_tensor div_number foreach_mul_tensor foreach_div nan_to_num copy"
    ),
)
def test_edits(name: str) -> None:
    rtol = CLOSE if name.startswith("clip_") and name != "clip_value" else 0.0
    check_contract(with_sgd(), using(EDITS[name]), rtol=rtol)


SETTINGS: dict[str, dict[str, Any]] = {
    "three": {"ranks": 3},
    "ring": {"architecture": "ring"},
    "ring_of_three": {"architecture": "ring", "ranks": 3},
    "relays": {"ranks": 4, "local_size": 2, "local_aggregation": "on"},
    "kvstore": {"preset": "kvstore", "update": "workers"},
    "tensorflow": {"preset": "tensorflow", "update": "workers"},
    "tiny_slices": {"slice_elems": 5},
    "workers": {"update": "workers"},
}
SEVERAL = {
    "read": READS["clone"],
    "clip": NORMS["clip_and_read"],
    "edit": EDITS["mul_number"],
    "drop": EDITS["dropped"],
}


@pytest.mark.parametrize(
    ("setting", "use"),
    few([pytest.param(s, marks=servers_only) if s == "relays" else s for s in SETTINGS], SEVERAL),
)
def test_in_every_setting(setting: str, use: str) -> None:
    check_contract(with_sgd(), using(SEVERAL[use]), rtol=CLOSE, **SETTINGS[setting])


@pytest.mark.parametrize("name", ["clone", "clip_2", "mul_number"])
def test_zeroed_in_place(name: str) -> None:
    use = {**READS, **NORMS, **EDITS}[name]
    check_contract(with_sgd(), using(use, set_to_none=False), rtol=CLOSE)


@pytest.mark.parametrize(
    "settings",
    [{}, {"preset": "kvstore", "update": "workers"}, {"architecture": "ring"}],
    ids=str,
)
def test_read_on_rank_0_only(settings: dict[str, Any]) -> None:
    """The others' gradients come when they call `step()`; nobody waits for ever."""

    def loop(model: nn.Module, optimizer: Any, batches: Sequence[Batch], average: Average) -> Any:
        is_first = torch.equal(batches[0][0], batches_of(2, count=3)[0][0][0])
        results = []
        for batch in batches:
            optimizer.zero_grad()
            backward(model, batch)
            average(model)
            results += gradients(model) if is_first else []
            optimizer.step()
        return results

    check_contract(with_sgd(), loop, **settings)


@servers_only
def test_a_wire_of_half_precision() -> None:
    check_contract(with_sgd(small_model), using(SEVERAL["clip"]), rtol=2e-2, wire_dtype="bfloat16")


def test_the_wait_for_a_norm_is_counted_and_in_the_trace(tmp_path: Path) -> None:
    """So `foreprop report` says of a loop that clips how long it waits.

    Once all ranks have told with their paces that they take the norm, servers tell it: those of
    the Python plane.
    """
    batches = batches_of(2, count=2 * PACE_STEPS + 3)

    def work(world: World) -> Session:
        model, optimizer = build_seeded(with_sgd())
        settings: Any = {"architecture": "p2p", "trace": str(tmp_path), "plane": "python"}
        with foreprop.parallelize(model, optimizer, world=world, **settings) as session:
            for batch in batches[world.rank]:
                optimizer.zero_grad()
                backward(model, batch)
                clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
        return session

    norms = set()
    for rank, session in enumerate(run_cluster(2, work)):
        (path,) = tmp_path.glob(f"worker-{rank}.*.trace.json")
        events = json.loads(path.read_text())["traceEvents"]
        waits = [event for event in events if event["ph"] == "X" and event["cat"] == "wait"]
        norms |= {w["args"]["step"] for w in waits if w["name"] == "norm of the gradients"}
        waited_s = sum(event["dur"] for event in waits) / 1e6
        assert session.stats()["waited_s"] == pytest.approx(waited_s, abs=0.05)
    first = 2 * PACE_STEPS + 1
    # who is there first waits for the other, if that does not take longer than to ask
    assert norms
    assert norms <= {first, first + 1, first + 2}
