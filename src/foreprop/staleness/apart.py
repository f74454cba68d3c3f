"""What a server of workers apart is made of, in the place of the usual parts."""

from __future__ import annotations

from collections.abc import Sequence

from foreprop.core.frames import SendFrame
from foreprop.core.manifest import Manifest
from foreprop.core.sendqueue import turns_of
from foreprop.core.server_machine import ServerMachine
from foreprop.core.slicing import Slice
from foreprop.core.staleness import rule_of
from foreprop.core.wire import Flag, Kind
from foreprop.link.connection import EMPTY
from foreprop.path.slicestore import SliceStore
from foreprop.path.versions import Versions


class Apart:
    """The machine and store of one server."""

    def __init__(self, manifest: Manifest, slices: Sequence[Slice], index: int) -> None:
        knobs, workers = manifest.knobs, manifest.world_size
        self.machine = ServerMachine(
            slices,
            index=index,
            workers=workers,
            order=knobs.order,
            names=[info.name for info in manifest.parameters],
            turns=turns_of(knobs.lanes, index, workers),
            closing=rule_of(knobs.staleness),
        )
        self.store = SliceStore(manifest, slices, index, versions=Versions(manifest))

    def payload_of(self, frame: SendFrame) -> memoryview:
        """Of a frame to a worker, which is about to be sent."""
        if frame.kind == Kind.REPLY and not frame.flags & Flag.UNCHANGED:
            return self.store.read(frame.slice, (frame.peer,))[1]
        return EMPTY
