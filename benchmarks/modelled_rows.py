"""The refined model of tables beside what `foreprop lab language` measured (docs/performance.md).

python -m benchmarks.modelled_rows
"""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from experiments.language.training import LanguageSetting, Text, lstm_profile
from foreprop.config import Config
from foreprop.model.deployment import Deployment, ModelledArchitecture, Table
from foreprop.model.refined import predict
from foreprop.workload.profile import Layer
from foreprop.workload.setting import BUCKET_BYTES

_WIDTH = 512
_BATCHES = 3
"""Of each worker, for the share of rows that one touches."""


class Measured(NamedTuple):
    """A system's median step, and the bytes that left node 0 in a step."""

    hidden: int
    rate_mbit: float
    compute_s: float
    system: str
    step_s: float
    sent_mb: float


MEASURED = (
    Measured(512, 20, 0.5, "hybrid", 1.233, 2.4),
    Measured(512, 20, 0.5, "p2p", 1.197, 2.3),
    Measured(512, 20, 0.5, "ddp-sparse", 3.006, 6.1),
    Measured(1024, 40, 0.75, "hybrid", 1.402, 3.5),
    Measured(1024, 40, 0.75, "p2p", 1.347, 3.4),
    Measured(1024, 40, 0.75, "ddp-sparse", 1.895, 7.2),
    Measured(1024, 40, 0.75, "ring", 7.901, 37.7),
    Measured(1024, 40, 0.75, "ddp-dense", 8.034, 38.8),
)
ARCHITECTURES: dict[str, ModelledArchitecture] = {
    "hybrid": "hybrid",
    "p2p": "p2p",
    "ring": "ring",
    "ddp-sparse": "ddp",
    "ddp-dense": "ddp",
}


def main(
    measured: Sequence[Measured] = MEASURED, nodes: int = 8, text: Path | None = None
) -> list[tuple[str, float, float]]:
    """Prints measured and modelled figures; returns systems, and modelled steps and megabytes."""
    modelled = []
    for record in measured:
        predicted = predict(deployment_of(record, nodes, text))
        sent_mb = predicted.wire_s * record.rate_mbit / 8
        modelled.append((record.system, predicted.step_s, sent_mb))
        print(
            f"{record.system:10} {record.rate_mbit:g} Mbit/s: {record.step_s:.3f} s measured,"
            f" {predicted.step_s:.3f} s modelled ({predicted.step_s / record.step_s - 1:+.0%});"
            f" {record.sent_mb:.1f} MB measured, {sent_mb:.1f} MB modelled"
        )
    return modelled


def deployment_of(record: Measured, nodes: int, text: Path | None) -> Deployment:
    setting = LanguageSetting(
        profile=lstm_profile(_WIDTH, record.hidden),
        systems=(record.system,),
        nodes=nodes,
        compute_s=record.compute_s,
        rate_bits_per_s=record.rate_mbit * 1e6,
        width=_WIDTH,
        hidden=record.hidden,
        text=text,
    )
    usual = Config()
    table = Layer(name="table", sizes_elems=(), forward_s=0.0, backward_s=0.0)
    layers = [table, *setting.layers, table]
    return Deployment(
        layers=layers,
        architecture=ARCHITECTURES[record.system],
        nodes=nodes,
        rate_bits_per_s=setting.rate,
        tables=tables_of(setting, last_layer=len(layers) - 1),
        dense_gradients=record.system == "ddp-dense",
        slice_elems=setting.slice_elems_of(record.system),
        chunk_elems=setting.scaled(usual.chunk_elems),
        bucket_bytes=setting.scaled(BUCKET_BYTES),
    )


def tables_of(setting: LanguageSetting, *, last_layer: int) -> list[Table]:
    """The words' and the softmax's, with the shares of rows that the lab's batches touch."""
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
    main()
