"""The records of a language model's run: the lab's, with the bytes of a step."""

from __future__ import annotations

import msgspec

from foreprop_lab.experiments.language.ablation import ABLATION
from foreprop_lab.lab.run import LabResult
from foreprop_lab.setting.records import Record


class LanguageRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One system's record. Its limit counts the dense arrays only."""

    record: Record
    sent_bytes: float
    """The bytes that node 0's link sends in a step, with all headers."""
    received_bytes: float


def with_bytes(result: LabResult, *, sampled_steps: int) -> list[LanguageRecord]:
    """The records with their bytes; node 0's interface was read during ``sampled_steps`` steps."""
    entries = []
    for record in result.records:
        samples = result.samples.get(record.system) or [(0.0, 0, 0)]
        _, sent, received = samples[-1]
        if record.system in ABLATION:
            aggregation = ABLATION[record.system].local_aggregation
            record = msgspec.structs.replace(record, local_aggregation=aggregation)
        # its systems get all options
        record = msgspec.structs.replace(record, environment=msgspec.UNSET)
        entry = LanguageRecord(
            record=record,
            sent_bytes=sent / sampled_steps,
            received_bytes=received / sampled_steps,
        )
        entries.append(entry)
    return entries
