"""What each of Parallax's techniques is worth: its Table 4 in our terms (section 7.4)."""

from __future__ import annotations

from dataclasses import dataclass

from foreprop.config import Architecture, LocalAggregation
from foreprop.core.manifest import WireDtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Ablated:
    """A row of Parallax's Table 4, with clipping by the global norm of aggregated gradients."""

    architecture: Architecture
    local_aggregation: LocalAggregation = "off"
    clips_on_servers: bool = False
    """Whether servers clip; else workers do, and fetch all rows of the aggregated gradients."""
    wire_dtype: WireDtype | None = None


ABLATION = {
    "all-ps": Ablated(architecture="p2p"),
    "+hybrid": Ablated(architecture="hybrid"),
    "+local-aggregation": Ablated(architecture="hybrid", local_aggregation="auto"),
    "+clip-on-servers": Ablated(
        architecture="hybrid", local_aggregation="auto", clips_on_servers=True
    ),
    "+casts": Ablated(
        architecture="hybrid",
        local_aggregation="auto",
        clips_on_servers=True,
        wire_dtype="bfloat16",
    ),
}
"""The rows: each one also has what those before it have (Kim et al., Parallax, section 7.4)."""
