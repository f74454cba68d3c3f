"""A server's tensors: its slices' parameters, the gradients in flight, the optimizer's state.

Sums are made in rank order and the update by a real ``torch.optim`` optimizer, one per slice, so
nothing is re-implemented and no bit depends on timing, slice size or the number of servers.

torch's kernels treat what is left over after whole vectors one by one, and in half precision that
rounds differently. So every tensor here is padded with zeros to the vectors of the whole parameter:
an element is treated as it would be there, wherever a slice begins and ends.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Sequence, Set
from functools import cache

import torch

from foreprop.core.manifest import Hyperparameters, Manifest
from foreprop.core.norm import ZERO, SquareSum
from foreprop.core.slicing import Slice
from foreprop.engine.connection import EMPTY
from foreprop.engine.memory import bytes_of
from foreprop.engine.optimizer import maybe_served
from foreprop.engine.slicetensors import SliceTensors, Step, Versions
from foreprop.engine.sums import (
    Buffers,
    GradientBuffer,
    SameBatch,
    clip,
    finish_sum,
    move_average,
    square_sum,
    start_average,
)
from foreprop.engine.tensors import (
    AVERAGE,
    DTYPES,
    GRADIENT,
    IMAGE,
    MASTER,
    decode_state,
    encode_state,
    is_array,
    state_limit_bytes,
)
from foreprop.errors import RemoteProtocolError

Groups = Sequence[Hyperparameters]


class Codes:
    """What codecs change in a server's sums and answers; as it is here, nothing."""

    clipped: Set[int] = frozenset()
    """Slices that workers clip, and accumulate with the optimizer's momentum."""
    votes: Set[int] = frozenset()
    """Slices that are updated by the majority's signs, also those too small for a code."""

    def settings(self, piece: Slice, groups: Groups) -> Groups:
        """The optimizer's numbers for an update of a ``clipped`` slice."""
        return groups

    def adopt(self, pieces: Sequence[Slice]) -> None:
        """Take these slices on, too: another server is lost, or they move."""

    def answer(self, slice_: int, values: memoryview, step: int, *, is_average: bool) -> memoryview:
        """The bytes that cross of values that answer by themselves, or of an average."""
        return values

    def before_sum(self, gradients: Sequence[torch.Tensor]) -> None:
        """Change the gradients of a slice that ``votes``, in place."""

    def after_sum(self, total: torch.Tensor) -> torch.Tensor:
        """The update that their sum becomes."""
        return total

    def as_answered(self, slice_: int, average: torch.Tensor) -> torch.Tensor:
        """An average as workers will have it, flat."""
        return average


class SliceStore:
    """The tensors of one server's slices.

    With ``versions`` answers carry copies, and checkpoints wait for the update that is under way.
    Methods are called with the server's lock held, but for `update`: one thread at a time.

    Where the workers update, nothing is kept: rank 0's values and the averages are let go of when
    all ``readers`` have been sent them (`reading`). With ``readers`` None answers leave in another
    way, and both stay; where servers may be lost, only until all are sent their answer (`read`).
    """

    def __init__(
        self,
        manifest: Manifest,
        slices: Sequence[Slice],
        index: int,
        *,
        versions: Versions | None = None,
        codes: Codes | None = None,
        readers: int | None = None,
    ) -> None:
        self._readers = readers
        self._handout_lock = threading.Lock()
        """Held while it is decided whether anybody still reads what is handed out."""
        self._versions = versions
        self._codes = codes or Codes()
        self._state_lock = contextlib.nullcontext() if versions is None else threading.Lock()
        """Held while values or optimizer state change."""
        self._world_size = manifest.most_workers
        self._places_of = cache(manifest.places_of)
        self._aggregation = manifest.knobs.aggregation
        self._decay = manifest.decay_per_update
        limit = self._aggregation.clip_grad_value
        self._clips = self._aggregation.needs_norm or limit is not None
        optimizer = maybe_served(manifest.optimizer.name) or torch.optim.Optimizer
        # the bare function: torch's wrappers (profiler, hooks) cost as much as a small update
        self._step: Step = inspect.unwrap(optimizer.step)
        self._group_of = [info.group for info in manifest.parameters]
        self._names = [info.name for info in manifest.parameters]
        self._mean_over = manifest.mean_over
        self._reductions = manifest.reductions()
        dtypes = [DTYPES[info.dtype] for info in manifest.parameters]
        wire_dtypes = [DTYPES[dtype] for dtype in manifest.wire_dtypes()]
        sliced_elems = manifest.sliced_elems()
        workers = self._world_size
        stays = readers is None and not manifest.outlives_servers

        def make(piece: Slice) -> SliceTensors:
            number = piece.parameter
            return SliceTensors(
                piece,
                sliced_elems[number],
                dtypes[number],
                wire_dtypes[number],
                optimizer,
                workers=workers,
                holds_values=stays or manifest.is_served(piece),
            )

        self._make = make
        self._slices: dict[int, SliceTensors] = {}
        self.adopt([piece for piece in slices if piece.server == index])
        self.lets_go = not all(tensors.holds_values for tensors in self._slices.values())
        """Whether this store has to know which replies have left."""
        slices_bytes = sum(tensors.gradient_bytes for tensors in self._slices.values())
        self._buffers = Buffers(slices_bytes)
        whose = "ranks" if manifest.workers_per_push == 1 else "nodes"
        watches = self._world_size > 1 and 0 in self._slices  # one server: all would say the same
        self._same_batch = SameBatch(f"server {index}", whose) if watches else None

    def adopt(self, pieces: Sequence[Slice]) -> None:
        """Take these slices on: at the start, or when another server is lost."""
        self._slices |= {piece.number: self._make(piece) for piece in pieces}

    def values(self, slice_: int) -> memoryview:
        """The slice's parameters as bytes, for replies.

        They are in full before the first update, so that all ranks start from the same values; from
        then on in the wire's type.
        """
        return self._slices[slice_].view

    def read(
        self, slice_: int, ranks: Sequence[int]
    ) -> tuple[int, memoryview, GradientBuffer | None]:
        """What these ranks are sent now, and after which step that is; 0 means the last.

        If nobody else is sent it the buffer comes with it, and `was_read` follows for each of them.
        """
        if self._versions is not None:
            step, _, data = self._versions.read(slice_, ranks)
            return step, data, None
        tensors = self._slices[slice_]
        data, given = tensors.view, tensors.kept
        if given is None or tensors.holds_values:
            return 0, data, None
        given.readers = len(ranks)
        tensors.kept, tensors.view = None, EMPTY
        return 0, data, given

    def reading(self, slice_: int) -> tuple[memoryview, GradientBuffer | None]:
        """The bytes of a reply that is about to leave. Any thread.

        If they are let go of in the end the buffer comes with them, and `was_read` follows.
        """
        tensors = self._slices[slice_]
        kept = tensors.kept
        return tensors.view, kept if kept is not None and kept.readers else None

    def was_read(self, slice_: int, given: GradientBuffer) -> None:
        """Let go of a buffer when the last reply with it has left. Any thread."""
        tensors = self._slices[slice_]
        with self._handout_lock:
            given.readers -= 1
            if given.readers:
                return
            if tensors.kept is given:  # else the next average is here: all have pushed again
                tensors.kept, tensors.view = None, EMPTY
        self._buffers.give(given)

    def image_of(self, slice_: int) -> torch.Tensor:
        """The slice as workers have it, to be moved in place; `install_value` compares with it.

        With an exact codec nobody needs it: it is what the server has.
        """
        tensors = self._slices[slice_]
        if tensors.shown is None:
            tensors.shown = tensors.extent.zeros(tensors.dtype)
        return tensors.extent.part(tensors.shown)

    def size_bytes(self, slice_: int, *, value: bool = False) -> int:
        """The bytes of a gradient, in the wire's type, or of a value, which comes in full."""
        tensors = self._slices[slice_]
        return tensors.value_bytes if value else tensors.gradient_bytes

    def take_buffer(self, slice_: int, *, value: bool = False) -> GradientBuffer:
        """Memory for a gradient or a value; see `size_bytes`."""
        tensors = self._slices[slice_]
        return self._buffers.take(tensors.extent, tensors.dtype if value else tensors.wire_dtype)

    def put_gradient(self, slice_: int, rank: int, buffer: GradientBuffer) -> None:
        self._slices[slice_].gradients[rank] = buffer

    def put_value(self, slice_: int, buffer: GradientBuffer, *, step: int = 0) -> None:
        """Keep a value to be installed now (``step`` 0) or with the next update.

        With versions later ones may not differ: raises `TrainingLoopError`.
        """
        tensors = self._slices[slice_]
        if not step or self._versions is None:
            tensors.staged = buffer
            return
        name = self._names[tensors.piece.parameter]
        self._versions.check_unedited(tensors, buffer.tensor, name, step)
        self._buffers.give(buffer)

    def drop(self, slice_: int, rank: int, step: int = 0) -> None:
        """Drop what the rank has pushed, whatever step it is for: it does not count."""
        buffer = self._slices[slice_].gradients.pop(rank, None)
        if buffer is not None:
            self._buffers.give(buffer)

    def install_value(self, slice_: int) -> None:
        """Take the values that rank 0 sent as the slice's parameters.

        An element that is still what workers were shown was not changed by hand, and keeps what
        the cast to the wire's type had rounded off.
        """
        tensors = self._slices[slice_]
        if tensors.staged is not None and not tensors.holds_values:
            staged, tensors.staged = tensors.staged, None
            self._hand_out(tensors, staged, givers=1)
        elif tensors.staged is not None:
            values = tensors.staged.tensor
            if tensors.shown is not None:
                values = torch.where(values == tensors.shown, tensors.parameter, values)
            tensors.parameter.copy_(values)
            self._buffers.give(tensors.staged)
            tensors.staged = None
            if self._versions is not None:
                self._versions.add(tensors, 0, changed=True)

    def aggregate(
        self,
        slice_: int,
        ranks: Sequence[int],
        scale: float = 1.0,
        counted: Sequence[int] | None = None,
    ) -> SquareSum:
        """Do the first half of `update` ahead; returns the sum of the gradient's squares.

        ``scale`` is that of the loss.
        """
        tensors = self._slices[slice_]
        total = tensors.total = self._total(tensors, ranks, counted, scale)
        for rank in ranks:
            buffer = tensors.gradients[rank]
            if buffer.tensor is not total:  # all slices wait together: keep no more than the sums
                self._buffers.give(tensors.gradients.pop(rank))
        squares = square_sum(tensors.extent.part(total))
        is_clipped = slice_ in self._codes.clipped
        if is_clipped and self._aggregation.clip_grad_norm is not None and not squares.beyond:
            return ZERO  # of the norm; what is not finite has come as it is, and a scaler sees it
        return squares

    def measure(
        self, slice_: int, ranks: Sequence[int], scale: float, counted: Sequence[int] | None
    ) -> SquareSum:
        """The sum of squares of a gradient that is an update by itself, and stays here."""
        tensors, (rank,) = self._slices[slice_], ranks
        gradient = tensors.extent.part(tensors.gradients[rank].tensor)
        is_mean = self._reductions[tensors.piece.parameter] == "mean"
        divisor = self._mean_over(counted) * scale if is_mean else scale
        return square_sum(gradient if divisor == 1 else gradient.to(tensors.sum_dtype) / divisor)

    def update(
        self,
        slice_: int,
        ranks: Sequence[int],
        groups: Groups,
        coefficient: float = 1.0,
        *,
        scale: float = 1.0,
        step: int = 0,
        counted: Sequence[int] | None = None,
    ) -> None:
        """Aggregate the gradients of ``ranks``, in rank order, and apply ``coefficient`` of them.

        ``scale`` is that of the loss, if they have not been aggregated yet. The mean is over
        ``counted``, with a gradient or without, or else over all ranks; others' gradients may be
        here. The calling thread must have gradients disabled (``torch.set_grad_enabled(False)``).
        Raises `TrainingLoopError`.
        """
        tensors, decay = self._slices[slice_], self._decay
        if ranks and not tensors.holds_values:
            raise RemoteProtocolError(f"slice {slice_} is to be updated, which the workers do")
        changed = bool(ranks) or (tensors.staged is not None and tensors.shown is not None)
        with self._state_lock:
            if tensors.staged is not None:
                self.install_value(slice_)
            if decay is not None and tensors.average is None:
                tensors.average = start_average(tensors.parameter)
            if ranks:
                self._apply(tensors, ranks, groups, coefficient, counted, scale)
            else:  # none, or some that were summed in a step that is left out
                dropped = list(tensors.gradients) if counted is None else counted
                self._drop_gradients(tensors, dropped)
            if decay is not None and tensors.average is not None:
                move_average(tensors.average, tensors.parameter, decay)
            if changed and tensors.wire_dtype != tensors.dtype:
                # cast for the replies: once, for all workers, so that all see the same bits
                if tensors.shown is None:
                    tensors.shown = tensors.extent.zeros(tensors.wire_dtype)
                    tensors.view = bytes_of(tensors.extent.part(tensors.shown))
                tensors.shown.copy_(tensors.parameter)
            if self._versions is not None:
                self._versions.add(tensors, step, changed=changed)

    def aggregate_only(
        self,
        slice_: int,
        ranks: Sequence[int],
        counted: Sequence[int] | None = None,
        *,
        measure: bool,
    ) -> tuple[SquareSum, ...]:
        """Aggregate the gradients of ``ranks``, which replies then carry: workers update.

        Returns the sums of squares by parameter in the slice, if ``measure`` asks for them. The
        arguments are those of `update`. The slice's last replies have left: each worker has pushed
        again since.
        """
        tensors = self._slices[slice_]
        if not ranks:
            if counted is None:
                self._drop_gradients(tensors, list(tensors.gradients))
            return tuple(ZERO for _ in self._places_of(tensors.piece)) if measure else ()
        kept = self._kept_of(tensors, self._total(tensors, ranks, counted), ranks)
        self._hand_out(tensors, kept)
        if not measure:
            return ()
        own = self._codes.as_answered(slice_, tensors.extent.part(kept.tensor))
        return tuple(square_sum(own[a:b]) for a, b in self._places_of(tensors.piece))

    def _apply(
        self,
        tensors: SliceTensors,
        ranks: Sequence[int],
        groups: Groups,
        coefficient: float,
        counted: Sequence[int] | None,
        scale: float,
    ) -> None:
        piece, codes, total = tensors.piece, self._codes, tensors.total
        if total is None:
            total = self._total(tensors, ranks, counted, scale)
        if piece.number in codes.clipped:
            groups = codes.settings(piece, groups)
        elif self._clips or coefficient != 1.0:
            clip(total, self._aggregation, coefficient)
        dtype = tensors.dtype
        tensors.parameter.grad = total if total.dtype == dtype else total.to(dtype)
        optimizer, group = tensors.optimizer, groups[self._group_of[piece.parameter]]
        if optimizer.group is group:
            self._step(optimizer.made)
        else:
            optimizer.update(self._step, group, self._names[piece.parameter])
        tensors.parameter.grad = None
        if self._versions is None:
            tensors.kept = self._kept_of(tensors, total, ranks)
        else:  # nobody can read it
            self._drop_gradients(tensors, ranks)

    def _hand_out(self, tensors: SliceTensors, given: GradientBuffer, *, givers: int = 0) -> None:
        """Have replies carry this buffer, to all readers but the ``givers``."""
        if self._readers is None or tensors.holds_values:
            tensors.kept, tensors.view = given, given.view
            return
        given.readers = self._readers - givers
        if not given.readers:
            self._buffers.give(given)
            return
        with self._handout_lock:
            tensors.kept, tensors.view = given, given.view

    def _kept_of(
        self, tensors: SliceTensors, total: torch.Tensor, ranks: Sequence[int]
    ) -> GradientBuffer:
        """The buffer that has the aggregated gradient; those of the other ``ranks`` are free.

        It is read by whoever wants, until all workers have pushed again. Other ranks' gradients may
        be here to be dropped, or may just come.
        """
        if tensors.kept is not None and (self._readers is None or tensors.holds_values):
            self._buffers.give(tensors.kept)
        kept, spare = None, []
        for rank in ranks:
            buffer = tensors.gradients.pop(rank, None)
            if buffer is not None and buffer.tensor is total:
                kept = buffer
            elif buffer is not None:
                spare.append(buffer)
        if kept is None:
            kept = spare.pop(0) if spare else self.take_buffer(tensors.piece.number)
            kept.tensor.copy_(total)  # added up in more than the wire's type
        for buffer in spare:
            self._buffers.give(buffer)
        tensors.total = None
        return kept

    def _drop_gradients(self, tensors: SliceTensors, ranks: Sequence[int]) -> None:
        tensors.total = None
        for rank in ranks:
            self.drop(tensors.piece.number, rank)

    def _compare(self, same_batch: SameBatch, tensors: SliceTensors, ranks: Sequence[int]) -> None:
        part = tensors.extent.part
        gradients = [part(tensors.gradients[rank].tensor) for rank in ranks]
        for place, (start, stop) in enumerate(self._places_of(tensors.piece)):
            own = [gradient[start:stop] for gradient in gradients]
            same_batch.look((tensors.piece.number, place), own, many=len(ranks))
            if not same_batch.watching:
                self._same_batch = None
                break

    def _total(
        self,
        tensors: SliceTensors,
        ranks: Sequence[int],
        counted: Sequence[int] | None = None,
        scale: float = 1.0,
    ) -> torch.Tensor:
        """The aggregated gradient, not clipped; it may be in the memory of the first rank's."""
        if self._same_batch is not None:
            self._compare(self._same_batch, tensors, ranks)
        votes = tensors.piece.number in self._codes.votes
        if votes:
            self._codes.before_sum([tensors.gradients[rank].tensor for rank in ranks])
        first, *others = ranks
        total = tensors.gradients[first].tensor.to(tensors.sum_dtype)
        for rank in others:
            total += tensors.gradients[rank].tensor
        if self._versions is not None:
            total = self._versions.compensated(tensors, ranks, total, scale)
        reduction = self._reductions[tensors.piece.parameter]
        workers = self._world_size if counted is None else self._mean_over(counted)
        finish_sum(total, reduction, workers=workers, scale=scale, out=total)
        return self._codes.after_sum(total) if votes else total

    # Optimizer state, for checkpoints.
    def export_state(self, slice_: int) -> bytes:
        """The slice's optimizer state: a length, a JSON list of entries, then tensors' bytes."""
        tensors = self._slices[slice_]
        part = tensors.extent.part
        with self._state_lock:
            state = tensors.optimizer.state
            return encode_state(
                {key: part(value) if is_array(value) else value for key, value in state.items()}
            )

    def import_state(self, slice_: int, data: memoryview) -> None:
        """Replace the slice's optimizer state; raises `RemoteProtocolError` if it does not fit."""
        tensors = self._slices[slice_]
        state = decode_state(data, elems=tensors.piece.elems)
        with self._state_lock:
            tensors.optimizer.replace_state(
                {
                    key: tensors.extent.padded(value) if is_array(value) else value
                    for key, value in state.items()
                }
            )

    def export_master(self, slice_: int) -> bytes:
        """The slice's values in full, and its image if codes have made another one."""
        tensors = self._slices[slice_]
        part, shown = tensors.extent.part, tensors.shown
        has_image = shown is not None and tensors.wire_dtype == tensors.dtype
        with self._state_lock:
            image = {IMAGE: part(shown)} if shown is not None and has_image else {}
            return encode_state({MASTER: part(tensors.parameter), **image})

    def export_gradient(self, slice_: int) -> bytes:
        """The aggregated gradient of the slice's last update, as a state of one tensor."""
        tensors = self._slices[slice_]
        if self._versions is not None:
            raise self._versions.refuse_gradient(self._names[tensors.piece.parameter])
        if tensors.kept is None or not tensors.holds_values:
            raise RemoteProtocolError(f"the gradient of slice {slice_} is not kept")
        return encode_state({GRADIENT: tensors.extent.part(tensors.kept.tensor)})

    # Moving averages.
    def export_average(self, slice_: int) -> bytes:
        """The slice's moving average, as a state of one tensor."""
        tensors = self._slices[slice_]
        with self._state_lock:
            average = tensors.average
            if average is None:
                average = start_average(tensors.parameter)
            return encode_state({AVERAGE: tensors.extent.part(average)})

    def import_average(self, slice_: int, data: memoryview) -> None:
        """Go on from this average; raises `RemoteProtocolError` if it does not fit."""
        tensors = self._slices[slice_]
        value = decode_state(data, elems=tensors.piece.elems).get(AVERAGE)
        if self._aggregation.ema is None or not isinstance(value, torch.Tensor) or not value.dim():
            raise RemoteProtocolError(f"a moving average for slice {slice_}, which has none")
        average = start_average(tensors.parameter)
        tensors.extent.part(average).copy_(value)
        tensors.average = average

    def state_limit_bytes(self, slice_: int) -> int:
        return state_limit_bytes(self._slices[slice_].piece.elems)
