"""``foreprop doctor --self-test``: does a small model train on this machine's device?

One rank, whose servers are in the same process, so that gradients and values take the whole way:
off the device, through sockets, an optimizer on the host, and back. Plain torch trains the same,
on the device and on the CPU. Where the workers update, the device's own kernels do all the
arithmetic, so the bits must be plain torch's on that device. Where servers update, the host's do a
part: then the values must be near the CPU's.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn

from foreprop.engine.asyncdevice import describe_devices
from foreprop.engine.world import solitary_world
from foreprop.errors import ConfigError
from foreprop.session.composition import parallelize

STEPS = 10
_RTOL, _ATOL = 1e-3, 1e-4
"""How far float32 on another device may be after ten steps: it sums in another order."""


class Outcome(NamedTuple):
    """How one way to train did against plain torch."""

    what: str
    ok: bool
    told: str  # a field's name in what --json prints


class _Run(NamedTuple):
    values: list[torch.Tensor]
    ms_per_step: float


def show_self_test(device: str | None, *, as_json: bool) -> bool:
    """Train on that device, or on what there is, and print the outcomes; whether all are well."""
    chosen = chosen_device(device)
    outcomes = train_on(chosen)
    ok = all(outcome.ok for outcome in outcomes)
    if as_json:
        record = {"device": str(chosen), "ok": ok, "outcomes": [o._asdict() for o in outcomes]}
        print(msgspec.json.encode(record).decode(), flush=True)
    else:
        for outcome in outcomes:
            print(f"{'ok    ' if outcome.ok else 'FAILED'} {outcome.what}: {outcome.told}")
    return ok


def chosen_device(name: str | None) -> torch.device:
    """The device that is asked for, or the machine's accelerator, or the CPU.

    Raises `ConfigError` for a device that torch does not have here.
    """
    if name is None:
        found = torch.accelerator.current_accelerator(check_available=True)
        return torch.device("cpu") if found is None else found
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).cpu()
    except Exception as error:  # every backend has its own
        raise ConfigError(
            f"device is {name!r}, on which torch {torch.__version__} cannot compute here:"
            f" {str(error).partition(chr(10))[0]}. Name one that it can, as cpu or cuda:0"
        ) from error
    return device


def train_on(device: torch.device) -> list[Outcome]:
    """Train four times for some steps, which takes about a second on a CPU."""
    on_cpu, plain = _train(torch.device("cpu"), None), _train(device, None)
    by_workers, by_servers = _train(device, "workers"), _train(device, "servers")
    where = describe_devices([torch.empty(0, device=device)]).removeprefix("; ")
    wrong = _difference(by_workers, plain)
    bits = all(map(torch.equal, by_workers.values, plain.values))
    compared = "the same bits" if bits else f"other bits: values differ by up to {wrong:.3g}"
    per_step = f"{by_workers.ms_per_step:.2f} ms per step"
    return [
        Outcome("device", True, where or "parameters are in the host's memory"),
        _near("plain torch, against the CPU", plain, on_cpu),
        Outcome("update=workers, against plain torch there", bits, f"{compared}; {per_step}"),
        _near("update=servers, against the CPU", by_servers, on_cpu),
    ]


def _near(what: str, got: _Run, wanted: _Run) -> Outcome:
    pairs = zip(got.values, wanted.values, strict=True)
    near = all(torch.allclose(ours, theirs, _RTOL, _ATOL) for ours, theirs in pairs)
    text = f"values differ by up to {_difference(got, wanted):.3g}"
    text += "" if near else f", more than float32 explains (rtol {_RTOL:g}, atol {_ATOL:g})"
    return Outcome(what, near, f"{text}; {got.ms_per_step:.2f} ms per step")


def _difference(got: _Run, wanted: _Run) -> float:
    pairs = zip(got.values, wanted.values, strict=True)
    return max(float((ours - theirs).abs().max()) for ours, theirs in pairs)


def _train(device: torch.device, update: str | None) -> _Run:
    """Train with foreprop, or with torch alone if ``update`` is None; keep torch's random state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        on_host = nn.Sequential(
            nn.Linear(64, 128), nn.Tanh(), nn.LayerNorm(128), nn.Linear(128, 10)
        )
        batches = [(torch.randn(32, 64), torch.randint(10, (32,))) for _ in range(STEPS)]
    model = on_host.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if update is None:
        return _loop(model, optimizer, batches, device)
    settings: dict[str, Any] = {"architecture": "p2p", "update": update, "slice_elems": 1000}
    with parallelize(model, optimizer, world=solitary_world(), **settings):
        return _loop(model, optimizer, batches, device)


def _loop(model: nn.Module, optimizer: Any, batches: Any, device: torch.device) -> _Run:
    started = 0.0
    for step, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
        torch.autograd.backward(loss)
        optimizer.step()
        loss.item()  # the device has come here
        if step == 0:
            started = time.perf_counter()  # the first step learns, and allocates
    values = [parameter.detach().cpu().clone() for parameter in model.parameters()]
    ms_per_step = (time.perf_counter() - started) * 1e3 / (len(batches) - 1)
    return _Run(values, ms_per_step)
