"""The table of combinations: its pairs are refused, each by its row, and all others allowed."""

from __future__ import annotations

import itertools
import os
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from foreprop.config import Config
from foreprop.config.combinations import FEATURES, REFUSED, Refused, settled
from foreprop.errors import ConfigError
from tests.matrix import EXAMPLES, MATRIX

ROOT = Path(__file__).parents[3]
FOUND = {name for name, feature in FEATURES.items() if not feature.setting}
"""What `parallelize` finds: `tests/conformance/test_combinations.py` has those."""


@pytest.fixture(autouse=True)
def _usual(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith("FOREPROP_"):
            monkeypatch.delenv(name)
    secret = tmp_path / "secret"
    secret.write_text("x" * 64)
    secret.chmod(0o600)
    monkeypatch.setenv("FOREPROP_SECRET_FILE", str(secret))


def together(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any] | None:
    """None if they are values of one setting."""
    same = all(one[name] == other[name] for name in one.keys() & other.keys())
    return {**one, **other} if same else None


def rows_for(one: str, other: str) -> list[Refused]:
    return [
        row
        for row in REFUSED
        if (one in row.these and other in row.those) or (other in row.these and one in row.those)
    ]


def refusal_of(settings: Mapping[str, Any]) -> str:
    """Empty if there is none."""
    try:
        Config.resolve(**settings)
    except ConfigError as error:
        return str(error)
    return ""


def refusing(told: str) -> Refused:
    """The row that refuses with this text."""
    return next(row for row in REFUSED if told.endswith(row.text("", "").removeprefix(", and ")))


def test_each_feature_has_an_example_that_asks_for_it() -> None:
    assert set(EXAMPLES) == set(FEATURES) - FOUND
    for name, settings in EXAMPLES.items():
        if refusal := refusal_of(settings):  # of an elastic session
            assert any(row.instead in refusal for row in rows_for("elastic", name))
        elif "auto" not in name:
            assert FEATURES[name].is_asked(Config.resolve(**settings)), name


def test_each_row_has_features_that_are_there_and_a_way_out() -> None:
    for row in REFUSED:
        assert {*row.these, *row.those} <= set(FEATURES)
        assert "" not in (row.reason, row.instead)


def test_each_pair_of_the_table_is_refused_and_both_values_named() -> None:
    for one, other in itertools.combinations(EXAMPLES, 2):
        settings = together(EXAMPLES[one], EXAMPLES[other])
        if settings is None or not (rows := rows_for(one, other)):
            continue
        told = refusal_of(settings)
        assert told, (one, other)
        if told.endswith(f": {rows[0].reason}; {rows[0].instead}"):
            for name in (FEATURES[one].setting, FEATURES[other].setting):
                assert f"{name} is {settings.get(name, getattr(Config(), name))!r}" in told


def test_no_other_pair_is_refused() -> None:
    """What else is refused are two of the settings that the examples bring along."""
    for one, other in itertools.combinations(EXAMPLES, 2):
        settings = together(EXAMPLES[one], EXAMPLES[other])
        told = "" if settings is None else refusal_of(settings)
        if settings is not None and told and not rows_for(one, other):
            row = refusing(told)
            pair = told.removesuffix(row.text("", "").removeprefix(", and ")).split(", and ")
            assert {f"{name} is {value!r}" for name, value in settings.items()} & set(pair)


def test_most_pairs_of_the_matrix_are_allowed() -> None:
    """A refusal that is not by nature is to go: these numbers only become smaller."""
    by_nature = not_yet = 0
    for one, other in itertools.combinations(MATRIX, 2):
        settings = together(MATRIX[one], MATRIX[other])
        told = "" if settings is None else refusal_of(settings)
        if told:
            row = refusing(told)
            by_nature += row.by_nature
            not_yet += not row.by_nature
    assert (by_nature, not_yet) == (36, 0)


def test_what_auto_means_where_nothing_is_left_to_choose() -> None:
    def architecture(**settings: Any) -> str | None:
        return Config.resolve(architecture="auto", **settings).architecture

    assert architecture() == architecture(dedicated_servers=2) == "auto"
    assert architecture(wire_dtype="bfloat16") == architecture(compression="bf16") == "auto"
    assert architecture(compression="int8") == architecture(compression="lossless") == "p2p"
    assert architecture(elastic=True) == architecture(staleness="late") == "p2p"
    assert architecture(elastic=True, dedicated_servers=2) == "ps"
    assert architecture(encryption="tls") == architecture(backup_workers=1) == "p2p"

    def slice_elems(**settings: Any) -> object:
        return Config.resolve(slice_elems="auto", **settings).slice_elems

    assert slice_elems() == slice_elems(compression="lossless") == "auto"
    assert slice_elems(dedicated_servers=2) is slice_elems(architecture="ring") is None
    assert slice_elems(elastic=True) is slice_elems(staleness=2) is None
    assert slice_elems(compression="int8") is slice_elems(granularity="array") is None


def test_of_remote_tables_nothing_is_left_to_choose() -> None:
    found = ["remote tables"]
    assert settled(Config(architecture="auto", slice_elems="auto"), found) == {
        "architecture": "p2p",
        "slice_elems": None,
    }
    assert settled(Config(architecture="auto", dedicated_servers=2), found)["architecture"] == "ps"
    assert settled(Config(), found) == {}


def test_the_page_of_combinations_is_made_from_the_table() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "combinations_page.py"))
    page = (ROOT / "docs" / "combinations.md").read_text()
    assert page == script["page"](), "run: python scripts/combinations_page.py"
