"""The suite for a user's codec and optimizer: the page's pass it, and wrong ones do not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import foreprop
from foreprop.compression import codecs
from foreprop.config.plugins import load_plugins
from foreprop.conformance import check_codec, check_optimizer, main
from foreprop.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from foreprop.path import optimizer as optimizers
from tests.plugins import forgotten, page_module

PLACE: Any = None


@pytest.fixture(autouse=True)
def _only_foreprops() -> Iterator[None]:
    with forgotten():
        yield


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return page_module(tmp_path, monkeypatch)


def test_what_the_page_shows_holds(page: Any, capsys: pytest.CaptureFixture[str]) -> None:
    page.test_my_codec()
    page.test_my_optimizer()
    assert main([f"{page.__name__}:Halves"]) == main([f"{page.__name__}:SignSGD"]) == 0
    assert "SignSGD is as it must be" in capsys.readouterr().out
    assert main(["Halves"]) == 2


@pytest.mark.parametrize("name", ["AdamW", "SGD", "RMSprop", "Adagrad"])
def test_torchs_optimizers_hold(name: str) -> None:
    check_optimizer(getattr(torch.optim, name), lr=0.01)


class Right:
    name = "right"

    def most_bytes(self, elems: int) -> int:
        return 4 * elems

    def encode(self, values: torch.Tensor) -> bytes:
        return values.numpy().tobytes()

    def decode(self, data: memoryview, out: torch.Tensor) -> None:
        out.copy_(torch.frombuffer(data, dtype=torch.float32))


class TooLong(Right):
    def most_bytes(self, elems: int) -> int:
        return 4 * elems - 1


class Changing(Right):
    def encode(self, values: torch.Tensor) -> bytes:
        data = super().encode(values)
        values.zero_()
        return data


class Drawing(Right):
    def encode(self, values: torch.Tensor) -> bytes:
        return super().encode(values * torch.rand(()))


class Partial(Right):
    def decode(self, data: memoryview, out: torch.Tensor) -> None:
        out[1:].copy_(torch.frombuffer(data, dtype=torch.float32)[1:])


class Nothing(Right):
    def encode(self, values: torch.Tensor) -> bytes:
        return super().encode(torch.zeros_like(values))


class Doubling(Right):
    def encode(self, values: torch.Tensor) -> bytes:
        return super().encode((values * 2.5).clamp(-1e38, 1e38))


@pytest.mark.parametrize(
    ("codec", "told"),
    [
        (Changing, "encode() has changed the values"),
        (Drawing, "encoded twice, other bytes"),
        (Partial, "leaves elements as they were"),
        (Nothing, "of a difference is left in the end"),
        (Doubling, "of a difference is left in the end"),
    ],
)
def test_a_codec_that_does_not_hold_is_told_why(codec: Any, told: str) -> None:
    with pytest.raises(AssertionError, match=re.escape(told)):
        check_codec(codec)


def test_a_codec_that_gives_more_than_it_says_is_named() -> None:
    with pytest.raises(LocalProtocolError, match=r"codec right gave 4 bytes for 1 elements"):
        check_codec(TooLong)


def test_bytes_of_others_are_an_error_of_theirs() -> None:
    foreprop.register_codec(Right)
    codec, out = codecs.make("right"), torch.zeros(3)
    for wrong in (b"", b"\0", b"\0" * 12, b"x\1", b"\7" * 13):
        with pytest.raises(RemoteProtocolError, match=r"right: .* cannot be decoded"):
            codec.decode(memoryview(bytearray(wrong)), out, PLACE)
    codec.decode(codec.encode(torch.full((3,), torch.inf), {}, PLACE), out, PLACE)
    assert out.isnan().all()


class Whole(torch.optim.SGD):
    """Its step depends on the parameter's norm."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad /= parameter.grad.norm()
        super().step()


class Hoarding(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        super().step()
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["square"] = torch.zeros(parameter.numel() + 1)


@pytest.mark.parametrize(
    ("cls", "told"), [(Whole, "it gives other bits than in one"), (Hoarding, "of another shape")]
)
def test_an_optimizer_that_does_not_hold_is_told_why(cls: Any, told: str) -> None:
    with pytest.raises(AssertionError, match=told):
        check_optimizer(cls, lr=0.1)


# Registering.
def test_what_is_no_codec_is_refused() -> None:
    assert foreprop.register_codec(Right) is Right
    assert foreprop.register_codec(Right) is Right  # its module is loaded again
    for name, told in [("int8", "which another codec is called"), ("a=b", "must be a word")]:
        wrong: Any = type("Wrong", (Right,), {"name": name})
        with pytest.raises(ConfigError, match=told):
            foreprop.register_codec(wrong)
    for what in (3, type("Half", (), {"name": "half", "encode": print})):
        with pytest.raises(ConfigError, match="must be a class with most_bytes, encode, decode"):
            foreprop.register_codec(what)  # type: ignore[type-var]
    with pytest.raises(ConfigError, match=r"compression is 'right:3'; Right: "):
        codecs.make("right:3")
    with pytest.raises(ConfigError, match=r"no codec is called 'wrong'.* name its module in plug"):
        codecs.make("wrong")


def test_what_is_no_optimizer_for_servers_is_refused() -> None:
    class Adam(torch.optim.SGD):
        pass

    class Asking(torch.optim.SGD):
        def __init__(self, params: Any, lr: float, *, foreach: bool = False) -> None:
            super().__init__(params, lr)

    wrong: list[tuple[Any, str]] = [
        (3, "must be a class of torch.optim"),
        (Adam, "has the name of another one"),
        (Asking, "Asking needs lr: give it a default"),
    ]
    for cls, told in wrong:
        with pytest.raises(ConfigError, match=told):
            foreprop.register_optimizer(cls)


def test_a_plugin_that_is_not_there_is_told() -> None:
    load_plugins(None)
    load_plugins("json, re")
    with pytest.raises(ConfigError, match="plugins is 'no_such', and no_such cannot be imported"):
        load_plugins("no_such")


def test_an_installed_package_is_found_by_its_entry_point(page: ModuleType, tmp_path: Path) -> None:
    about = tmp_path / "theirs-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1\n")
    (about / "entry_points.txt").write_text(
        f"[foreprop.codecs]\nhalves = {page.__name__}:Halves\nbroken = no_such:Codec\n"
        f"[foreprop.optimizers]\nSignSGD = {page.__name__}:SignSGD\n"
    )
    codecs._CODECS.pop("halves")
    optimizers.ELEMENTWISE_OPTIMIZERS.pop("SignSGD")
    assert codecs.make("halves").name == "halves"
    assert optimizers.maybe_served("SignSGD") is page.SignSGD
    assert optimizers.maybe_served("Other") is None
    with pytest.raises(ConfigError, match=r"the entry point broken of foreprop\.codecs"):
        codecs.make("broken")
