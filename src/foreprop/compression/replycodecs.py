"""A server's codecs: pushes are decoded as they come, and answers encoded once for all workers.

It stands in front of `path.slices.Slices`, which sees every frame as it would be without it. An
answer is the average of gradients, or, where servers update, the difference between the slice's new
values and its *image*, the values that all workers have. Whichever sending thread comes first
encodes it; it is dropped when every worker has it.

Values go as they are where workers' are not known to be the image: at the start, and in the step
after a change by hand. A worker sees that by their length (`choosing.SliceCodec`).
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np
import torch

from foreprop.compression.choosing import SliceCodec, check_code
from foreprop.compression.images import CodedSlices, bits_of, move_image
from foreprop.core.codec import Place
from foreprop.core.frames import SendFrame
from foreprop.core.manifest import Manifest
from foreprop.core.shards import slice_names
from foreprop.core.wire import Flag, Header, Kind
from foreprop.errors import InternalError
from foreprop.link.connection import EMPTY, Connection
from foreprop.observe.trace import CodecStage
from foreprop.path.executor import Executor
from foreprop.path.slices import Slices
from foreprop.path.slicestore import SliceStore

if TYPE_CHECKING:
    from foreprop.observe.trace import TraceRecorder


class _Answer:
    """What one slice answers, and what workers are known to have."""

    __slots__ = ("coded", "data", "image", "is_average", "is_image_known", "left", "lock", "step")

    def __init__(self, coded: SliceCodec) -> None:
        self.coded = coded
        self.lock = threading.Lock()
        self.image: torch.Tensor | None = None
        self.is_image_known = False
        self.is_average = False  # workers update
        self.data = EMPTY  # the code that is being sent,
        self.step = 0  # of this step,
        self.left = 0  # and how many workers have still to get it


class ReplyCodecs:
    """Owns the frames of slices in the place of ``slices``, and hands them on."""

    def __init__(
        self,
        manifest: Manifest,
        slices: Slices,
        executor: Executor,
        store: SliceStore,
        codes: CodedSlices,
    ) -> None:
        self.kinds = slices.kinds
        self._inner = slices
        self._store = store
        self._workers = executor.peers.count
        self._server = executor.host.index
        self._trace: TraceRecorder | None = executor.host.trace
        self._names = slice_names(manifest)
        self._coded, self._averages = codes.coded, codes.averages
        self._answers: dict[int, _Answer] = {}
        self._scratch: dict[int, memoryview] = {}  # by peer, for what arrives
        self._targets: dict[int, memoryview] = {}  # by peer, where that belongs, decoded

    def _answer_of(self, number: int) -> _Answer | None:
        answer, coded = self._answers.get(number), self._coded.get(number)
        if answer is None and coded is not None:
            answer = self._answers.setdefault(number, _Answer(coded))
        return answer

    # The receiving threads.
    def room(self, peer: Connection, header: Header) -> memoryview:
        answer = self._answer_of(header.slice) if header.kind == Kind.PUSH else None
        size_bytes = header.payload_bytes
        if answer is None or header.flags & Flag.NO_GRADIENT:
            return self._inner.room(peer, header)
        coded = answer.coded
        if size_bytes >= coded.raw_bytes:
            return self._inner.room(peer, header)
        check_code(header, coded)
        whole = header._replace(payload_bytes=coded.raw_bytes)
        self._targets[peer.number] = self._inner.room(peer, whole)
        scratch = self._scratch.get(peer.number, EMPTY)
        if len(scratch) < size_bytes:
            most = max(each.most_bytes for each in self._coded.values())
            scratch = self._scratch[peer.number] = np.empty(most, np.uint8).data
        return scratch[:size_bytes]

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        answer = self._answer_of(header.slice) if header.kind == Kind.PUSH else None
        if answer is not None:
            # who pushes has the last answer: what is noted here is about the next one
            answer.is_average = bool(header.flags & Flag.GRADIENT)
            if answer.is_average:
                self._averages.note(header)
            if header.flags & (Flag.VALUE_CHANGED | Flag.EXPOSED):
                answer.is_image_known = False
            target = self._targets.pop(peer.number, None)
            if target is not None:
                self._decode(answer.coded, target, payload, header)
                payload = target
        self._inner.on_frame(peer, header, payload)

    def _decode(
        self, coded: SliceCodec, target: memoryview, payload: memoryview, header: Header
    ) -> None:
        started_ns = 0 if self._trace is None else self._trace.now_ns()
        place = Place(header.step, header.slice, header.rank)
        coded.codec.decode(payload, coded.tensor_of(target), place)
        if self._trace is not None:
            name, stage = self._names[header.slice], CodecStage.DECODED
            self._trace.slice_span(stage, name, header, started_ns)

    # The sending threads.
    def encode(self, frame: SendFrame, raw: memoryview) -> memoryview:
        """Of a reply the code of its average, or of the difference to what workers have."""
        answer = self._answer_of(frame.slice)
        if answer is None or frame.step == 0 or not len(raw):
            return raw
        with answer.lock:
            if not answer.left:
                answer.data = self._begin(answer, raw, frame)
                answer.step, answer.left = frame.step, self._workers
            elif answer.step != frame.step:
                raise InternalError(
                    f"slice {frame.slice} is answered for step {frame.step}, but {answer.left}"
                    f" workers have not got its answer for step {answer.step}"
                )
            data = answer.data
            answer.left -= 1
            if not answer.left:
                answer.data = EMPTY
        return data

    def _begin(self, answer: _Answer, raw: memoryview, frame: SendFrame) -> memoryview:
        """The first worker is about to be answered: what all of them get."""
        coded = answer.coded
        if len(raw) != coded.raw_bytes:  # in full: there has been no update that would be cast
            answer.is_image_known = False
            return raw
        started_ns = 0 if self._trace is None else self._trace.now_ns()
        data: memoryview | None
        if answer.is_average:
            data = self._averages.code(frame.slice, raw)
        else:
            place = Place(frame.step, frame.slice, self._workers)
            data = self._difference(answer, coded.tensor_of(raw), place)
        if self._trace is not None:
            about = {"step": frame.step, "slice_": frame.slice, "priority": frame.priority}
            name, size_bytes = self._names[frame.slice], len(raw if data is None else data)
            stage = CodecStage.ENCODED.value
            self._trace.span(stage, name, started_ns, size_bytes=size_bytes, **about)
        return raw if data is None or len(data) >= len(raw) else data

    def _difference(self, answer: _Answer, values: torch.Tensor, place: Place) -> memoryview | None:
        """Encode it, and move the image; None if the values are to go as they are."""
        codec, image = answer.coded.reply_codec, self._image_of(answer)
        if not answer.is_image_known:
            np.copyto(bits_of(image), bits_of(values))
            answer.is_image_known = True
            return None
        if codec.exact:
            change = torch.empty_like(image)
            np.bitwise_xor(bits_of(values), bits_of(image), out=bits_of(change))
            np.copyto(bits_of(image), bits_of(values))
            return codec.encode(change, {}, place)
        change = torch.from_numpy(values.numpy() - image.numpy())
        if not np.isfinite(change.numpy()).all():
            np.copyto(bits_of(image), bits_of(values))
            return None
        data = codec.encode(change, {}, place)
        if len(data) >= answer.coded.raw_bytes:  # values as they are say more
            np.copyto(bits_of(image), bits_of(values))
            return None
        codec.decode(data, change, place)
        move_image(image, change, exact=False)
        return data

    def _image_of(self, answer: _Answer) -> torch.Tensor:
        if answer.image is None:
            number, coded = answer.coded.piece.number, answer.coded
            if coded.reply_codec.exact:
                answer.image = torch.empty(coded.elems, dtype=coded.dtype)
            else:
                answer.image = self._store.image_of(number)
        return answer.image
