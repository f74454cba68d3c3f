"""The shell of `RingMachine`: all-reduce on torch.distributed, updates on every rank.

A few threads each issue the collective whose turn it is, wait for it, and update the parameter that
it completes. The collectives themselves are torch's (gloo).
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch

from foreprop.collectives.gpu import DeviceWork, HostWork
from foreprop.collectives.group import Group
from foreprop.config import Config
from foreprop.core.aggregation import Aggregation
from foreprop.core.frames import (
    Closing,
    CompleteParameter,
    Finish,
    GradientReady,
    NormArrived,
    PrioritiesLearned,
    SendNormPart,
)
from foreprop.core.manifest import ITEMSIZE_BYTES, ParameterInfo, WireDtype, wire_dtype_of
from foreprop.core.norm import ZERO, SquareSum
from foreprop.core.order import Chunk, Observer, Piece, better_order, cut_chunks, plans_after
from foreprop.core.ring_machine import (
    ChunkReduced,
    MeasureParameter,
    OrderLearned,
    ParameterMeasured,
    ParameterUpdated,
    ReduceChunk,
    RingMachine,
    UpdateParameter,
    UseNorm,
)
from foreprop.core.wire import Flag
from foreprop.errors import ForepropError, InternalError, StepTimeout, TrainingLoopError
from foreprop.link.failure import own_error
from foreprop.numerics.finite import check_finite
from foreprop.numerics.norms import GradientNorms
from foreprop.observe.stages import RingStage
from foreprop.observe.trace import TraceRecorder
from foreprop.path.hyperparameters import describe_groups
from foreprop.path.progress import NOTHING, Progress
from foreprop.path.slicememory import ParameterMemory
from foreprop.path.summing import clip, finish_sum, square_sum
from foreprop.path.tensors import DTYPES

_DIGEST_BITS = 18
_MARKS = 2 + _DIGEST_BITS
"""Elements behind a parameter's: how many ranks had a gradient, how many had changed it by hand,
and for each bit of the settings' digest, how many ranks have it. None exceeds the number of ranks.
"""
MOST_RANKS = {torch.bfloat16: 2**8, torch.float16: 2**11}
"""By type: up to these counts are exact, in whatever order they are added up."""
_TOLD_S = 5.0
_LEAVE_S = 1.0
_FIRST_OBSERVED = 2  # in the first step gradients are pushed all at once, at its end
_KEPT_BLOBS = 3


class Updater(Protocol):
    """Applies the optimizer to one parameter at a time."""

    def update(self, parameter: int, step: int, gradient: torch.Tensor) -> None:
        """``gradient``: the aggregated one, flat. Any thread."""

    def show(self, parameter: int, gradient: torch.Tensor) -> None:
        """The training thread updates: let it have the aggregated gradient. Any thread."""

    def end_step(self, parameter: int) -> None:
        """The parameter's step is over, with an update or without. Any thread."""


class _Settings:
    """The optimizer's settings (JSON) from a step on, and a digest whose bits can be summed."""

    def __init__(self, since: int, text: str, scale: float = 1.0) -> None:
        self.since = since
        self.scale = scale
        """Of the loss."""
        self.text = text
        digest = zlib.crc32(text.encode())
        self.digest = [digest >> bit & 1 for bit in range(_DIGEST_BITS)]


class RingEngine:
    """One rank's part in one session over collectives.

    Errors from any thread are kept and raised in the training thread at its next call. With
    ``send_sum`` the global norm is also of other parameters: it is told each step's sum of squares,
    by any thread, and answers with `use_norm`.
    """

    every_parameter = True

    def __init__(
        self,
        parameters: Sequence[ParameterInfo],
        memory: Sequence[ParameterMemory],
        updater: Updater,
        group: Group,
        *,
        config: Config,
        trace: TraceRecorder | None = None,
        aggregation: Aggregation | None = None,
        send_sum: Callable[[int, SquareSum], None] | None = None,
        device: DeviceWork | None = None,
    ) -> None:
        self.parameters = parameters
        self._memory = memory
        self._updater = updater
        self._group = group
        self._device = device or HostWork()
        self._rank = group.rank
        self._config = config
        self._trace = trace
        self._aggregation = aggregation or config.aggregation
        names = [info.name for info in parameters]
        self.progress = Progress(names, rank=group.rank, config=config, trace=trace)
        self.counters = self.progress.counters
        self._norms = GradientNorms(self.progress, config)
        self._send_sum = send_sum
        self._coefficient = 1.0
        self._skip = False
        """Whether the step whose updates are under way is left out."""
        self._itemsize = [ITEMSIZE_BYTES[info.dtype] for info in parameters]
        self._sum_dtypes = [_sum_dtype(info.dtype, config.wire_dtype) for info in parameters]
        self.chunks = cut_chunks(
            [info.elems for info in parameters], config.chunk_elems, kinds=self._sum_dtypes
        )
        self._sums: list[torch.Tensor | None] = [None] * len(parameters)
        """With the marks behind them; those of a family lie one behind the other."""
        self._families = _families(self.chunks)
        self._gradients: list[torch.Tensor | None] = [None] * len(parameters)
        """Aggregated and not applied yet."""
        self._flags = [0] * len(parameters)
        self._settings = [_Settings(0, "")]
        self._machine = RingMachine(
            self.chunks,
            parameters=len(parameters),
            in_flight=config.most_collectives,
            in_flight_elems=config.chunks_in_flight * config.chunk_elems,
            needs_norm=self._aggregation.needs_norm,
            shares_norm=send_sum is not None,
        )
        self._forward_order: Sequence[int] = range(len(parameters))
        self.order: tuple[int, ...] | None = None
        """As planned; None until there is a plan."""
        self._told_order = ""
        self._sizes_bytes = [
            chunk.elems * self._sum_dtypes[chunk.pieces[0].parameter].itemsize
            for chunk in self.chunks
        ]
        self._observer = Observer(len(parameters), self._sizes_bytes)
        self._work = threading.Condition()
        self._todo: deque[ReduceChunk | MeasureParameter | UpdateParameter] = deque()
        self._under_way = 0
        self._stopped = False
        self._closing = False
        self._finished = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, name=f"foreprop-ring-{i}", daemon=True)
            for i in range(config.most_collectives + 1)  # one can always update
        ]
        for thread in self._threads:
            thread.start()

    # Training.
    def push(self, parameter: int, step: int, *, flags: int = 0, with_value: bool = False) -> None:
        """A parameter's gradient may be taken, or there is none in this step. Any thread."""
        del with_value  # every rank has its own
        self._flags[parameter] = flags
        self.progress.gradient_ready(parameter, step)
        if step >= _FIRST_OBSERVED:
            with self._work:
                self._observer.gradient_ready(parameter, step, time.monotonic())
        self._dispatch(GradientReady(parameter, step))

    def announce_settings(self, step: int, settings: str, scale: float = 1.0) -> None:
        """From ``step`` on the optimizer has these settings, which must be every rank's."""
        self._settings = [self._settings[-1], _Settings(step, settings, scale)]

    def _settings_at(self, step: int) -> _Settings:
        return next(settings for settings in reversed(self._settings) if settings.since <= step)

    def learn_priorities(self, order: Sequence[int]) -> None:
        """The parameters in the order of their first use in the forward pass."""
        self._forward_order = list(order)
        self._dispatch(PrioritiesLearned(tuple(order)))

    def start_step(self) -> None:
        """Nothing has to be asked for."""

    def end_step(self, step: int) -> None:
        """`optimizer.step()` is over: at some steps rank 0 tells the order for the ones to come."""
        if not plans_after(step) or self._group.size == 1:
            return
        key = f"order/{step}"
        if self._rank == 0:
            order = self._better_order(step)
            self._group.publish(key, json.dumps(order))
            self._group.forget(self._told_order)  # all ranks have it: they are in this step
            self._told_order = key
        else:
            with self._work:
                ready_s = self._observer.ready_s()
            self._group.publish(f"ready/{step}/{self._rank}", json.dumps(ready_s))
            what = f"rank 0's order of collectives after step {step}"
            order = json.loads(self._group.lookup(key, what, self.raise_if_failed))
        if order is not None:
            self.order = tuple(order)
            self._dispatch(OrderLearned(self.order, step + 1))

    def _others_ready_s(self, step: int) -> list[list[float]]:
        """When gradients are ready on the other ranks."""
        found = []
        for rank in range(1, self._group.size):
            key = f"ready/{step}/{rank}"
            what = f"rank {rank}'s times of its gradients, after step {step}"
            found.append(json.loads(self._group.lookup(key, what, self.raise_if_failed)))
            self._group.forget(key)
        return found

    def _better_order(self, step: int) -> tuple[int, ...] | None:
        others_ready_s = self._others_ready_s(step)
        with self._work:
            observed = self._observer.observation(others_ready_s)
            self._observer.forget_rate()
        return better_order(self.order, self.chunks, self._forward_order, observed)

    def is_complete(self, parameter: int) -> bool:
        return self._machine.is_complete(parameter)

    def wait(self, parameter: int, step: int) -> None:
        """Block until the parameter is updated; raises what went wrong meanwhile."""
        self.raise_if_failed()
        if step >= _FIRST_OBSERVED:
            with self._work:
                self._observer.needed(parameter, step, time.monotonic())
        if self._machine.is_complete(parameter):
            return
        started = time.monotonic()
        self.progress.wait_for_parameter(
            parameter,
            step,
            lambda: self._machine.is_complete(parameter),
            lambda: self._describe_wait(parameter, step),
            self.look_around,
        )
        with self._work:
            self._observer.waited(time.monotonic() - started)

    def grad_norm(self, step: int) -> float | None:
        """The global norm of the step's gradients, once it is known; None if none is needed."""
        if not self._aggregation.needs_norm:
            return None
        self.raise_if_failed()
        return self._norms.of(step) if self.chunks else 0.0

    def use_norm(self, step: int, norm: float) -> None:
        """The global norm of the step, with what is not in the ring. Any thread."""
        if self.chunks:
            self._dispatch(NormArrived(0, step, norm=norm))

    def raise_if_failed(self) -> None:
        self.progress.raise_if_failed()

    @property
    def is_rank_zero(self) -> bool:
        return self._rank == 0

    @property
    def failed(self) -> bool:
        return self.progress.error is not None

    @property
    def queue_depth(self) -> int:
        with self._work:
            return self._machine.queue_depth

    # Buffers.
    def publish_blob(self, which: int, step: int, data: bytes) -> None:
        """Rank 0: leave a blob in the store for whoever asks."""
        self._group.publish_bytes(f"blob/{which}/{step}", data)
        self._group.forget_bytes(f"blob/{which}/{step - _KEPT_BLOBS}")

    def fetch_blob(self, which: int, step: int) -> memoryview:
        """Rank 0's blob of this step; blocks until it is there."""
        what = f"rank 0's buffers of step {step}"
        return self._group.lookup_bytes(f"blob/{which}/{step}", what, self.raise_if_failed)

    # The end.
    def give_up(self, error: BaseException) -> None:
        """Tell all ranks that this one goes on no more, and why: see `WorkerEngine.give_up`."""
        if not self.failed:
            self._fail(own_error(error, self._rank))

    def close(self, *, failure: BaseException | None = None) -> None:
        """Finish what is under way on all ranks, or tell the others why not. Idempotent.

        Raises `StepTimeout` for ranks that do not come within ``step_timeout_s``.
        """
        if self._closing:
            return
        error = failure or self.progress.error
        well = error is None
        if error is None:
            self._dispatch(Closing())
            self._finished.wait(self._config.step_timeout_s)
            self._closing = True
            error = self._part()
        self._closing = True
        if error is not None:
            self._group.publish_failure(error)
        self._stop()
        # gloo ends when its collectives have, and one may wait for a rank that has left
        closer = threading.Thread(target=self._group.close, name="foreprop-ring-end", daemon=True)
        closer.start()
        for thread in (closer, *self._threads):
            thread.join(None if error is None else _LEAVE_S)
        if well and isinstance(error, StepTimeout):
            raise error

    def _part(self) -> ForepropError | None:
        """Leave together: another rank's last collective may still need this one."""
        if self.progress.error is not None:
            return self.progress.error
        try:
            self._group.part(self.raise_if_failed)
        except ForepropError as error:
            return error
        return None

    def _stop(self) -> None:
        with self._work:
            self._stopped = True
            self._todo.clear()
            self._work.notify_all()

    # Deciding and doing.
    def _dispatch(self, event: object) -> None:
        self.raise_if_failed()
        with self._work:
            instructions = self._machine.handle(event)
            for instruction in instructions:
                if isinstance(instruction, (ReduceChunk, MeasureParameter, UpdateParameter)):
                    self._todo.append(instruction)
                    self._work.notify()
                elif isinstance(instruction, UseNorm):
                    norm = instruction.norm
                    self._coefficient = self._aggregation.coefficient(norm)
                    self._skip = self._aggregation.skips(norm)
                    self._norms.note(instruction.step, norm)
                elif isinstance(instruction, Finish):
                    self._finished.set()
        for instruction in instructions:
            if isinstance(instruction, SendNormPart) and self._send_sum is not None:
                self._send_sum(*instruction)
            elif isinstance(instruction, CompleteParameter):
                self.progress.parameter_complete(instruction.parameter, instruction.step)

    def _run(self) -> None:
        torch.set_grad_enabled(False)
        try:
            with torch._C.DisableTorchFunctionSubclass(), self._device.in_thread():
                while self._do_next():
                    pass
        except ForepropError as error:
            self._fail(error)
        except BaseException as error:
            self._broke(error)

    def _do_next(self) -> bool:
        """Carry out one instruction; collectives are issued in the order of the machine's."""
        with self._work:
            while not self._todo and not self._stopped:
                self._work.wait()
            if self._stopped:
                return False
            instruction = self._todo.popleft()
            if isinstance(instruction, ReduceChunk):
                started_ns = time.perf_counter_ns()
                work = self._issue(instruction)
                self._under_way += 1
        if isinstance(instruction, UpdateParameter):
            self._update(instruction.parameter, instruction.step)
            return True
        if isinstance(instruction, MeasureParameter):
            self._measure(instruction.parameter, instruction.step)
            return True
        try:
            work.wait()
            self._device.finish()
        except RuntimeError as error:
            if self._closing or self.failed:
                return False
            raise self._group.cause(error, self._describe_awaited) from error
        finally:
            del work  # gloo's connections last as long, also in the traceback of an error
        with self._work:
            self._under_way -= 1
            more = self._under_way > 0
            self._observer.reduced(instruction.chunk, time.monotonic(), more=more)
        self._note_reduced(instruction, started_ns)
        self._dispatch(ChunkReduced(instruction.chunk))
        return True

    def _issue(self, instruction: ReduceChunk) -> Any:
        number, step = instruction
        pieces = self.chunks[number].pieces
        for piece in pieces:
            self._fill(piece, step)
        (first, start, _), (last, _, stop) = pieces[0], pieces[-1]
        begin, total = self._sum_of(first), self._sum_of(last)
        begin_elems = begin.storage_offset() + start
        if stop == self.parameters[last].elems:
            stop += _MARKS
        elems = total.storage_offset() + stop - begin_elems
        return self._group.sum(begin.as_strided((elems,), (1,), begin_elems))

    def _sum_of(self, parameter: int) -> torch.Tensor:
        """Made when it is first needed."""
        if self._sums[parameter] is None:
            self._make_sums(self._families[parameter])
        total = self._sums[parameter]
        if total is None:
            raise InternalError(f"{self.parameters[parameter].name} is not in its family")
        return total

    def _make_sums(self, family: Sequence[int]) -> None:
        ends = list(accumulate(self.parameters[p].elems + _MARKS for p in family))
        dtype = self._sum_dtypes[family[0]]
        memory = torch.empty(ends[-1], dtype=dtype, device=self._device.device)
        for parameter, run in zip(family, pairwise([0, *ends]), strict=True):
            self._sums[parameter] = memory[slice(*run)]

    def _fill(self, piece: Piece, step: int) -> None:
        """This rank's part of a sum."""
        parameter, start, stop = piece
        total = self._sum_of(parameter)
        info = self.parameters[parameter]
        flags = self._flags[parameter]
        if flags & Flag.NO_GRADIENT:
            total[start:stop] = 0
        else:
            itemsize = self._itemsize[parameter]
            part = self._memory[parameter].take_gradient(start * itemsize, stop * itemsize)
            total[start:stop] = self._device.flat(part, DTYPES[info.dtype])
            check_finite(
                total[start:stop],
                self._aggregation,
                whose=f"rank {self._rank}",
                name=info.name,
                step=step,
            )
        if stop == info.elems:
            marks = (
                not flags & Flag.NO_GRADIENT,
                bool(flags & Flag.VALUE_CHANGED),
                *self._digest(parameter, step),
            )
            total[stop:] = torch.tensor(marks, dtype=total.dtype, device=total.device)

    def _note_reduced(self, instruction: ReduceChunk, started_ns: int) -> None:
        number, step = instruction
        chunk = self.chunks[number]
        with self._work:
            self.counters.pushes += 1
            self.counters.pushed_bytes += self._sizes_bytes[number]
        if self._trace is None:
            return
        for parameter, start, stop in chunk.pieces:
            self._trace.span(
                RingStage.CHUNK_REDUCED.value,
                self.parameters[parameter].name,
                started_ns,
                step=step,
                slice_=number,
                size_bytes=(stop - start) * self._sum_dtypes[parameter].itemsize,
            )

    def _measure(self, parameter: int, step: int) -> None:
        self._aggregate(parameter, step)
        gradient = self._gradients[parameter]
        part = ZERO if gradient is None else square_sum(gradient)
        self._dispatch(ParameterMeasured(parameter, part))

    def _update(self, parameter: int, step: int) -> None:
        if not self._aggregation.needs_norm:
            self._aggregate(parameter, step)
        gradient, self._gradients[parameter] = self._gradients[parameter], None
        if self._flags[parameter] & Flag.GRADIENT:
            if gradient is not None:
                self._updater.show(parameter, gradient)
        elif gradient is not None and not self._skip:
            clip(gradient, self._aggregation, self._coefficient)
            self._updater.update(parameter, step, gradient)
        if not self._flags[parameter] & Flag.GRADIENT:
            self._updater.end_step(parameter)
        self._device.finish()
        self._dispatch(ParameterUpdated(parameter))

    def _aggregate(self, parameter: int, step: int) -> None:
        """Keep the aggregated gradient, if any rank had one; checks that the ranks agree."""
        info = self.parameters[parameter]
        total = self._sum_of(parameter)
        self._gradients[parameter] = None
        with_gradient, changed, *digests = (round(mark) for mark in total[info.elems :].tolist())
        if 0 < changed < self._group.size:
            raise TrainingLoopError(
                f"{info.name} was changed by hand before step {step} on {changed} of"
                f" {self._group.size} ranks; with architecture='ring' change it on every rank alike"
            )
        if digests != [self._group.size * bit for bit in self._digest(parameter, step)]:
            raise self._unlike_settings(step)
        if with_gradient:
            total = total[: info.elems]
            # what follows is as if it had not been cast
            gradient = total.to(torch.promote_types(total.dtype, torch.float32))
            scale = self._settings_at(step).scale
            reduction = self._aggregation.reduction_of(sparse=info.sparse)
            finish_sum(gradient, reduction, workers=self._group.size, scale=scale)
            self._gradients[parameter] = gradient

    def aggregated(self, parameter: int) -> torch.Tensor:
        """The aggregated gradient of the parameter's last update, flat. Training thread."""
        info = self.parameters[parameter]
        total = self._sum_of(parameter)[: info.elems]
        if total.dtype == torch.float32 or total.dtype == torch.float64:
            return total  # finished in place
        total = total.float()
        reduction = self._aggregation.reduction_of(sparse=info.sparse)
        finish_sum(total, reduction, workers=self._group.size)
        return total

    def _digest(self, parameter: int, step: int) -> list[int]:
        """What must be alike on every rank: the settings, who updates, and which round it is."""
        alike = self._flags[parameter] & ~(Flag.NO_GRADIENT | Flag.VALUE_CHANGED)
        code = zlib.crc32(str(alike).encode()) if alike else 0
        return [bit ^ (code >> n & 1) for n, bit in enumerate(self._settings_at(step).digest)]

    def _unlike_settings(self, step: int) -> TrainingLoopError:
        """Every rank comes to this; they tell each other what they have."""
        self._group.publish(f"settings/{self._rank}", self._settings_at(step).text)
        told: list[Any] = []
        with contextlib.suppress(StepTimeout):  # but not of what another rank tells meanwhile
            for rank in range(self._group.size):
                key = f"settings/{rank}"
                told.append(json.loads(self._group.lookup(key, "its settings", timeout_s=_TOLD_S)))
        for rank, groups in enumerate(told):
            if groups != told[0]:
                return TrainingLoopError(describe_groups(step, (0, rank), told[0], groups))
        return TrainingLoopError(
            f"step {step}: the ranks use their gradients differently: the optimizer's settings"
            " differ, or some have run other backward passes, or read or edited gradients, and"
            " others have not"
        )

    # Waiting and failing.
    def _describe_wait(self, parameter: int, step: int) -> str:
        name = self.parameters[parameter].name
        stage = RingStage.CHUNK_REDUCED.value
        return f"parameter {name}, step {step}, stage {stage}; {self.describe()}"

    def describe(self) -> str:
        """What is being reduced, what comes next, and what other ranks have told of themselves."""
        with self._work:
            under_way, following = self._machine.under_way, self._machine.next_chunk
        text = f"the next collective here is that of {self._name_and_step(following)}"
        if under_way is not None:
            text = f"the collective of {self._name_and_step(under_way)} is under way; {text}"
        return f"{text}; {self._group.states()}"

    def _name_and_step(self, chunk: tuple[int, int]) -> str:
        parameter, step = chunk
        return f"{self.parameters[parameter].name}, step {step}"

    def look_around(self) -> None:
        """Nothing goes on: tell the others what is missing here, and hear what they have told."""
        with self._work:
            parameter, step = self._machine.next_chunk
        self._group.publish_state(f"waits to reduce {self.parameters[parameter].name}, step {step}")
        try:
            self._group.check_told()
        except ForepropError as error:
            self._fail(error)
            raise

    def _fail(self, error: ForepropError) -> None:
        if self._closing:
            return
        if self.progress.error is None:
            self.progress.error = error
        self._stop()
        self._finished.set()
        self.progress.notify()
        with contextlib.suppress(ForepropError):
            self._group.publish_failure(error)

    def _broke(self, error: BaseException) -> None:
        wrapped = InternalError(f"rank {self._rank}: {error!r}")
        wrapped.__cause__ = error
        self._fail(wrapped)

    def _describe_awaited(self) -> str:
        awaited = self.progress.awaited
        if awaited == NOTHING:
            return "nothing"
        return self._describe_wait(awaited, self._machine.step_of(awaited))


def _sum_dtype(dtype: str, wire_dtype: WireDtype | None) -> torch.dtype:
    """What a parameter's gradients are summed in, which is also what they travel in.

    Of half-precision parameters float32: summing in half precision would lose small gradients. With
    a wire type that is what is asked for.
    """
    on_wire = DTYPES[wire_dtype_of(dtype, wire_dtype)]
    return on_wire if dtype == "float32" else torch.promote_types(on_wire, torch.float32)


def _families(chunks: Sequence[Chunk]) -> dict[int, list[int]]:
    """By parameter: those that are connected to it by chunks that they share, in order."""
    families: dict[int, list[int]] = {}
    for chunk in chunks:
        family = families.setdefault(chunk.parameters[0], [chunk.parameters[0]])
        for parameter in chunk.parameters[1:]:
            family.append(parameter)
            families[parameter] = family
    return families
