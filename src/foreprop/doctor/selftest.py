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

import torch
from torch import nn

from foreprop.cluster.world import solitary_world
from foreprop.errors import ConfigError
from foreprop.path.asyncdevice import describe_devices
from foreprop.session.session import parallelize

STEPS = 10
_RTOL, _ATOL = 1e-3, 1e-4
"""float32 on another device: sums in another order, over ten steps."""


class Outcome(NamedTuple):
    """Of one way to train, against plain torch."""

    what: str
    ok: bool
    told: str


class _Run(NamedTuple):
    values: list[torch.Tensor]
    ms_per_step: float


def chosen_device(name: str | None) -> torch.device:
    """The one that is asked for, or the machine's accelerator, or the CPU.

    Raises `ConfigError` for one that torch does not have here.
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
    """Trains four times for some steps: about a second on a CPU."""
    on_cpu, plain = _train(torch.device("cpu"), None), _train(device, None)
    by_workers, by_servers = _train(device, "workers"), _train(device, "servers")
    where = describe_devices([torch.empty(0, device=device)]).removeprefix("; ")
    return [
        Outcome("device", True, where or "parameters are in the host's memory"),
        _near("plain torch, against the CPU", plain, on_cpu),
        _same("update=workers, against plain torch there", by_workers, plain),
        _near("update=servers, against the CPU", by_servers, on_cpu),
    ]


def _same(what: str, got: _Run, wanted: _Run) -> Outcome:
    wrong = _difference(got, wanted)
    bits = all(map(torch.equal, got.values, wanted.values))
    told = "the same bits" if bits else f"other bits: values differ by up to {wrong:.3g}"
    return Outcome(what, bits, f"{told}; {got.ms_per_step:.2f} ms per step")


def _near(what: str, got: _Run, wanted: _Run) -> Outcome:
    pairs = zip(got.values, wanted.values, strict=True)
    near = all(torch.allclose(ours, theirs, _RTOL, _ATOL) for ours, theirs in pairs)
    told = f"values differ by up to {_difference(got, wanted):.3g}"
    told += "" if near else f", more than float32 explains (rtol {_RTOL:g}, atol {_ATOL:g})"
    return Outcome(what, near, f"{told}; {got.ms_per_step:.2f} ms per step")


def _difference(got: _Run, wanted: _Run) -> float:
    pairs = zip(got.values, wanted.values, strict=True)
    return max(float((ours - theirs).abs().max()) for ours, theirs in pairs)


def _train(device: torch.device, update: str | None) -> _Run:
    """By foreprop, or if ``update`` is None by torch alone. Leaves torch's random state alone."""
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
