"""How a model's parameters are distributed over its arrays: P3's Fig. 5, from the profiles.

python -m foreprop_lab.experiments.figures.distribution lab/docs/results
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from foreprop.plan.profile import load_profile
from foreprop.tools.cli.options import writable
from foreprop.tools.report.charts import STYLES
from foreprop_lab.experiments.chart import Chart, write_chart
from foreprop_lab.experiments.figures.comparison import model_name

NAME = "figure-6-distribution"
MODELS = ("resnet50", "inceptionv3", "vgg19", "sockeye")
_PANEL_IN = (4.2, 2.6)


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    elems: list[int]
    """The elements of each array, in the order of the forward pass."""

    @property
    def largest_share(self) -> float:
        return max(self.elems) / sum(self.elems)


def distributions(models: Sequence[str] = MODELS) -> list[Distribution]:
    return [
        Distribution(
            model=model, elems=[math.prod(array.shape) for array in load_profile(model).arrays]
        )
        for model in models
    ]


def distribution_chart(found: Sequence[Distribution]) -> Chart:
    """A panel per model with a bar per array, from the first one that a step needs."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots(-(-len(found) // 2), 2, squeeze=False).flat
        for ax, each in zip(axes, found, strict=False):
            _draw(ax, each)

    rows = -(-len(found) // 2)
    return Chart(whole=draw, whole_in=(2 * _PANEL_IN[0], rows * _PANEL_IN[1]), parts=[])


def _draw(ax: Axes, each: Distribution) -> None:
    millions = [elems / 1e6 for elems in each.elems]
    ax.bar(range(len(millions)), millions, width=1.0, color=STYLES["p3"].light)
    whole, most = sum(millions), each.largest_share
    ax.set_title(f"{model_name(each.model)}: {whole:.1f} million, {most:.1%} in one array")
    ax.set_xlabel("array, by first use in the forward pass")
    ax.set_ylabel("million elements")


def main(folder: str) -> None:
    """Write the chart as PNG, SVG and JSON."""
    out, found = writable(Path(folder)), distributions()
    data = msgspec.json.encode(found)
    write_chart(out, NAME, distribution_chart(found), data)


if __name__ == "__main__":
    main(*sys.argv[1:])
