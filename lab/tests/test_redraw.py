"""The charts of lab/docs/results drawn anew: rates are the undivided model's, also on the page."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
from markupsafe import Markup

from foreprop_lab.experiments.figures.pictures import Part
from foreprop_lab.experiments.figures.redraw import THROUGHPUT, with_charts, with_undivided_rates
from foreprop_lab.setting.records import Record

RESULTS = Path(__file__).parents[1] / "docs" / "results"
WORDS = (
    "<td>resnet50, 4 nodes, 77 Mbit/s, slices of 1,000</td>"
    "<td>resnet50, 16 nodes, 77 Mbit/s</td>"
    "<td>76.7\N{NO-BREAK SPACE}Mbit/s</td><td>1,047\N{NO-BREAK SPACE}ms</td>"
    "<p>divided by 16: a link of 76.7 Mbit/s here stands for 1.2 Gbit/s with the whole model and"
    " the same compute.</p>"
)


def records() -> list[Record]:
    return msgspec.json.decode((RESULTS / "results.json").read_bytes(), type=list[Record])


def test_rates_in_words_become_the_undivided_models() -> None:
    """Those of the settings that were measured: there is none of ResNet-50 on 16 such nodes."""
    shown = with_undivided_rates(WORDS, records())
    assert shown == (
        "<td>resnet50, 4 nodes, 1.23 Gbit/s, slices of 1,000</td>"
        "<td>resnet50, 16 nodes, 77 Mbit/s</td>"
        "<td>1.23 Gbit/s</td><td>1,047\N{NO-BREAK SPACE}ms</td>"
        "<p>divided by 16, and so are the links: one of 1.2 Gbit/s with the whole model and the"
        " same compute has 76.7 Mbit/s here. Rates are those with the whole model.</p>"
    )
    assert with_undivided_rates(shown, records()) == shown


def test_charts_take_the_places_of_the_older_ones() -> None:
    old = (
        '<div class="charts"><div class="chart"><svg>{}</svg></div></div><p class="caption">{}</p>'
    )
    page = old.format("a", 1) + "<p>between</p>" + old.format("b", 2)
    made = with_charts(page, [[Part("one & two", "0 0 3 4", Markup("<g/>"))], []])
    assert made == (
        '<div class="charts"><div class="chart"><svg viewBox="0 0 3 4" role="img"'
        ' aria-label="one &amp; two"><g/></svg></div></div><p class="caption">1</p>'
        '<p>between</p><div class="charts"></div><p class="caption">2</p>'
    )


def test_committed_results_have_no_rate_of_the_divided_model_but_where_they_say_so() -> None:
    page = (RESULTS / "index.html").read_text()
    emulated = re.findall(r"has [\d.]+ Mbit/s here\.", page)
    assert len(emulated) == page.count("Mbit/s") == 5  # in a caption of each figure
    for name in THROUGHPUT:
        for text in ((RESULTS / f"{name}.json").read_text(), (RESULTS / f"{name}.svg").read_text()):
            assert "Mbit/s" not in text, name
