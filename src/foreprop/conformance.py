"""The checks of a codec or an optimizer of your own, to be called in a test of that class.

    def test_my_codec():
        foreprop.check_codec(Halves)

``python -m foreprop.conformance my_module:Halves`` does the same. An `AssertionError` says what is
wrong, with the data that shows it. See docs/extending.md.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from foreprop.core.codec import Place
from foreprop.engine.optimizer import hyperparameters, register_optimizer
from foreprop.engine.slicetensors import PartOptimizer, one_by_one
from foreprop.engine.tensors import decode_state, encode_state, state_limit_bytes
from foreprop.errors import RemoteProtocolError
from foreprop.features.compression.codecs import (
    make,
    make_for_replies,
    register_codec,
    traits_of,
)
from foreprop.features.compression.registered import OwnCodec

_ELEMS = (1, 2, 7, 128, 1_000, 50_003)
_ROUNDS, _REST = 400, 0.5  # how often a difference is sent, and how much of it may then be left
_PLACE = Place(step=1, slice=0, rank=0)
_STEPS, _PART = 6, 5


def check_codec(codec: type[OwnCodec], parameter: str | None = None) -> None:
    """Raise `AssertionError` for a class that is no codec; a ``parameter`` follows a colon."""
    register_codec(codec)
    name = codec.name if parameter is None else f"{codec.name}:{parameter}"
    for elems in _ELEMS:
        for what, values in _arrays(elems):
            _check_one(name, f"{elems} elements, {what}", values)
    _check_differences_end(name)
    _check_threads(name)
    _check_others_bytes(name)


def _hold(holds: bool, why_not: str) -> None:
    if not holds:
        raise AssertionError(why_not)


def _arrays(elems: int) -> Iterator[tuple[str, torch.Tensor]]:
    drawn = torch.randn(elems, generator=torch.Generator().manual_seed(elems))
    yield "normal", drawn
    yield "zeros", torch.zeros(elems)
    yield "all the same", torch.full((elems,), -3.0)
    yield "1e-30", drawn * 1e-30
    yield "1e30", drawn * 1e30
    yield "one large", torch.zeros(elems).index_fill_(0, torch.tensor(elems // 2), 1e4)
    yield "not finite", torch.full((elems,), torch.inf)


def _check_one(name: str, what: str, values: torch.Tensor) -> None:
    codec, other = make(name), make(name)
    before = values.clone()
    data = bytes(codec.encode(values, {}, _PLACE))
    _hold(torch.equal(values, before), f"{what}: encode() has changed the values")
    most = codec.most_bytes(len(values))
    _hold(len(data) <= most, f"{what}: {len(data) - 1} bytes, and most_bytes() says {most - 1}")
    _hold(bytes(other.encode(values, {}, _PLACE)) == data, f"{what}: encoded twice, other bytes")
    decoded = [torch.full_like(values, start) for start in (0.0, 7.0)]
    for own, out in zip((codec, other), decoded, strict=True):
        own.decode(memoryview(bytearray(data)), out, _PLACE)
    bits = [out.view(torch.int32) for out in decoded]
    _hold(torch.equal(*bits), f"{what}: decode() leaves elements as they were, or differs")
    if before.isfinite().all():
        _hold(bool(decoded[0].isfinite().all()), f"{what}: decoded to what is not finite")


def _check_differences_end(name: str) -> None:
    # as servers do, which send differences to what workers have until nothing is left
    codec, answer = make(name), make_for_replies(name, pushes=1)
    for elems in _ELEMS[:-1]:
        wanted = torch.randn(elems, generator=torch.Generator().manual_seed(1))
        image, sent = torch.zeros(elems), torch.zeros(elems)
        for _ in range(_ROUNDS):
            data = bytearray(answer.encode(wanted - image, {}, _PLACE))
            answer.decode(memoryview(data), sent, _PLACE)
            image += sent
        left = float((wanted - image).norm() / wanted.norm())
        _hold(left <= _REST, f"{elems} elements: {left:.2g} of a difference is left in the end")
    if traits_of(name).votes:  # it sends nothing but signs
        return
    state = {key: array.clone() for key, array in codec.new_state(1_000).items()}
    gradient = torch.randn(1_000, generator=torch.Generator().manual_seed(2))
    total, out = torch.zeros(1_000), torch.zeros(1_000)
    for step in range(_ROUNDS):
        place = _PLACE._replace(step=step)  # a random codec draws anew
        codec.decode(memoryview(bytearray(codec.encode(gradient, state, place))), out, place)
        total += out
    off = float((total / _ROUNDS - gradient).norm() / gradient.norm())
    kept = "with error feedback" if state else "without error feedback"
    _hold(off <= _REST, f"{kept} a gradient is off by {off:.2g} on average")


def _check_threads(name: str) -> None:
    codec = make(name)
    arrays = [torch.randn(1_000, generator=torch.Generator().manual_seed(n)) for n in range(8)]

    def encoded(values: torch.Tensor) -> bytes:
        return bytes(codec.encode(values, {}, _PLACE))

    alone = [encoded(values) for values in arrays]
    with ThreadPoolExecutor(len(arrays)) as threads:
        for found in threads.map(lambda _: [encoded(v) for v in arrays], range(len(arrays))):
            _hold(found == alone, "several threads at once give other bytes than one")


def _check_others_bytes(name: str) -> None:
    # whatever a peer sends is a RemoteProtocolError, or numbers
    codec, out = make(name), torch.zeros(100)
    data = bytes(codec.encode(torch.ones(100), {}, _PLACE))
    for wrong in (b"", data[:1], data[:-2] + data[-1:], b"x" + data, b"\xff" * len(data)):
        try:
            codec.decode(memoryview(bytearray(wrong)), out, _PLACE)
        except RemoteProtocolError:
            continue
        _hold(out.shape == (100,), "decode() has changed the shape of what it fills")


# Optimizers.
def check_optimizer(cls: type[torch.optim.Optimizer], **options: Any) -> None:
    """Raise `AssertionError` for a class that servers cannot apply; it is made with ``options``.

    Each element must be updated from itself alone, with numbers that the constructor names.
    """
    register_optimizer(cls)
    for shape in ((1,), (7, 3), (257,)):
        values = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        parameter = torch.nn.Parameter(values.clone())
        whole = cls([parameter], **options)
        served = [
            _Served(cls, values.flatten()[start : start + _PART])
            for start in range(0, values.numel(), _PART)
        ]
        for step in range(_STEPS):
            gradient = torch.randn(shape, generator=torch.Generator().manual_seed(step + 2))
            parameter.grad = gradient.clone()
            (group,) = hyperparameters(whole)
            whole.step()
            for number, part in enumerate(served):
                if step == _STEPS // 2:
                    part = served[number] = part.restored()
                part.update(gradient.flatten()[number * _PART :][:_PART], group)
            found = torch.cat([part.parameter.detach() for part in served]).view(shape)
            what = f"{cls.__name__}, shape {shape}, step {step + 1}: in parts of {_PART} elements"
            _hold(torch.equal(found, parameter.detach()), f"{what} it gives other bits than in one")
            if isinstance(group.get("lr"), float):  # as a schedule does
                whole.param_groups[0]["lr"] *= 0.5


class _Served:
    """A part of a parameter, as a server has it."""

    def __init__(self, cls: type[torch.optim.Optimizer], values: torch.Tensor) -> None:
        self._cls = cls
        self.parameter = torch.nn.Parameter(values.clone())
        self._optimizer = PartOptimizer(cls, self.parameter, **one_by_one(cls))

    def update(self, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        self.parameter.grad = gradient.clone()
        self._optimizer.update(self._cls.step, group, "it")

    def restored(self) -> _Served:
        """The part after a checkpoint, for which its state has crossed the wire."""
        there = _Served(self._cls, self.parameter.detach())
        kept: Mapping[str, Any] = self._optimizer.state
        elems = self.parameter.numel()
        wrong = [
            key
            for key, value in kept.items()
            if isinstance(value, torch.Tensor) and value.dim() and value.numel() != elems
        ]
        name = self._cls.__name__
        _hold(not wrong, f"{name} keeps {wrong}, of another shape than a parameter")
        data = encode_state(kept)
        _hold(len(data) <= state_limit_bytes(elems), f"{name} keeps too much")
        there._optimizer.replace_state(decode_state(memoryview(data), elems=elems))
        return there


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1 or ":" not in arguments[0]:
        print("usage: python -m foreprop.conformance MODULE:CLASS", file=sys.stderr)
        return 2
    module, _, name = arguments[0].partition(":")
    cls = getattr(importlib.import_module(module), name)
    if issubclass(cls, torch.optim.Optimizer):
        check_optimizer(cls)
    else:
        check_codec(cls)
    print(f"{name} is as it must be")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
