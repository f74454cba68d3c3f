"""Draws perplexities by step, as examples/train_language_model.py leaves them with --out.

python benchmarks/convergence.py convergence "1 process"=one.json "2 workers, hybrid"=two.json
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot


def main(name: str, *runs: str) -> None:
    """Writes NAME.svg, NAME.png and NAME.json."""
    curves = {
        run.partition("=")[0]: json.loads(Path(run.partition("=")[2]).read_text()) for run in runs
    }
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for number, (label, points) in enumerate(curves.items()):
        steps, perplexities = zip(*points, strict=True)
        # later ones lie on earlier ones: thinner, and with other marks
        axes.plot(steps, perplexities, marker="osv^"[number % 4], label=label,
                  linewidth=6 / (number + 1), markersize=10 / (number + 1))  # fmt: skip
    axes.set(xlabel="step", ylabel="perplexity of held-out text", yscale="log")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    for suffix in ("svg", "png"):
        figure.savefig(f"{name}.{suffix}", dpi=150)
    Path(f"{name}.json").write_text(json.dumps(curves, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
