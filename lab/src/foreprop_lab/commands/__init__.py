"""The lab's commands, which `foreprop.tools.cli.registry` finds by their entry point."""

from foreprop.tools.cli.registry import LAB_SUMMARIES, MEASURE, table

_SUMMARIES = {
    **LAB_SUMMARIES,
    MEASURE: """
    lab run: Measure several systems in one cluster, their steps interleaved; write results.json.
    lab simulate: Predict what `run` would measure, without a cluster; write results.json.
    lab layers: Measure real layers, eager and compiled, in one cluster; write results.json.
    lab mlp: Train a perceptron on Fashion-MNIST, 1 to 7 workers; write results.json and figures.
    lab language: Train a language model on WikiText-2's 76,616 types, sparse and dense;
        write its records.
    lab accuracy: Train a small model with real gradients on real data, many times, and compare
        scores.
    lab faults: Train through a slow link, a stop, a cut, a kill and a rejoin; draw
        throughput over time.
    lab figures: Run what the paper's figures need and draw them, each with its data, and a
        page of all."""
    + LAB_SUMMARIES[MEASURE],
}
_SOURCES = {
    "demo": "foreprop_lab.commands.demo:demo",
    "lab run": "foreprop_lab.commands.lab:run",
    "lab simulate": "foreprop_lab.commands.simulate:simulate",
    "bench": "foreprop_lab.benchmarks.command:bench",
}


def _source(name: str) -> str:
    last = name.rpartition(" ")[2]
    return _SOURCES.get(name, f"foreprop_lab.experiments.{last}.command:{last}")


COMMANDS = tuple(table(_SUMMARIES, _source))
