"""What a language model's run yields: the lab's records, with the bytes of a step."""

from __future__ import annotations

import msgspec

from experiments.language.ablation import ABLATION
from foreprop.lab.run import LabResult
from foreprop.workload.records import Record


class LanguageRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One system's record. Its limit knows the dense arrays only."""

    record: Record
    sent_bytes: float
    """Of node 0's link in a step, with all headers."""
    received_bytes: float


def with_bytes(result: LabResult, *, sampled_steps: int) -> list[LanguageRecord]:
    """``sampled_steps``: the steps during which node 0's interface was read."""
    entries = []
    for record in result.records:
        samples = result.samples.get(record.system) or [(0.0, 0, 0)]
        _, sent, received = samples[-1]
        if record.system in ABLATION:
            aggregation = ABLATION[record.system].local_aggregation
            record = msgspec.structs.replace(record, local_aggregation=aggregation)
        # its systems are told everything
        record = msgspec.structs.replace(record, environment=msgspec.UNSET)
        entry = LanguageRecord(
            record=record,
            sent_bytes=sent / sampled_steps,
            received_bytes=received / sampled_steps,
        )
        entries.append(entry)
    return entries
