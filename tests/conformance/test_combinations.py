"""Every pair of settings that the table allows trains as each of them does alone.

`tests.matrix` has the settings, and a training whose sums are exact: what loses nothing ends with
the bits that are worked out by hand.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from foreprop.config import Config
from foreprop.errors import ConfigError
from tests.conformance.parity import check_same_bits, servers_only
from tests.matrix import MATRIX, by_hand, train
from tests.tiers import long_cases

pytestmark = servers_only  # each pair names its architecture

LOSSY = {"int8", "dgc", "codecs auto", "clip norm"}
"""What is rounded. The bits of ``clip norm`` are those of one order of its sum."""
MEASURED = {"architecture auto", "slices auto", "codecs auto"}
"""They measure links, which takes a second."""
BESIDE_MEASURED = {"workers", "clip norm", "wire", "lossless", "rows"}
"""What `make test` has them with."""
MOST_OFF = 0.02
_TABLE = "table.weight"
_BY_PATTERNS = {
    frozenset({"hybrid", "lossless"}): {
        "compression": f"{_TABLE}=lossless",
        "sparse_parameters": _TABLE,
    },
    frozenset({"int8", "rows"}): {"compression": f"{_TABLE}=none,*=int8"},
    frozenset({"dgc", "rows"}): {"compression": f"{_TABLE}=none,*=dgc:0.5"},
}
"""Codecs that are not for every parameter of the model."""


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("job") / "secret"
    file.write_text("x" * 64)
    file.chmod(0o600)
    return file


def together(*names: str) -> dict[str, Any] | None:
    """None if the names are values of one setting, or the table refuses them."""
    settings: dict[str, Any] = {}
    for name in names:
        if settings.keys() & MATRIX[name].keys():
            return None
        settings.update(MATRIX[name])
    settings.update(_BY_PATTERNS.get(frozenset(names), {}))
    known = {"secret_file": "."} if "encryption" in settings else {}
    try:
        Config.resolve(**settings, **known)
    except ConfigError:
        return None
    return settings


def allowed() -> Iterator[Any]:
    for pair in itertools.combinations(MATRIX, 2):
        if together(*pair) is not None:
            measured, others = MEASURED & set(pair), set(pair) - MEASURED
            is_long = measured and not others & BESIDE_MEASURED
            yield from long_cases(pair) if is_long else [pair]


def check(settings: Mapping[str, Any], secret: Path, *, rounded: bool) -> None:
    found, wanted = train(settings, secret), _by_hand(**settings)
    for values in found[1:]:
        check_same_bits(values, found[0])
    if not rounded:
        check_same_bits(found[0], wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(found[0][name], value, rtol=0, atol=MOST_OFF)


@cache
def _by_hand(**settings: Any) -> Mapping[str, torch.Tensor]:
    return by_hand(settings)


@pytest.mark.parametrize("name", MATRIX)
def test_alone(name: str, secret: Path) -> None:
    check(MATRIX[name], secret, rounded=name in LOSSY)


@pytest.mark.parametrize("pair", list(allowed()), ids="-".join)
def test_each_allowed_pair(pair: tuple[str, str], secret: Path) -> None:
    settings = together(*pair)
    assert settings is not None
    check(settings, secret, rounded=bool(LOSSY & set(pair)))
