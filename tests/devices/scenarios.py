"""What trains on the CPU, and is to train on a device with the same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.conformance.parity import Batch
from tests.devices.training import Scenario


# Models, of batches with 5 features and 3 classes.
def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 4), nn.Tanh(), nn.Linear(4, 3))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, 16),
        nn.Unflatten(1, (1, 4, 4)),
        nn.Conv2d(1, 2, 3),
        nn.BatchNorm2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.LayerNorm(8),
        nn.Linear(8, 3),
    )


class Tied(nn.Module):
    """One array in two layers, and one that only some forward passes use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.second.weight = self.first.weight
        self.last, self.rarely = nn.Linear(5, 3), nn.Linear(5, 3)
        self.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        hidden = self.second(self.first(x).tanh()).tanh()
        found = self.last(hidden)
        if self.count % 3 == 0:
            found = found + self.rarely(hidden)
        return found


class Uneven(Tied):
    """Of which each rank uses the last layer in other steps."""

    def __init__(self) -> None:
        super().__init__()
        self.count = int(torch.randint(3, ()))  # other ranks draw other numbers


class Words(nn.Module):
    """An embedding and attention; of numbers that are made of the features."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        numbers = (x.abs() * 3).long().clamp(max=10)
        seen = self.words(numbers)
        found, _ = self.attention(seen, seen, seen, need_weights=True)
        result: torch.Tensor = self.last(self.norm(seen + found).mean(1))
        return result


class Halves(nn.Module):
    """Parameters in bfloat16; servers keep masters in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = layers().bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(x.bfloat16())
        return found.float()


class Rows(nn.Module):
    """A table of which each step uses some rows, with a sparse gradient."""

    def __init__(self, *, sparse: bool = True) -> None:
        super().__init__()
        self.table = nn.Embedding(23, 6, sparse=sparse)
        self.last = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        numbers = (x.abs() * 9).long().clamp(max=22)
        found: torch.Tensor = self.last(self.table(numbers).tanh().mean(1))
        return found


def remote_rows() -> nn.Module:
    """Whose table only servers have."""
    model: Any = Rows()
    model.table.to("meta")
    model.table._apply = lambda *_: model.table  # stays there when the rest moves
    return model


# Loops.
def plain(model: Any, optimizer: Any, batches: Sequence[Batch], session: Any) -> list[float]:
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def accumulating(model: Any, optimizer: Any, batches: Sequence[Batch], session: Any) -> None:
    rest = iter(batches)
    for first, second in zip(rest, rest, strict=False):
        optimizer.zero_grad()
        for x, y in (first, second):
            (F.cross_entropy(model(x), y) / 2).backward()
        optimizer.step()


def zeroing(model: Any, optimizer: Any, batches: Sequence[Batch], session: Any) -> None:
    """In place, while gradients are under way."""
    for x, y in batches:
        optimizer.zero_grad(set_to_none=False)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def clipping(model: Any, optimizer: Any, batches: Sequence[Batch], session: Any) -> list[Any]:
    norms = []
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
    return norms


def scaling(model: Any, optimizer: Any, batches: Sequence[Batch], session: Any) -> float:
    device = batches[0][0].device.type
    scaler = torch.amp.GradScaler(device, init_scale=2.0**70, growth_interval=2)
    for x, y in batches:
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update(2.0**8 if scaler.get_scale() > 2**60 else None)
    return scaler.get_scale()


def evaluating(model: Any, optimizer: Any, batches: Sequence[Batch], session: Any) -> list[Any]:
    found = []
    for x, y in batches:
        plain(model, optimizer, [(x, y)], session)
        model.eval()
        with torch.no_grad():
            found.append(model(x))
        model.train()
    return found


def checkpointing(model: Any, optimizer: Any, batches: Sequence[Batch], session: Any) -> list[Any]:
    kept: list[Any] = []
    half = len(batches) // 2
    plain(model, optimizer, batches[:half], session)
    on_host = {name: value.cpu().clone() for name, value in model.state_dict().items()}
    plain(model, optimizer, batches[half:], session)
    kept.append({name: value.clone() for name, value in model.state_dict().items()})
    model.load_state_dict(on_host)
    plain(model, optimizer, batches[half:], session)
    return kept


def editing(model: Any, optimizer: Any, batches: Sequence[Batch], session: Any) -> None:
    """Values by hand, and gradients between the passes and the step."""
    for x, y in batches:
        plain(model, optimizer, [(x, y)], session)
        session.flush()
        with torch.no_grad():
            next(model.parameters()).mul_(0.5)


def reading(model: Any, optimizer: Any, batches: Sequence[Batch], session: Any) -> list[Any]:
    norms = []
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        norms.append([p.grad.norm() for p in model.parameters() if p.grad is not None])
        for p in model.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)
        optimizer.step()
    return norms


def monitoring(model: Any, optimizer: Any, batches: Any, session: Any) -> list[Any]:
    """A layer's output, before steps in which this rank has no gradient for it."""
    found = []
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if model.count % 3:
            with torch.no_grad():
                found.append(model.rarely(x))
        optimizer.step()
    return found


def looking_back(model: Any, optimizer: Any, batches: Any, session: Any) -> list[Any]:
    """At what servers have updated with."""
    found = []
    for x, y in batches:
        plain(model, optimizer, [(x, y)], session)
        found.append([p.grad.norm() for p in model.parameters() if p.grad is not None])
    return found


def averaging(model: Any, optimizer: Any, batches: Sequence[Batch], session: Any) -> Any:
    plain(model, optimizer, batches, session)
    return session.ema_state_dict()


def autocasting(model: Any, optimizer: Any, batches: Sequence[Batch], session: Any) -> float:
    """In bfloat16, with a scaler, as `examples/train_mixed_precision.py` has it."""
    device = batches[0][0].device.type
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=2)
    for x, y in batches:
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16):
            found = model(x)
        assert found.dtype == torch.bfloat16
        scaler.scale(F.cross_entropy(found.float(), y)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale()


def compiling(model: Any, optimizer: Any, batches: Sequence[Batch], session: Any) -> Any:
    return plain(torch.compile(model, backend="aot_eager"), optimizer, batches, session)


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.maker = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 5))
        self.judge = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.judge(self.maker(x))
        return found


def duelling(model: Any, optimizer: Any, batches: Sequence[Batch], session: Any) -> None:
    """One optimizer; the gradients that the maker's pass gives the judge are discarded."""
    for x, _ in batches:
        optimizer.zero_grad()
        model(x).mean().backward()
        for parameter in model.judge.parameters():
            parameter.grad = None
        fake = model.maker(x).detach()
        (model.judge(fake).mean() - model.judge(x).mean()).backward()
        optimizer.step()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def adagrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=0.1)


def with_settings(**settings: Any) -> Callable[..., Scenario]:
    def make(*args: Any, **kwargs: Any) -> Scenario:
        return Scenario(*args, settings=settings, **kwargs)

    return make


served = with_settings(architecture="p2p", update="servers")
at_workers = with_settings(architecture="p2p", update="workers")
ring = with_settings(architecture="ring")

SCENARIOS: dict[str, Scenario] = {
    "layers": served(layers, plain),
    "convolutions-adam": served(convolutions, plain, adam),
    "attention": served(Words, plain),
    "tied": served(Tied, plain, steps=6),
    "uneven": served(Uneven, plain, steps=7),
    "monitoring": served(Uneven, monitoring, steps=7),
    "accumulating": served(layers, accumulating),
    "zeroing": served(layers, zeroing),
    "looking-back": served(layers, looking_back),
    "evaluating": served(convolutions, evaluating),
    "checkpointing": served(layers, checkpointing, adam),
    "editing": served(layers, editing),
    "workers": at_workers(layers, plain, adam),
    "workers-uneven": at_workers(Uneven, plain, steps=7),
    "workers-reading": at_workers(layers, reading),
    "workers-clipping": at_workers(layers, clipping),
    "workers-scaling": at_workers(layers, scaling),
    "workers-gan": at_workers(Gan, duelling),
    "clip-norm": with_settings(architecture="p2p", update="servers", clip_grad_norm=0.05)(
        layers, plain
    ),
    "ema": with_settings(architecture="p2p", update="servers", ema=0.9)(layers, averaging),
    "bfloat16-wire": with_settings(architecture="p2p", update="servers", wire_dtype="bfloat16")(
        layers, plain
    ),
    "bfloat16-parameters": served(Halves, plain, adam),
    "local-aggregation": with_settings(
        architecture="p2p", update="servers", local_aggregation="on"
    )(layers, plain, ranks=4, local_size=2),
    "ring": ring(layers, plain, adam),
    "ring-uneven": ring(Uneven, plain, steps=7),
    "ring-clip-norm": with_settings(architecture="ring", clip_grad_norm=0.05)(layers, plain),
    "ring-clip-norm-bfloat16": with_settings(
        architecture="ring", clip_grad_norm=0.05, wire_dtype="bfloat16"
    )(layers, plain),
    "ring-ema": with_settings(architecture="ring", ema=0.9)(layers, averaging),
    "ring-reading": with_settings(architecture="ring", update="workers")(layers, reading),
    "ring-codec": with_settings(architecture="ring", compression="bf16")(layers, plain),
    "tables": served(Rows, plain, adagrad),
    "tables-workers": at_workers(Rows, plain, adagrad),
    "tables-remote": with_settings(architecture="p2p", whole_tables="all")(
        remote_rows, plain, adagrad
    ),
    "sparse-dense": with_settings(architecture="p2p", update="servers", dense_parameters="*")(
        Rows, plain, adagrad
    ),
    "sparse-ring": with_settings(architecture="ring", update="servers")(Rows, plain, adagrad),
    "hybrid": with_settings(architecture="hybrid")(Rows, plain, adagrad),
    "hybrid-remote": with_settings(architecture="hybrid", whole_tables="all")(
        remote_rows, plain, adagrad
    ),
    "auto": with_settings(architecture="auto")(Rows, plain, adagrad, steps=8),
    "local-aggregation-workers": with_settings(
        architecture="p2p", update="workers", local_aggregation="on"
    )(layers, reading, ranks=4, local_size=2),
    "codec-lossless": with_settings(architecture="p2p", compression="lossless")(layers, plain),
    "codec-int8": with_settings(architecture="p2p", compression="int8")(layers, plain),
    "codec-topk": with_settings(architecture="p2p", compression="topk:0.2")(layers, plain),
    "staleness": with_settings(architecture="p2p", staleness=1)(layers, plain, ranks=1),
    "autocast": at_workers(layers, autocasting, adam),
    "compiled": served(layers, compiling, ranks=1),
    "pinned-some": with_settings(architecture="p2p", update="servers", pinned_bytes=300)(
        layers, plain
    ),
    "pinned-none": with_settings(architecture="p2p", update="workers", pinned_bytes=0)(
        layers, reading
    ),
}
