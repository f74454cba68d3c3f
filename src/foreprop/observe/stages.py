"""The stations on a slice's way from gradient to parameter; docs/path.md tells the story.

Traces, counters and the stall report use these names and no others.
"""

from __future__ import annotations

from enum import Enum


class Stage(Enum):
    GRADIENT_READY = "gradient_ready"
    PUSH_QUEUED = "push_queued"
    PUSH_SENT = "push_sent"
    PUSH_RECEIVED = "push_received"
    UPDATED = "updated"
    REPLY_QUEUED = "reply_queued"
    REPLY_SENT = "reply_sent"
    REPLY_RECEIVED = "reply_received"
    PARAMETER_READY = "parameter_ready"


class RelayStage(Enum):
    """What a relay does between a push's arrival and its departure for the server."""

    NODE_SUMMED = "node_summed"


class RingStage(Enum):
    """What there is instead of pushes and replies where gradients are all-reduced."""

    CHUNK_REDUCED = "chunk_reduced"
