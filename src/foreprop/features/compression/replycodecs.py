"""A server's codecs: pushes are decoded as they come, and answers encoded once for all workers.

It stands in front of `engine.slices.Slices`, which sees every frame as it would be without codecs.
An answer is the average of gradients, or, where servers update, the difference between the slice's
new values and its *image*, the values that all workers have. Whichever sending thread comes first
encodes it for all; the code is dropped when every worker has it.

Values go as they are where workers' are not known to be the image: at the start, and in the step
after a change by hand. A worker sees that by their length (`choosing.SliceCodec`). Where workers
may have values of different steps there is no image: see `images.CodedSlices.by_itself`.
"""

from __future__ import annotations

import threading

import numpy as np
import torch

from foreprop.core.codec import Place
from foreprop.core.frames import SendFrame
from foreprop.core.manifest import Manifest
from foreprop.core.wire import Flag, Header, Kind
from foreprop.engine.connection import EMPTY, Connection
from foreprop.engine.executor import Executor
from foreprop.engine.slices import Slices
from foreprop.engine.slicestore import SliceStore
from foreprop.engine.trace import CodecStage, TraceRecorder
from foreprop.errors import InternalError
from foreprop.features.compression.choosing import SliceCodec, check_code, note_code
from foreprop.features.compression.codecs import TensorCodec
from foreprop.features.compression.images import CodedSlices, bits_of, move_image


class _Answer:
    """One slice's answer, and the image that workers are known to have."""

    __slots__ = ("coded", "data", "image", "is_average", "is_image_known", "left", "lock", "step")

    def __init__(self, coded: SliceCodec) -> None:
        self.coded = coded
        self.lock = threading.Lock()
        self.image: torch.Tensor | None = None
        self.is_image_known = False
        self.is_average = False  # for workers update
        # the code that is being sent, its step, and how many workers have still to get it
        self.data = EMPTY
        self.step = 0
        self.left = 0


class ReplyCodecs:
    """Decodes pushes for ``slices``, and encodes its answers."""

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
        self._names = manifest.slice_names()
        self._codes, self._coded, self._averages = codes, codes.coded, codes.averages
        self._answers: dict[int, _Answer] = {}
        self._scratch: dict[int, memoryview] = {}  # by peer, for what arrives
        self._targets: dict[int, memoryview] = {}  # by peer, for what it decodes to

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
            # a worker that pushes has the last answer: what is noted here is about the next one
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
        """The code of an average, or of the difference to the image, or the values as they are."""
        answer = self._answer_of(frame.slice)
        if answer is None or frame.step == 0 or not len(raw):
            return raw
        if self._codes.answers_differ:
            started_ns = 0 if self._trace is None else self._trace.now_ns()
            data = self._codes.by_itself(frame.slice, raw, frame.step)
            if data is not raw:
                self._note_encoded(frame, started_ns, len(data))
            return data
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
        """The payload that all workers get, made when the first of them is about to be answered."""
        coded = answer.coded
        if len(raw) != coded.raw_bytes:  # in full: there has been no update that would be cast
            answer.is_image_known = False
            return raw
        started_ns = 0 if self._trace is None else self._trace.now_ns()
        data: memoryview | None = None
        if answer.is_average:
            data = self._averages.code(frame.slice, raw)
        elif coded.reply_codec is not None:
            place = Place(frame.step, frame.slice, self._workers)
            data = self._difference(answer, coded.reply_codec, coded.tensor_of(raw), place)
        self._note_encoded(frame, started_ns, len(raw if data is None else data))
        return raw if data is None or len(data) >= len(raw) else data

    def _note_encoded(self, frame: SendFrame, started_ns: int, size_bytes: int) -> None:
        if self._trace is not None:
            about = (self._names[frame.slice], frame, started_ns, size_bytes)
            note_code(self._trace, CodecStage.ENCODED, *about)

    def _difference(
        self, answer: _Answer, codec: TensorCodec, values: torch.Tensor, place: Place
    ) -> memoryview | None:
        """Encode the difference, and move the image; None if the values are to go as they are."""
        if answer.image is None and codec.exact:
            answer.image = torch.empty(answer.coded.elems, dtype=answer.coded.dtype)
        elif answer.image is None:
            answer.image = self._store.image_of(answer.coded.piece.number)
        image = answer.image
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
