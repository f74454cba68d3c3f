"""What slices and shards are called, and their stages in traces."""

from __future__ import annotations

from collections.abc import Sequence

from foreprop.core.manifest import Manifest
from foreprop.core.wire import Header
from foreprop.observe.stages import RelayStage, Stage
from foreprop.observe.trace import TraceRecorder


def names_of(manifest: Manifest) -> list[str]:
    """The parameters', by number of the slice or shard."""
    slices = manifest.slices()
    of_slices = [piece.parameter for piece in slices]
    of_shards = [shard.parameter for shard in manifest.shards(len(slices))]
    return [manifest.parameters[number].name for number in of_slices + of_shards]


def span(
    trace: TraceRecorder,
    stage: Stage | RelayStage,
    names: Sequence[str],
    about: Header,
    started_ns: int,
    *,
    stop_ns: int | None = None,
) -> None:
    """A stage of a slice, for the trace."""
    trace.span(
        stage.value,
        names[about.slice],
        started_ns,
        stop_ns=stop_ns,
        step=about.step,
        size_bytes=about.payload_bytes,
        slice_=about.slice,
        priority=about.priority,
    )
