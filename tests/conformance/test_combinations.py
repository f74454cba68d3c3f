"""Every pair of settings that the table allows trains as each of them does alone.

`tests.matrix` has the settings, and a training whose sums are exact: what loses nothing ends with
the bits that are worked out by hand.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import foreprop
from foreprop.config.combinations import REFUSED, Refused
from foreprop.errors import ConfigError
from tests.cluster import worlds
from tests.conformance.parity import check_same_bits, servers_only
from tests.matrix import EXAMPLES, MATRIX, by_hand, check_trained, together, train
from tests.tiers import long_cases

pytestmark = servers_only  # each pair names its architecture

MEASURED = {"architecture auto", "slices auto", "codecs auto"}
"""They measure links, which takes a second."""
BESIDE_MEASURED = {"workers", "clip norm", "wire", "lossless", "rows"}
"""What `make test` has them with."""

TRIPLES = 60


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("job") / "secret"
    file.write_text("x" * 64)
    file.chmod(0o600)
    return file


def allowed() -> Iterator[Any]:
    for pair in itertools.combinations(MATRIX, 2):
        if together(*pair) is not None:
            measured, others = MEASURED & set(pair), set(pair) - MEASURED
            is_long = measured and not others & BESIDE_MEASURED
            yield from long_cases(pair) if is_long else [pair]


def with_elastic() -> Iterator[Any]:
    """Servers beside the workers, and dedicated ones."""
    for name in MATRIX:
        for servers in ([], ["dedicated"]):
            names = ["elastic", *servers, name]
            if len(set(names)) == len(names) and together(*names) is not None:
                yield from long_cases(names) if name in MEASURED else [names]


def drawn_triples() -> list[tuple[str, ...]]:
    """The same ones each time, of those that are allowed."""
    triples = [names for names in itertools.combinations(MATRIX, 3) if together(*names)]
    return random.Random(1).sample(triples, TRIPLES)


def check(names: Sequence[str], secret: Path, *, killed: bool = False) -> None:
    settings = together(*names)
    assert settings is not None
    first, *others = train(settings, secret, killed=killed)
    for values in others:
        check_same_bits(values, first)
    check_trained(names, first, by_hand(settings))


@pytest.mark.parametrize("name", MATRIX)
def test_alone(name: str, secret: Path) -> None:
    check([name], secret)


@pytest.mark.parametrize("pair", list(allowed()), ids="-".join)
def test_each_allowed_pair(pair: tuple[str, str], secret: Path) -> None:
    check(pair, secret)


@pytest.mark.long
@pytest.mark.parametrize("names", drawn_triples(), ids="-".join)
def test_some_of_three(names: Sequence[str], secret: Path) -> None:
    check(names, secret)


@pytest.mark.parametrize("names", list(with_elastic()), ids="-".join)
def test_each_allowed_pair_when_a_node_dies(names: Sequence[str], secret: Path) -> None:
    check(names, secret, killed=True)


# What no setting says.
def found_and_settings() -> Iterator[Any]:
    for row in REFUSED:
        for one, other in itertools.product(row.these, row.those):
            found, name = (one, other) if one in FOUND else (other, one)
            if found in FOUND and name in EXAMPLES:
                yield pytest.param(found, EXAMPLES[name], row, id=f"{found}-{name}")


def given(found: str) -> dict[str, Any]:
    """A model that has it, and its optimizer, or none."""
    table = nn.Embedding(6, 4, sparse=found == "tables")
    model = nn.Sequential(table, nn.Linear(4, 2))
    if found == "no optimizer":
        return {"model": model}
    scaler = torch.amp.GradScaler("cpu") if found == "scaler" else None
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1), "scaler": scaler}


FOUND = {"no optimizer", "scaler", "tables"}


@pytest.mark.parametrize(("found", "settings", "row"), list(found_and_settings()))
def test_what_parallelize_finds_is_refused(
    found: str, settings: Mapping[str, Any], row: Refused
) -> None:
    with pytest.raises(ConfigError) as raised:
        foreprop.parallelize(**given(found), world=worlds(1)[0], **settings)
    assert str(raised.value).endswith(f": {row.reason}; {row.instead}")
