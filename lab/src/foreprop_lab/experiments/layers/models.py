"""Real layers on the emulated accelerator: a small transformer, ResNet and LSTM.

The layers compute real numbers and are small; the device takes longer. An operator of torch's takes
its time, behind each layer and in its backward pass. The operator is opaque to compilers, so that
compiled graphs have it in the same places as eager code. It is no part of the package, whose own
code is never compiled.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from foreprop.plan.profile import Layer, Profile, ProfiledArray
from foreprop_lab.lab.accelerator import DeviceClock, OnDevice

DEVICE = DeviceClock()
"""This process's accelerator."""


@torch.library.custom_op("foreprop_lab::occupy", mutates_args=())
def _occupy(x: torch.Tensor, forward_ns: int, backward_ns: int) -> torch.Tensor:
    DEVICE.occupy(forward_ns * 1e-9)
    return x.clone()


@torch.library.custom_op("foreprop_lab::occupy_back", mutates_args=())
def _occupy_back(gradient: torch.Tensor, backward_ns: int) -> torch.Tensor:
    DEVICE.occupy(backward_ns * 1e-9)
    return gradient.clone()


@_occupy.register_fake
def _(x: torch.Tensor, forward_ns: int, backward_ns: int) -> torch.Tensor:
    return torch.empty_like(x)


@_occupy_back.register_fake
def _(gradient: torch.Tensor, backward_ns: int) -> torch.Tensor:
    return torch.empty_like(gradient)


def _keep_time(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.backward_ns = inputs[2]


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, None, None]:
    return _occupy_back(gradient, ctx.backward_ns), None, None


_occupy.register_autograd(_backward, setup_context=_keep_time)


class Timed(nn.Module):
    """One of torch's layers, followed by the operator that takes the device's time for it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.forward_ns = self.backward_ns = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _occupy(self.layer(x), self.forward_ns, self.backward_ns)
        return result


class RealModel(OnDevice):
    """A model of `Timed` layers, with ``blocks`` that may be compiled one by one."""

    blocks: nn.ModuleList
    clock = DEVICE

    def batch(self, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and classes, (samples,) or (samples, tokens)."""
        raise NotImplementedError

    def take_times(self, layers: Sequence[Layer]) -> None:
        """Take the times of these layers, which are those of `profile_of` this model."""
        times = {layer.name: (layer.forward_s, layer.backward_s) for layer in layers}
        for name, module in self.named_modules():
            if isinstance(module, Timed):
                forward_s, backward_s = times[f"{name}.layer".replace(".", "_")]
                module.forward_ns = round(forward_s * 1e9)
                module.backward_ns = round(backward_s * 1e9)


# A transformer.
_WIDTH, _HEADS, _BLOCKS, _TOKENS, _WORDS = 256, 4, 4, 16, 512


class _TransformerBlock(nn.Module):
    """Attention and a perceptron, each behind a norm (GPT-2, section 2.3)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = (Timed(nn.LayerNorm(_WIDTH)) for _ in range(2))
        self.qkv = Timed(nn.Linear(_WIDTH, 3 * _WIDTH))
        self.out = Timed(nn.Linear(_WIDTH, _WIDTH))
        self.up = Timed(nn.Linear(_WIDTH, 4 * _WIDTH))
        self.down = Timed(nn.Linear(4 * _WIDTH, _WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norm1(x)).unflatten(-1, (3, _HEADS, -1)).unbind(-3)
        q, k, v = (part.transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        result: torch.Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return result


class WordModel(RealModel):
    """Words, blocks of a width, a classifier of words."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.words = Timed(nn.Embedding(_WORDS, _WIDTH))
        self.blocks = nn.ModuleList(blocks)
        self.last = Timed(nn.Linear(_WIDTH, _WORDS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.words(x)
        for block in (*self.blocks, self.last):
            y = block(y)
        return y

    def batch(self, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        words = torch.randint(_WORDS, (2, _TOKENS), generator=generator)
        return words, words


class Transformer(WordModel):
    def __init__(self) -> None:
        super().__init__(_TransformerBlock() for _ in range(_BLOCKS))


# A ResNet.
_CHANNELS, _BLOCKS_EACH, _PIXELS, _CLASSES = (64, 128, 256), 2, 8, 10


class _ResidualBlock(nn.Module):
    """Two convolutions and a way around them (He et al. 2016, figure 2)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.conv1 = Timed(nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False))
        self.norm1 = Timed(nn.BatchNorm2d(outputs))
        self.conv2 = Timed(nn.Conv2d(outputs, outputs, 3, padding=1, bias=False))
        self.norm2 = Timed(nn.BatchNorm2d(outputs))
        around = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
        self.around = nn.Identity() if inputs == outputs else Timed(around)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.around(x))


class ResNet(RealModel):
    def __init__(self) -> None:
        super().__init__()
        first = _CHANNELS[0]
        self.stem = Timed(nn.Conv2d(3, first, 3, padding=1, bias=False))
        widths = [first, *(width for width in _CHANNELS for _ in range(_BLOCKS_EACH))]
        self.blocks = nn.ModuleList(_ResidualBlock(*pair) for pair in itertools.pairwise(widths))
        self.last = Timed(nn.Linear(widths[-1], _CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.stem(x)
        for block in self.blocks:
            y = block(y)
        result: torch.Tensor = self.last(y.mean((2, 3)))
        return result

    def batch(self, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        images = torch.randn((2, 3, _PIXELS, _PIXELS), generator=generator)
        return images, torch.randint(_CLASSES, (2,), generator=generator)


# An LSTM.
class _Lstm(nn.LSTM):
    """One LSTM layer, which only returns the outputs of all steps."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        y: torch.Tensor = super().forward(x)[0]
        return y


class LstmModel(WordModel):
    """Words, LSTM layers, a classifier of words (Zaremba et al. 2014, section 3)."""

    def __init__(self) -> None:
        super().__init__(Timed(_Lstm(_WIDTH, _WIDTH, batch_first=True)) for _ in range(_BLOCKS))


MODELS: Mapping[str, Callable[[], RealModel]] = {
    "transformer": Transformer,
    "resnet": ResNet,
    "lstm": LstmModel,
}
NOT_COMPILED = ("lstm",)
"""Models with layers that Dynamo leaves to eager code."""


def profile_of(name: str) -> Profile:
    """The lab's profile of one of `MODELS`: arrays in the order of first use, with their FLOPs."""
    model = MODELS[name]()
    names = {id(module): path for path, module in model.named_modules()}
    arrays: list[ProfiledArray] = []

    def note(layer: nn.Module, _: Any, output: torch.Tensor) -> None:
        for own, array in layer.named_parameters():
            arrays.append(
                ProfiledArray(
                    name=f"{names[id(layer)]}.{own}",
                    shape=tuple(array.shape),
                    forward_flops=_flops(layer, array, output),
                )
            )

    for module in model.modules():
        if isinstance(module, Timed):
            module.layer.register_forward_hook(note)
    with torch.no_grad():
        model(model.batch(torch.Generator().manual_seed(0))[0])
    return Profile(name=name, arrays=tuple(arrays))


def _flops(layer: nn.Module, array: torch.Tensor, output: torch.Tensor) -> float:
    """The FLOPs of one forward pass: each output place uses each element of a matrix once."""
    if isinstance(layer, nn.Embedding):
        return 0.0
    if array.ndim == 1:
        return float(output.numel())
    rows = layer.hidden_size if isinstance(layer, nn.LSTM) else array.shape[0]
    places = output.numel() // rows
    return 2.0 * array.numel() * places
