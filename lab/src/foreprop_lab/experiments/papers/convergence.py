"""Perplexity against time with all-reduce, servers and hybrid: Parallax's Fig. 11.

python -m foreprop_lab.experiments.papers.convergence lab/docs/results

The training is real: `examples/train_language_model.py` on four workers, whose perplexities by step
lab/docs/results/convergence.json has. Exact synchronous training computes the same values whatever
moves the bytes, so a step's time is all in which systems differ; it is the simulator's, of the
same model, whose touched rows are counted in the same text.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from matplotlib.figure import Figure

from foreprop.plan.profile import Profile, ProfiledArray
from foreprop.tools.cli.options import writable
from foreprop.tools.report.charts import save, style_of
from foreprop_lab.experiments.wikitext import wikitext2
from foreprop_lab.simulate.run import simulate_lab
from foreprop_lab.simulate.setting import SimulatedSetting

COURSE = "4 workers, hybrid, 10 each"
"""The key of the course in convergence.json."""
LABELS = {
    "hybrid": "hybrid",
    "tensorflow": "servers (TensorFlow's order)",
    "ddp-sparse": "all-reduce, rows gathered",
    "ring": "all-reduce, all dense",
}
WORKERS = 4
RATE_BITS_PER_S, COMPUTE_S = 1e9, 0.02
_WIDTH, _LENGTH, _TEXTS, _DRAWN = 64, 20, 10, 1024  # as the example's, of each of four workers
_BATCHES = 20


def counted_rows(words: torch.Tensor, types: int) -> tuple[float, float]:
    """The shares of the words' and of the classes' table that a worker's batch touches."""
    size = _TEXTS * (_LENGTH + 1)
    uniform = torch.rand(_BATCHES, _DRAWN, generator=torch.Generator().manual_seed(0))
    drawn = (torch.exp(uniform * torch.tensor(types + 1.0).log()).long() - 1).clamp_(0, types - 1)
    looked_up, classes = [], []
    for number in range(_BATCHES):
        texts = words[number * size : (number + 1) * size].view(_TEXTS, _LENGTH + 1)
        looked_up.append(len(torch.unique(texts[:, :-1])))
        classes.append(len(torch.unique(torch.cat([texts[:, 1:].flatten(), drawn[number]]))))
    return statistics.fmean(looked_up) / types, statistics.fmean(classes) / types


def example_profile(words: torch.Tensor, types: int) -> Profile:
    """The profile of the example's arrays, in forward order."""
    alphas = counted_rows(words, types)
    tables = [
        ProfiledArray(name=f"{name}.weight", shape=(types, _WIDTH), forward_flops=0.0, alpha=alpha)
        for name, alpha in zip(("words", "classes"), alphas, strict=True)
    ]
    gates = 4 * _WIDTH
    lstm = [
        ProfiledArray(name=f"lstm.{name}", shape=(gates, width), forward_flops=float(gates * width))
        for name, width in (("input", _WIDTH), ("recurrent", _WIDTH), ("biases", 2))
    ]
    return Profile(name="language example", arrays=(tables[0], *lstm, tables[1]))


def step_times(profile: Profile, *, rate_bits_per_s: float, compute_s: float) -> dict[str, float]:
    """The simulated time of a step by system."""
    setting = SimulatedSetting(
        profile=profile,
        systems=tuple(LABELS),
        nodes=WORKERS,
        scale=1,
        rate_bits_per_s=rate_bits_per_s,
        compute_s=compute_s,
        rows=True,
        iterations=5,
    )
    return {record.system: record.iteration_s.median for record in simulate_lab(setting)}


def write(courses: Mapping[str, Sequence[tuple[float, float]]], folder: Path) -> None:
    """Write convergence-time.png and .svg."""
    paths = (folder / f"convergence-time.{suffix}" for suffix in ("svg", "png"))
    save(partial(draw, courses), (6, 4), *paths)


def draw(courses: Mapping[str, Sequence[tuple[float, float]]], figure: Figure) -> None:
    axes = figure.subplots()
    for system, points in courses.items():
        times_s, perplexities = zip(*points, strict=True)
        style = style_of(system)
        axes.plot(
            times_s,
            perplexities,
            label=LABELS[system],
            color=style.light,
            marker=style.marker,
            linestyle=style.dashes,
        )
    axes.set(xlabel="s, simulated", ylabel="perplexity of held-out text", xscale="log")
    axes.set(yscale="log")
    axes.legend()


def main(results: str, out: str | None = None) -> dict[str, float]:
    """Write convergence-time.{png,svg,json}; return the times of a step by system."""
    folder = writable(Path(out or results))
    course = json.loads((Path(results) / "convergence.json").read_text())[COURSE]
    words, types = wikitext2()
    profile = example_profile(words, len(types))
    steps_s = step_times(profile, rate_bits_per_s=RATE_BITS_PER_S, compute_s=COMPUTE_S)
    courses = {
        system: [(step * step_s, perplexity) for step, perplexity in course if step]
        for system, step_s in steps_s.items()
    }
    last = course[-1][0]
    for system, step_s in steps_s.items():
        print(
            f"{LABELS[system]}: {1e3 * step_s:.1f} ms a step, {last} steps in"
            f" {last * step_s:.1f} s, {step_s / steps_s['hybrid']:.2f} times hybrid's"
        )
    write(courses, folder)
    (folder / "convergence-time.json").write_text(json.dumps(courses, indent=1) + "\n")
    return steps_s


if __name__ == "__main__":
    main(*sys.argv[1:])
