"""A worker's codecs: gradients are encoded as they leave, and answers decoded as they come.

The native plane does both by itself, of the codecs that it has (`engine.native.CODECS`). Of others
this does.

It stands in front of the engine, which sees every frame as it would be without codecs. A gradient
is encoded in the thread that sends it, when its turn has come: the order is that of the frames, not
of their lengths. An answer is decoded in the thread that received it. It is an average, or it moves
the values that are in the parameter's memory, the *image*: bits by exclusive or, or numbers by a
sum. Where workers may have values of different steps it is the values by themselves.

A parameter's memory is the image only if nobody else writes to it. A checksum is kept of it, and
compared before the next answer. If values are cast for the wire, their image is a copy beside them.
"""

from __future__ import annotations

from collections.abc import Container

import msgspec
import numpy as np
import torch

from foreprop.core.codec import NONE, Place, is_exact
from foreprop.core.frames import SendFrame
from foreprop.core.wire import Flag, Header, Kind
from foreprop.engine.connection import Connection
from foreprop.engine.optimizer import with_scale
from foreprop.engine.tensors import DTYPES
from foreprop.engine.trace import CodecStage, TraceRecorder
from foreprop.engine.worker import WorkerEngine
from foreprop.errors import RemoteProtocolError, TrainingLoopError
from foreprop.features.compression.choosing import (
    SliceCodec,
    answers_differ,
    check_code,
    coded_slices,
    describe,
    note_code,
)
from foreprop.features.compression.codecs import traits_of
from foreprop.features.compression.images import bits_of, move_image, word_sum
from foreprop.features.compression.remoteresiduals import NodeResiduals, ServersResiduals
from foreprop.features.compression.residuals import PlaneResiduals, Residuals, round_of


class PushCodecs:
    """Encodes the gradients of one engine's slices, and decodes their answers for it."""

    kinds = frozenset({Kind.REPLY})

    def __init__(self, engine: WorkerEngine) -> None:
        self._engine = engine
        self._trace: TraceRecorder | None = engine.trace
        self._names = engine.manifest.slice_names()
        self._answers_differ = answers_differ(engine.manifest)
        self._slices = coded_slices(engine.manifest, engine.slices)
        # by slice: whether workers update it, so that answers are averages
        self._averaged: dict[int, bool] = {}
        self._images: dict[int, torch.Tensor] = {}  # of slices that are cast
        self._sums: dict[int, int] = {}  # the checksums of others' images
        parameters = engine.manifest.parameters
        self._cast = {
            number
            for number, coded in self._slices.items()
            if coded.dtype != DTYPES[parameters[coded.piece.parameter].dtype]
        }
        self._scratch: dict[int, memoryview] = {}  # by server, for what arrives
        self._targets: dict[int, memoryview] = {}  # by server, for what it decodes to
        self.residuals: Residuals | NodeResiduals
        if engine.manifest.workers_per_push > 1:  # relays encode; nothing is on the node
            self.residuals = NodeResiduals(engine, self._slices)
        else:
            kept = None
            if (plane := engine.plane) is not None:
                kept = PlaneResiduals(plane, plane.WORKER, self._slices)
                self._averaged = dict.fromkeys(self._slices, True)
            about = (engine.parameters, self._slices)
            some_count = engine.manifest.knobs.counts_some
            self.residuals = Residuals(*about, rank=engine.rank, some_count=some_count, kept=kept)
        # all residuals that checkpoints have; servers keep those of averages
        self.kept = (self.residuals, ServersResiduals(engine, self._slices, self._averaged))
        self._announced_scale = 1.0
        self._raw_pushed_bytes = self._raw_reply_bytes = 0

    @property
    def raw_pushed_bytes(self) -> int:
        """What would have been sent without codecs."""
        plane = self._engine.plane
        return self._raw_pushed_bytes if plane is None else plane.statistics()[7]

    @property
    def raw_reply_bytes(self) -> int:
        """What would have been received without codecs."""
        plane = self._engine.plane
        return self._raw_reply_bytes if plane is None else plane.statistics()[8]

    def describe(self) -> str:
        return describe(self._engine.manifest.knobs.compression)

    def tell_scale(self, step: int, inverse: torch.Tensor) -> None:
        """Announce, before the next push, what the loop's scaler took out of the last averages.

        Servers are told unless they have the optimizer, as they do for the rows of tables.
        """
        scale, manifest = 1.0 / float(inverse), self._engine.manifest
        if scale == self._announced_scale or is_exact(manifest.knobs.compression):
            return
        self._announced_scale = scale
        for _, codec in manifest.knobs.compression:
            if codec != NONE and traits_of(codec).votes:
                raise TrainingLoopError(
                    f"a GradScaler has divided the averages by {scale:g}; votes of signs have no"
                    " scale. Give the scaler to parallelize(..., scaler=scaler, update='servers'),"
                    f" where it is taken out before, or use another codec than {codec}"
                )
        self.residuals.announce(step, scale)
        if (plane := self._engine.plane) is not None:
            plane.tell_scale(plane.WORKER, step, scale)
        if not manifest.optimizer.groups:
            data = msgspec.json.encode(with_scale((), scale))
            self._engine.announce_hyperparameters(step, data)

    # The sending threads.
    def encode(self, push: SendFrame, raw: memoryview) -> memoryview:
        coded, data = self._slices.get(push.slice), raw
        if coded is not None:
            averaged = self._averaged[push.slice] = bool(push.flags & Flag.GRADIENT)
            if averaged or self.residuals.may_not_count(push.flags):
                builds_on = bool(push.flags & Flag.BUILDS_ON)
                self.residuals.follow(push.slice, round_of(push), builds_on=builds_on)
            if len(raw) and not (averaged and coded.average_codec is None):
                data = self._encoded(coded, raw, push)
        with self._engine.lock:
            self._raw_pushed_bytes += len(raw)
        return data

    def _encoded(self, coded: SliceCodec, raw: memoryview, frame: SendFrame) -> memoryview:
        image = None
        if coded.decay:
            # the image stays until this gradient is answered
            image = coded.tensor_of(self._engine.memory.values(frame.slice))
        if isinstance(self.residuals, NodeResiduals):
            return raw if image is None else self.residuals.decayed(frame, raw, image)
        started_ns = 0 if self._trace is None else self._trace.now_ns()
        data = self.residuals.encoded(frame, raw, image)
        if self._trace is not None:
            name = self._names[frame.slice]
            note_code(self._trace, CodecStage.ENCODED, name, frame, started_ns, len(data))
        return data

    # The receiving threads.
    def room(self, peer: Connection, header: Header) -> memoryview:
        coded = self._slices.get(header.slice)
        size_bytes = header.payload_bytes
        is_raw = header.step == 0 or header.flags & Flag.UNCHANGED
        if coded is None or is_raw or size_bytes >= coded.raw_bytes:
            return self._engine.room(peer, header)
        check_code(header, coded)
        whole = header._replace(payload_bytes=coded.raw_bytes)
        self._targets[peer.number] = self._engine.room(peer, whole)
        scratch = self._scratch.get(peer.number)
        if scratch is None or len(scratch) < size_bytes:
            most = max(each.most_reply_bytes for each in self._slices.values())
            scratch = self._scratch[peer.number] = np.empty(most, np.uint8).data
        return scratch[:size_bytes]

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        target = self._targets.pop(peer.number, None)
        raw_bytes = header.payload_bytes
        if header.step and header.flags & Flag.DROPPED:
            self.residuals.give_up(header.slice)
        if target is not None:
            self._decode(self._slices[header.slice], target, payload, header)
            raw_bytes = len(target)
        else:
            self._keep_image(header, payload)
        with self._engine.lock:
            self._raw_reply_bytes += raw_bytes
            if header.slice in self._cast:  # whose memory goes by lengths
                self._engine.counters.reply_bytes -= raw_bytes - header.payload_bytes
        seen = header._replace(payload_bytes=raw_bytes) if header.slice in self._cast else header
        self._engine.on_frame(peer, seen, payload if target is None else target)

    def _decode(
        self, coded: SliceCodec, target: memoryview, payload: memoryview, header: Header
    ) -> None:
        started_ns = 0 if self._trace is None else self._trace.now_ns()
        number, out, codec = header.slice, coded.tensor_of(target), coded.reply_codec
        is_average = self._averaged.get(number, False)
        if is_average:
            codec = coded.average_codec or codec
        if codec is None:
            raise RemoteProtocolError(f"REPLY of slice {number} is encoded; values go as they are")
        if is_average or self._answers_differ:
            codec.decode(payload, out, Place(header.step, number, header.rank))
        else:
            image = self._image_of(coded, out, header)
            change = torch.empty_like(image)
            world_size = self._engine.manifest.world_size
            codec.decode(payload, change, Place(header.step, number, world_size))
            move_image(image, change, exact=codec.exact)
            if image is not out:
                np.copyto(bits_of(out), bits_of(image))
            else:
                self._sums[number] = word_sum(out)
        if self._trace is not None:
            name = self._names[number]
            note_code(self._trace, CodecStage.DECODED, name, header, started_ns, len(payload))

    def _image_of(self, coded: SliceCodec, out: torch.Tensor, header: Header) -> torch.Tensor:
        """The values before this answer; raises `TrainingLoopError` if somebody changed them."""
        number = header.slice
        is_cast = number in self._cast
        known: Container[int] = self._images if is_cast else self._sums
        if number not in known:
            raise RemoteProtocolError(
                f"REPLY of slice {number} is a difference; its values have not come yet"
            )
        if is_cast:
            return self._images[number]
        if word_sum(out) != self._sums[number]:
            name = self._engine.parameters[coded.piece.parameter].name
            raise TrainingLoopError(
                f"{name} was changed before its update of step {header.step} came, in a way of"
                " which PyTorch keeps no trace: through p.data, numpy or C++. Compression adds"
                " differences to what is there: change it under torch.no_grad() with p.mul_(...)"
                " and the like, or leave compression out"
            )
        return out

    def _keep_image(self, header: Header, payload: memoryview) -> None:
        """Note values that came as they are: the next difference is to these."""
        coded = self._slices.get(header.slice)
        averaged = self._averaged.get(header.slice, False)
        if coded is None or header.step == 0 or averaged or self._answers_differ:
            return
        if len(payload) == coded.raw_bytes:
            values = coded.tensor_of(payload)
            if header.slice in self._cast:
                self._images[header.slice] = values.clone()
            else:
                self._sums[header.slice] = word_sum(values)
