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
from foreprop.config.plugins import load_plugins
from foreprop.conformance import check_codec, check_optimizer, main
from foreprop.core.codec import Place
from foreprop.core.codecfacts import LAB_CODECS, Coded, codec_named, encoded_share
from foreprop.core.slicing import Slice
from foreprop.engine import optimizer as optimizers
from foreprop.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from foreprop.features.compression import codecs
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


class Shaken(Right):
    """Right on average."""

    name = "shaken"
    draws, keeps_error = True, False
    answer = "int8"
    s_per_gb = 1.0, 0.5

    def encode(self, values: torch.Tensor, *drawn: torch.Generator) -> bytes:
        (generator,) = drawn
        noise = torch.rand(values.shape, generator=generator) - 0.5
        return super().encode(values + noise * values.abs().max())


class Large(Right):
    """Keeps nothing of what it leaves out."""

    name = "large"
    keeps_error = False

    def encode(self, values: torch.Tensor) -> bytes:
        return super().encode(torch.where(values.abs() < values.abs().max(), 0.0, values))


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
    ("codec", "message"),
    [
        (Changing, "encode() has changed the values"),
        (Drawing, "encoded twice, other bytes"),
        (Partial, "leaves elements as they were"),
        (Nothing, "of a difference is left in the end"),
        (Doubling, "of a difference is left in the end"),
        (Large, "without error feedback a gradient is off by"),
    ],
)
def test_a_codec_that_does_not_hold_is_told_why(codec: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=re.escape(message)):
        check_codec(codec)


def test_what_a_codec_says_of_itself_is_heard() -> None:
    for own in (Right, Shaken):
        foreprop.register_codec(own)
    check_codec(Shaken)
    codec, values = codecs.make("shaken"), torch.ones(1000)
    places = [Place(1, 1, 1), Place(2, 1, 1), Place(1, 2, 1), Place(1, 1, 2)]
    sent = [bytes(codec.encode(values, {}, place)) for place in places]
    assert len({*sent}) == len(places)
    assert sent[0] == bytes(codec.encode(values, {}, places[0]))
    assert not codec.new_state(3)
    assert codecs.make_for_replies("shaken", 2).name == "int8"
    assert codecs.make("right").new_state(3)
    known = codec_named("shaken")
    assert known.coded(1000, ranks=2) == Coded(4001, 1032, 4e-6, 2e-6)
    assert known.facts.state_arrays == 0


def test_what_is_predicted_of_a_codec_is_what_it_says() -> None:
    half: Any = type("Half", (Right,), {"name": "half", "most_bytes": lambda self, n: 2 * n})
    foreprop.register_codec(half)

    def share() -> float:
        return encoded_share([("*", "half")], "weight", (1280,), Slice(0, 0, 0, 1280, 0))

    assert share() == 1.0
    with pytest.raises(ConfigError, match="its class says it as s_per_gb"):
        codec_named("half")
    half.s_per_gb = 1.0, 0.5
    assert share() == (2 * 1280 + 1) / (4 * 1280)


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
    ("cls", "message"), [(Whole, "it gives other bits than in one"), (Hoarding, "of another shape")]
)
def test_an_optimizer_that_does_not_hold_is_told_why(cls: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_optimizer(cls, lr=0.1)


# Registering.
def test_what_is_no_codec_is_refused() -> None:
    assert foreprop.register_codec(Right) is Right
    assert foreprop.register_codec(Right) is Right  # its module is loaded again
    for name, message in [("int8", "which another codec is called"), ("a=b", "must be a word")]:
        wrong: Any = type("Wrong", (Right,), {"name": name})
        with pytest.raises(ConfigError, match=message):
            foreprop.register_codec(wrong)
    for what in (3, type("Half", (), {"name": "half", "encode": print})):
        with pytest.raises(ConfigError, match="must be a class with most_bytes, encode, decode"):
            foreprop.register_codec(what)  # type: ignore[type-var]
    with pytest.raises(ConfigError, match=r"compression is 'right:3'; Right: "):
        codecs.make("right:3")
    with pytest.raises(ConfigError, match=r"no codec is called 'wrong'.* name its module in plug"):
        codecs.make("wrong")


@pytest.mark.parametrize("name", [*LAB_CODECS, "qsgd:7"])
def test_a_codec_of_the_lab_says_how_to_install_that(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foreprop.config.plugins.entry_points", lambda group, name: ())
    codecs._registered.pop(name.partition(":")[0], None)
    with pytest.raises(ConfigError, match=r"foreprop-lab, which is not installed: pip install"):
        codecs.make(name)


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
    for cls, message in wrong:
        with pytest.raises(ConfigError, match=message):
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
    codecs._registered.pop("halves")
    optimizers.ELEMENTWISE_OPTIMIZERS.pop("SignSGD")
    assert codecs.make("halves").name == "halves"
    assert optimizers.maybe_served("SignSGD") is page.SignSGD
    assert optimizers.maybe_served("Other") is None
    with pytest.raises(ConfigError, match=r"the entry point broken of foreprop\.codecs"):
        codecs.make("broken")
