"""Perplexities by step, drawn as examples/train_language_model.py leaves them with --out.

python -m foreprop_lab.benchmarks.convergence convergence "1 process"=one.json \\
    "2 workers, hybrid"=two.json
"""

import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure

from foreprop.tools.cli.options import writable
from foreprop.tools.report.charts import save
from foreprop.tools.report.document import LIGHT_RAMP, ramp_colour


def main(name: str, *runs: str) -> None:
    """Write NAME.svg, NAME.png and NAME.json."""
    writable(Path(name).parent)
    curves = {
        run.partition("=")[0]: json.loads(Path(run.partition("=")[2]).read_text()) for run in runs
    }
    write(curves, name)
    Path(f"{name}.json").write_text(json.dumps(curves, indent=1) + "\n")


def write(curves: Mapping[str, Sequence[tuple[float, float]]], name: str) -> None:
    paths = [Path(f"{name}.{suffix}") for suffix in ("svg", "png")]
    save(partial(draw, curves), (7, 4), *paths)


def draw(curves: Mapping[str, Sequence[tuple[float, float]]], figure: Figure) -> None:
    axes = figure.subplots()
    last = max(len(curves) - 1, 1)
    for number, (label, points) in enumerate(curves.items()):
        steps, perplexities = zip(*points, strict=True)
        # later ones lie on earlier ones: thinner, and with other marks
        axes.plot(
            steps,
            perplexities,
            color=ramp_colour(LIGHT_RAMP, number / last),  # no system's
            marker="osv^"[number % 4],
            label=label,
            linewidth=6 / (number + 1),
            markersize=10 / (number + 1),
        )
    axes.set(xlabel="step", ylabel="perplexity of held-out text", yscale="log")
    axes.legend()


if __name__ == "__main__":
    main(*sys.argv[1:])
