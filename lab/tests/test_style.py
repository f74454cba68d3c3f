"""One style for all charts: colours that protan and deutan viewers tell apart, p3 blue everywhere.

Machado, Oliveira and Fernandes, "A Physiologically-based Model for Simulation of Color Vision
Deficiency" (2009), severity 1.0, on linear RGB; differences are CIE76, in CIELAB (D65).
"""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from foreprop.tools.report.charts import (
    CARD,
    DARK_CARD,
    DARK_INK,
    INK,
    OTHER,
    STYLES,
    VARIANTS,
    style_of,
)
from foreprop_lab.experiments.chart import lighter, with_gaps

ROOT = Path(__file__).parents[2]
STYLE = ROOT / "src" / "foreprop" / "tools" / "report" / "charts.py"
VIEWERS = {
    "usual": np.eye(3),
    "protan": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "deutan": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
}
_XYZ = np.array(
    [
        [0.4124564, 0.3575761, 0.1804375],
        [0.2126729, 0.7151522, 0.0721750],
        [0.0193339, 0.1191920, 0.9503041],
    ]
)
_WHITE = np.array([0.95047, 1.0, 1.08883])
LEAST_DIFFERENCE = 19.0
"""Of any two systems, and of each and the ink of the limit; about 2.3 can just be seen."""
LEAST_OF_THE_TWO = 60.0
"""Of p3 and ddp, which most charts are about."""
LEAST_CONTRAST = 3.0

Floats = NDArray[np.float64]


def linear(colour: str) -> Floats:
    parts = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def lab(colour: str, viewer: str) -> Floats:
    seen = np.clip(VIEWERS[viewer] @ linear(colour), 0, 1)
    xyz = _XYZ @ seen / _WHITE
    f = np.where(xyz > (6 / 29) ** 3, np.cbrt(xyz), xyz / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def difference(one: str, other: str, viewer: str) -> float:
    return float(np.linalg.norm(lab(one, viewer) - lab(other, viewer)))


def contrast(one: str, other: str) -> float:
    light, dark = sorted((float(_XYZ[1] @ linear(c)) + 0.05 for c in (one, other)), reverse=True)
    return light / dark


def palette(page: str) -> dict[str, str]:
    ink = INK if page == "light" else DARK_INK
    return {name: getattr(style, page) for name, style in STYLES.items()} | {"limit": ink}


def test_the_measure_finds_the_old_colours_too_near() -> None:
    """p3 and ddp as they were, blue and purple: 6 for protan viewers."""
    assert difference("#2458b0", "#7a3e9d", "protan") < 10
    assert difference("#2458b0", "#7a3e9d", "usual") > 25
    assert difference("#ffffff", "#000000", "usual") == pytest.approx(100, abs=0.1)


@pytest.mark.parametrize("page", ["light", "dark"])
@pytest.mark.parametrize("viewer", VIEWERS)
def test_every_viewer_can_distinguish_every_two_systems(viewer: str, page: str) -> None:
    near = {
        (one, other): difference(first, second, viewer)
        for (one, first), (other, second) in itertools.combinations(palette(page).items(), 2)
    }
    assert {pair: d for pair, d in near.items() if d < LEAST_DIFFERENCE} == {}
    assert near["p3", "ddp"] > LEAST_OF_THE_TWO


@pytest.mark.parametrize(("page", "card"), [("light", CARD), ("dark", DARK_CARD)])
def test_every_colour_stands_out_from_its_page(page: str, card: str) -> None:
    for name, colour in palette(page).items():
        assert contrast(colour, card) >= LEAST_CONTRAST, name


def test_p3_is_blue_and_its_variants_are() -> None:
    blue = STYLES["p3"].light
    red, green, strongest = (int(blue[i : i + 2], 16) for i in (1, 3, 5))
    assert strongest > green > red
    for name in ("p3", "p3@200000", "p3-fine", "p3-servers", "p2p p3", "p2p", "ps"):
        assert style_of(name).light == blue, name
    for name in set(STYLES) - {"p3"}:
        assert style_of(name).light != blue


def test_a_systems_variants_have_its_colour_and_differ_in_mark_and_dashes() -> None:
    for name, style in VARIANTS.items():
        (of,) = [system for system, other in STYLES.items() if other.light == style.light]
        if style != STYLES[of]:
            assert (style.marker, style.dashes) != (STYLES[of].marker, STYLES[of].dashes), name
    assert style_of("ddp dense").light == style_of("ddp-tuned").light == STYLES["ddp"].light
    assert style_of("p2p kvstore").light == STYLES["kvstore"].light
    assert style_of("nobody's") == OTHER
    assert len({style.marker for style in STYLES.values()}) == len(STYLES)
    assert lighter(STYLES["p3"], 1.0, "o", "-").light == "#ffffff"


def test_no_chart_has_a_style_of_its_own() -> None:
    """matplotlib's pyplot has its own defaults; `report.charts` makes figures without it."""
    for folder in ("src", "lab/src"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            assert "pyplot" not in text or path == STYLE, path
            assert not re.search(r"color=\"(?!none)", text), path
            if path != STYLE:
                assert "rc_context" not in text
                assert "figure.savefig(written" in text or ".savefig(" not in text, path


@pytest.mark.parametrize("name", ["figure-1-bandwidth", "scale-rates", "simulated-steps"])
def test_the_committed_charts_have_todays_colours(name: str) -> None:
    text = (ROOT / "lab" / "docs" / "results" / f"{name}.svg").read_text()
    for system in ("p3", "ddp"):
        assert STYLES[system].light in text
    assert "emulated link rate" not in text


def test_a_line_has_gaps_where_others_were_measured() -> None:
    xs, ys = with_gaps([(1.0, 5.0), (3.0, 6.0), (4.0, 7.0)], {1.0, 2.0, 3.0})
    assert xs == [1.0, 2.0, 3.0, 4.0]
    assert [y for y in ys if not math.isnan(y)] == [5.0, 6.0, 7.0]
    assert math.isnan(ys[1])
    assert with_gaps([(2.0, 1.0)], [2.0]) == ([2.0], [1.0])
