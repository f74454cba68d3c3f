"""The refined model and the simulator, with tables, beside what `foreprop lab language` measured.

The measured figures are those of lab/docs/results/language.json, its records by the LSTM's units.

python -m foreprop_lab.benchmarks.modelled_rows
"""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from foreprop.config import Config
from foreprop.plan.deployment import BUCKET_BYTES, Deployment, ModelledArchitecture, Table
from foreprop.plan.profile import Layer, Profile, ProfiledArray
from foreprop.plan.refined import predict
from foreprop_lab.experiments.language.records import LanguageRecord
from foreprop_lab.experiments.language.training import LanguageSetting, Text, lstm_profile
from foreprop_lab.simulate.run import simulate_lab
from foreprop_lab.simulate.setting import SimulatedSetting

_WIDTH = 512
_BATCHES = 3
"""How many batches of each worker show the share of rows that one touches."""


class Measured(NamedTuple):
    """A system's median step, and the bytes that left node 0 in a step."""

    hidden: int
    rate_mbit: float
    compute_s: float
    system: str
    step_s: float
    sent_mb: float
    nodes: int


ARCHITECTURES: dict[str, ModelledArchitecture] = {
    "hybrid": "hybrid",
    "p2p": "p2p",
    "ring": "ring",
    "ddp-sparse": "ddp",
    "ddp-dense": "ddp",
}


RECORDS = Path(__file__).parents[3] / "docs" / "results" / "language.json"
SIMULATED = {"p2p": "p3", "ddp-dense": "ddp"}
"""The simulator's names of systems; those that are not here have the same name there."""
_ITERATIONS = 4


class Compared(NamedTuple):
    system: str
    modelled_s: float
    sent_mb: float
    """The modelled megabytes that leave node 0."""
    simulated_s: float


def measured_in(path: Path) -> list[Measured]:
    """The measurements of the systems that the model knows."""
    runs = msgspec.json.decode(path.read_bytes(), type=dict[int, list[LanguageRecord]])
    return [
        Measured(
            hidden=hidden,
            rate_mbit=entry.record.rate_bits_per_s / 1e6,
            compute_s=entry.record.compute_s,
            system=entry.record.system,
            step_s=entry.record.iteration_s.median,
            sent_mb=entry.sent_bytes / 1e6,
            nodes=entry.record.nodes,
        )
        for hidden, entries in runs.items()
        for entry in entries
        if entry.record.system in ARCHITECTURES
    ]


def main(measured: Sequence[Measured], text: Path | None = None) -> list[Compared]:
    """Print measured, modelled and simulated figures; returns the last two."""
    compared = []
    for record in measured:
        predicted = predict(deployment_of(record, text))
        sent_mb = predicted.wire_s * record.rate_mbit / 8
        (simulated,) = simulate_lab(simulated_setting(record, text))
        simulated_s = simulated.iteration_s.median
        compared.append(Compared(record.system, predicted.step_s, sent_mb, simulated_s))
        print(
            f"{record.system:10} {record.nodes} nodes, {record.rate_mbit:g} Mbit/s:"
            f" {record.step_s:.3f} s measured,"
            f" {predicted.step_s:.3f} s modelled ({predicted.step_s / record.step_s - 1:+.0%}),"
            f" {simulated_s:.3f} s simulated ({simulated_s / record.step_s - 1:+.0%});"
            f" {record.sent_mb:.1f} MB measured, {sent_mb:.1f} MB modelled",
            flush=True,
        )
    return compared


def simulated_setting(record: Measured, text: Path | None) -> SimulatedSetting:
    """The setting for the simulator, in which a table's look-up takes no time of the device."""
    setting = setting_of(record, text)
    tables = [
        ProfiledArray(
            name=name,
            shape=(table.elems // table.row_elems, setting.width),
            forward_s=0.0,
            backward_s=0.0,
            alpha=table.alpha,
        )
        for name, table in zip(("words", "softmax"), tables_of(setting, last_layer=1), strict=True)
    ]
    timed = []
    for layer, arrays in zip(setting.layers, setting.profile.arrays_by_layer(), strict=True):
        for array in arrays:  # in a layer's backward pass the last one's gradient comes first
            last = array is arrays[-1]
            seconds = (layer.forward_s, layer.backward_s) if last else (0.0, 0.0)
            about = dict(zip(("forward_s", "backward_s"), seconds, strict=True))
            timed.append(msgspec.structs.replace(array, forward_flops=None, **about))
    return SimulatedSetting(
        profile=Profile(name="lstm-lm", arrays=(tables[0], *timed, tables[1])),
        systems=(SIMULATED.get(record.system, record.system),),
        nodes=record.nodes,
        compute_s=record.compute_s,
        rate_bits_per_s=setting.rate,
        scale=setting.scale,
        iterations=_ITERATIONS,
        rows=True,
    )


def setting_of(record: Measured, text: Path | None) -> LanguageSetting:
    return LanguageSetting(
        profile=lstm_profile(_WIDTH, record.hidden),
        systems=(record.system,),
        nodes=record.nodes,
        compute_s=record.compute_s,
        rate_bits_per_s=record.rate_mbit * 1e6,
        width=_WIDTH,
        hidden=record.hidden,
        text=text,
    )


def deployment_of(record: Measured, text: Path | None) -> Deployment:
    setting, usual = setting_of(record, text), Config()
    table = Layer(name="table", sizes_elems=(), forward_s=0.0, backward_s=0.0)
    layers = [table, *setting.layers, table]
    return Deployment(
        layers=layers,
        architecture=ARCHITECTURES[record.system],
        nodes=record.nodes,
        rate_bits_per_s=setting.rate,
        tables=tables_of(setting, last_layer=len(layers) - 1),
        dense_gradients=record.system == "ddp-dense",
        slice_elems=setting.slice_elems_of(record.system),
        chunk_elems=setting.scaled(usual.chunk_elems),
        bucket_bytes=setting.scaled(BUCKET_BYTES),
    )


def tables_of(setting: LanguageSetting, *, last_layer: int) -> list[Table]:
    """The words' and the softmax's tables, with the shares of rows that the lab's batches touch."""
    texts = [Text(setting, rank) for rank in range(setting.workers)]
    shares: tuple[list[float], list[float]] = ([], [])
    for text in texts:
        for _, rows in zip(range(_BATCHES), text.batches(), strict=False):
            for of_table, numbers in zip(shares, rows, strict=True):
                of_table.append(len(torch.unique(numbers)) / text.types)
    elems = texts[0].types * setting.row_elems
    return [
        Table(layer, elems, setting.row_elems, statistics.fmean(of_table))
        for layer, of_table in zip((0, last_layer), shares, strict=True)
    ]


if __name__ == "__main__":
    main(measured_in(RECORDS))
