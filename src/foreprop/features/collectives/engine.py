"""The shell of `RingMachine`: all-reduce on torch.distributed, updates on every rank.

A few threads each issue the collective whose turn it is, wait for it, and update the parameter that
it completes. The collectives themselves are torch's. An error of any thread is kept, published to
the other ranks, and raised in the training thread at its next call.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import deque
from collections.abc import Sequence

import torch

from foreprop.core.frames import (
    Closing,
    CompleteParameter,
    Finish,
    GradientReady,
    NormArrived,
    PrioritiesLearned,
)
from foreprop.core.norm import SendNormPart
from foreprop.core.slicing import packed_order
from foreprop.engine.connection import done_here
from foreprop.engine.progress import NOTHING, Progress
from foreprop.engine.rendezvous import Look, decode_entry, decode_order
from foreprop.engine.trace import RingStage
from foreprop.errors import ForepropError, InternalError, PeerLost, StepTimeout, own_error
from foreprop.features.collectives.gpu import DeviceWork
from foreprop.features.collectives.gradientsums import (
    GradientSums,
    LocalUpdater,
    RingUpdates,
    StepSettings,
)
from foreprop.features.collectives.group import Group
from foreprop.features.collectives.order import Chunk, Observer, better_order, plans_after
from foreprop.features.collectives.ring_machine import (
    ChunkReduced,
    MeasureParameter,
    OrderLearned,
    ParameterMeasured,
    ParameterUpdated,
    ReduceChunk,
    RingMachine,
    UpdateParameter,
    UseNorm,
    most_collectives,
)
from foreprop.params.norms import GradientNorms
from foreprop.params.setup import Setup

_LEAVE_S = 1.0
_KEPT_BLOBS = 3
_FIRST_OBSERVED = 2  # in the first step gradients are pushed all at once, at its end


class Ordering:
    """Improves the order of collectives: every rank observes its steps, rank 0 plans from them.

    Observations come from any thread, all else from the training thread. ``look`` raises what has
    gone wrong here while other ranks are waited for.
    """

    def __init__(
        self,
        group: Group,
        look: Look,
        chunks: Sequence[Chunk],
        sizes_bytes: Sequence[int],
        parameters: int,
    ) -> None:
        self.forward_order: Sequence[int] = range(parameters)  # the parameters by their first use
        self.order: tuple[int, ...] | None = None
        """The planned order of the chunks; None until there is a plan."""
        self._board = group.board
        self._look = look
        self._chunks = chunks
        self._ranks = group.size
        self._published_key = ""
        summed = {parameter for chunk in chunks for parameter in chunk.parameters}
        self._observer = Observer(parameters, sizes_bytes, summed=summed)
        self._lock = threading.Lock()

    # What is observed.
    def gradient_ready(self, parameter: int, step: int) -> None:
        if step >= _FIRST_OBSERVED:
            with self._lock:
                self._observer.gradient_ready(parameter, step, time.monotonic())

    def needed(self, parameter: int, step: int) -> None:
        if step >= _FIRST_OBSERVED:
            with self._lock:
                self._observer.needed(parameter, step, time.monotonic())

    def waited(self, seconds: float) -> None:
        with self._lock:
            self._observer.waited(seconds)

    def reduced(self, chunk: int, *, more: bool) -> None:
        with self._lock:
            self._observer.reduced(chunk, time.monotonic(), more=more)

    # What is made of it.
    def end_step(self, step: int) -> tuple[int, ...] | None:
        """The order for the steps to come, if rank 0 has found a better one at this step's end."""
        if not plans_after(step) or self._ranks == 1:
            return None
        board, key = self._board, f"order/{step}"
        order: Sequence[int] | None
        if board.rank:
            with self._lock:
                ready_s = self._observer.ready_s()
            board.publish(f"ready/{step}/{board.rank}", json.dumps(ready_s))
            what = f"rank 0's order of collectives after step {step}"
            text = board.lookup(key, what, self._look)
            order = None if text == "null" else decode_order(text, len(self._chunks), what)
        else:
            others_ready_s: list[list[float]] = []
            for rank in range(1, self._ranks):
                theirs = f"ready/{step}/{rank}"
                what = f"rank {rank}'s times of its gradients, after step {step}"
                text = board.lookup(theirs, what, self._look)
                others_ready_s.append(decode_entry(text, list[float], what))
                board.forget(theirs)
            with self._lock:
                observed = self._observer.observation(others_ready_s)
                self._observer.forget_rate()
            order = better_order(self.order, self._chunks, self.forward_order, observed)
            board.publish(key, json.dumps(order))
            if self._published_key:  # all ranks have read it: they are in this step
                board.forget(self._published_key)
            self._published_key = key
        if order is not None:
            self.order = tuple(order)
        return None if order is None else self.order


class RingEngine:
    """One rank's part in one session over collectives; it offers what `WorkerEngine` does.

    If the global norm is also of parameters outside the ring (`Setup.send_sum`), each step's sum of
    squares goes there, from any thread, and the norm comes back by `use_norm`.
    """

    every_parameter = True
    lends = False
    is_ahead = False  # averages land here one after the other, wherever the other ranks are

    def __init__(
        self, setup: Setup, updater: LocalUpdater, group: Group, device: DeviceWork, session_id: str
    ) -> None:
        config = setup.config
        self.parameters = setup.infos
        self._group, self._board, self._device, self._config = group, group.board, device, config
        aggregation = setup.aggregation
        self._needs_norm = aggregation.needs_norm and not setup.by_workers  # they take it
        self._send_sum = setup.send_sum
        self._trace = trace = setup.make_trace(session_id)
        names = [info.name for info in setup.infos]
        span = None if trace is None else trace.span
        self.progress = Progress(names, rank=group.rank, config=config, span=span, look=setup.look)
        self.counters = self.progress.counters
        self._norms = GradientNorms(self.progress, config)
        self.settings = StepSettings(self._board, ranks=group.size)
        self.sums: GradientSums
        self.codecs = None
        if config.codecs:
            from foreprop.features.collectives.codedsums import CodedSums

            self.sums = self.codecs = CodedSums(setup, self.settings, group, device)
        else:
            self.sums = GradientSums(setup, self.settings, group, device)
        self.chunks = self.sums.chunks
        self._sizes_bytes = self.sums.chunk_sizes_bytes()
        self._updates = RingUpdates(self.sums, updater, aggregation)
        self.ordering = Ordering(
            group, self.progress.raise_if_failed, self.chunks, self._sizes_bytes, len(names)
        )
        self._machine = RingMachine(
            self.chunks,
            parameters=len(names),
            in_flight=most_collectives(config.chunks_in_flight),
            in_flight_elems=config.chunks_in_flight * config.chunk_elems,
            needs_norm=self._needs_norm,
            shares_norm=self._send_sum is not None,
        )
        self.is_complete = self._machine.is_complete
        self._work = threading.Condition()
        self._todo: deque[list[MeasureParameter | UpdateParameter] | None] = deque()
        """None: issue the next of ``_due``, which keeps the machine's order."""
        self._due: deque[ReduceChunk] = deque()
        self._issuing = threading.Lock()
        self._under_way = 0
        self._stopped = False
        self._closing = False
        self._finished = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, name=f"foreprop-ring-{i}", daemon=True)
            for i in range(most_collectives(config.chunks_in_flight) + 1)  # one can always update
        ]
        for thread in self._threads:
            thread.start()

        def lose(rank: int, why: str) -> None:
            text = f"{why}; rank {group.rank} was waiting for {self._describe_awaited()}"
            self._fail(PeerLost(text, peer=f"rank {rank}"))

        group.on_silence(lose)

    # Training.
    def push(self, parameter: int, step: int, *, flags: int = 0, with_value: bool = False) -> None:
        """Say that a gradient may be taken, or that there is none in this step. Any thread."""
        del with_value  # every rank has its own
        self.sums.flags[parameter] = flags
        self.progress.gradient_ready(parameter, step)
        self.ordering.gradient_ready(parameter, step)
        self._dispatch(GradientReady(parameter, step))

    def learn_priorities(self, order: Sequence[int]) -> None:
        """The parameters in the order of their first use in the forward pass."""
        order = packed_order(order, self.sums.packs)
        self.ordering.forward_order = order
        self._dispatch(PrioritiesLearned(tuple(order)))

    def start_step(self) -> None:
        """Do nothing: no server has to be asked for values."""

    def end_step(self, step: int) -> None:
        order = self.ordering.end_step(step)
        if order is not None:
            self._dispatch(OrderLearned(order, step + 1))

    def wait(self, parameter: int, step: int) -> None:
        """Block until the parameter is updated; raises whatever has gone wrong meanwhile."""
        self.progress.raise_if_failed()
        self.ordering.needed(parameter, step)
        if self.is_complete(parameter):
            return
        started = time.monotonic()
        self.progress.wait_for_parameter(
            parameter,
            step,
            lambda: self.is_complete(parameter),
            lambda: self._describe_wait(parameter, step),
            self.look_around,
        )
        self.ordering.waited(time.monotonic() - started)

    def grad_norm(self, step: int) -> float | None:
        """The global norm of the step's gradients, once it is known; None if none is needed."""
        if not self._needs_norm:
            return None
        self.progress.raise_if_failed()
        return self._norms.of(step) if self.chunks else 0.0

    def use_norm(self, step: int, norm: float) -> None:
        """Take the step's global norm, of all that is in the ring and outside. Any thread."""
        self._dispatch(NormArrived(0, step, norm=norm))

    @property
    def queue_depth(self) -> int:
        with self._work:
            return self._machine.queue_depth

    # Buffers.
    def publish_blob(self, which: int, step: int, data: bytes) -> None:
        """Leave a blob in the store for whoever asks; rank 0 alone does."""
        self._board.publish_bytes(f"blob/{which}/{step}", data)
        self._board.forget_bytes(f"blob/{which}/{step - _KEPT_BLOBS}")

    def fetch_blob(self, which: int, step: int) -> memoryview:
        """Rank 0's blob of this step; blocks until it is there."""
        what = f"rank 0's buffers of step {step}"
        return self._board.lookup_bytes(f"blob/{which}/{step}", what, self.progress.raise_if_failed)

    # The end.
    def give_up(self, error: BaseException) -> None:
        """Tell all ranks that this one goes on no more, and why: see `WorkerEngine.give_up`."""
        if self.progress.error is None:
            self._fail(own_error(error, self._board.rank))

    def close(self, *, failure: BaseException | None = None) -> None:
        """Finish what is under way on all ranks, or tell the others why not. Idempotent.

        Raises `StepTimeout` for ranks that do not come within ``step_timeout_s``.
        """
        if self._closing:
            return
        error = failure or self.progress.error
        was_well = error is None
        if error is None:
            self._dispatch(Closing())
            self._finished.wait(self._config.step_timeout_s)
            self._closing = True
            error = self.progress.error
            if error is None:  # leave together: another rank's last collective may need this one
                try:
                    self._group.await_leaving(self.progress.raise_if_failed)
                except ForepropError as failed:
                    error = failed
        self._closing = True
        if error is not None:
            self._board.publish_failure(error)
        self._stop()
        # in a thread: gloo ends with its collectives, and one may wait for a rank that has left
        closer = threading.Thread(target=self._group.close, name="foreprop-ring-end", daemon=True)
        try:
            closer.start()
        except RuntimeError:  # the interpreter ends
            closer = done_here(closer)
        deadline = time.monotonic() + _LEAVE_S
        for thread in (closer, *self._threads):
            thread.join(None if error is None else max(0.0, deadline - time.monotonic()))
        if was_well and isinstance(error, StepTimeout):
            raise error

    def _stop(self) -> None:
        with self._work:
            self._stopped = True
            self._todo.clear()
            self._work.notify_all()

    # Deciding and doing.
    def _dispatch(self, *events: object, takes: int = 0) -> None:
        # so many of the instructions the caller takes itself, which need wake nobody
        self.progress.raise_if_failed()
        with self._work:
            before = len(self._todo)
            instructions = [each for event in events for each in self._machine.handle(event)]
            together: list[MeasureParameter | UpdateParameter] = []
            left_elems = 0
            for instruction in instructions:
                if isinstance(instruction, (MeasureParameter, UpdateParameter)):
                    elems = self.sums.elems[instruction.parameter]
                    if not together or elems > left_elems:  # what is small one thread carries out
                        together, left_elems = [], self._config.chunk_elems
                        self._todo.append(together)
                    together.append(instruction)
                    left_elems -= elems
                elif isinstance(instruction, ReduceChunk):
                    self._due.append(instruction)
                    self._todo.append(None)
                elif isinstance(instruction, UseNorm):
                    self._updates.use_norm(instruction.norm)
                    self._norms.note(instruction.step, instruction.norm)
                elif isinstance(instruction, Finish):
                    self._finished.set()
            self._work.notify(max(0, len(self._todo) - before - takes))
        for instruction in instructions:
            if isinstance(instruction, SendNormPart) and self._send_sum is not None:
                self._send_sum(instruction.step, instruction.part)
            elif isinstance(instruction, CompleteParameter):
                self.progress.parameter_complete(instruction)

    def _run(self) -> None:
        torch.set_grad_enabled(False)
        try:
            with torch._C.DisableTorchFunctionSubclass(), self._device.in_thread():
                while self._do_next():
                    pass
        except ForepropError as error:
            self._fail(error)
        except BaseException as error:
            wrapped = InternalError(f"rank {self._board.rank}: {error!r}")
            wrapped.__cause__ = error
            self._fail(wrapped)

    def _do_next(self) -> bool:
        """Carry out one instruction; False when there will be no more."""
        with self._work:
            while not self._todo and not self._stopped:
                self._work.wait()
            if self._stopped:
                return False
            together = self._todo.popleft()
        return self._reduce_next() if together is None else self._carry_out(together)

    def _carry_out(self, together: Sequence[MeasureParameter | UpdateParameter]) -> bool:
        done: list[object] = []
        for each in together:
            if isinstance(each, UpdateParameter):
                self._updates.update(*each)
                done.append(ParameterUpdated(each.parameter))
            else:
                part = self._updates.measure(*each)
                done.append(ParameterMeasured(each.parameter, part))
        self._device.finish()
        self._dispatch(*done, takes=1)
        return True

    def _reduce_next(self) -> bool:
        with self._issuing:  # in the machine's order; who pushes does not wait for what is copied
            with self._work:
                number, step = self._due.popleft()
                self._under_way += 1
            started_ns = time.perf_counter_ns()
            work = self._group.sum(self.sums.fill(number, step))
        try:
            work.wait()
            self._device.finish()
        except RuntimeError as error:
            if self._closing or self.progress.error is not None:
                return False
            raise self._group.cause(error, self._describe_awaited) from error
        finally:
            del work  # gloo's connections last as long, also in the traceback of an error
        self.sums.finish_chunk(number, step)
        with self._work:
            self._under_way -= 1
            self.ordering.reduced(number, more=self._under_way > 0)
            self.counters.pushes += 1
            self.counters.pushed_bytes += self._sizes_bytes[number]
        if self._trace is not None:
            for piece in self.chunks[number].pieces:
                self._trace.span(
                    RingStage.CHUNK_REDUCED.value,
                    self.parameters[piece.parameter].name,
                    started_ns,
                    step=step,
                    slice_=number,
                    size_bytes=self.sums.size_bytes(piece),
                )
        self._dispatch(ChunkReduced(number), takes=1)
        return True

    # Waiting and failing: what this rank reports, and publishes for the others' reports.
    def describe(self) -> str:
        """Which collective is under way, which comes next, and what the other ranks publish."""
        with self._work:
            under_way, following = self._machine.under_way, self._machine.next_chunk
        text = f"the next collective here is that of {self._name_and_step(following)}"
        if under_way is not None:
            text = f"the collective of {self._name_and_step(under_way)} is under way; {text}"
        return f"{text}; {self._group.states()}"

    def _describe_wait(self, parameter: int, step: int) -> str:
        name, stage = self.parameters[parameter].name, RingStage.CHUNK_REDUCED.value
        return f"parameter {name}, step {step}, stage {stage}; {self.describe()}"

    def _describe_awaited(self) -> str:
        awaited = self.progress.awaited
        if awaited == NOTHING:
            return "nothing"
        return self._describe_wait(awaited, self._machine.step_of(awaited))

    def _name_and_step(self, chunk: tuple[int, int]) -> str:
        parameter, step = chunk
        return f"{self.parameters[parameter].name}, step {step}"

    def look_around(self) -> None:
        """Publish what this rank waits for, and look for failures elsewhere: nothing goes on."""
        with self._work:
            following = self._machine.next_chunk
        self._group.publish_state(f"waits to reduce {self._name_and_step(following)}")
        try:
            self._board.check_failed()
        except ForepropError as error:
            self._fail(error)
            raise

    def _fail(self, error: ForepropError) -> None:
        if self._closing:
            return
        self.progress.keep(error)
        self._stop()
        self._finished.set()
        self.progress.notify()
        with contextlib.suppress(ForepropError):
            self._board.publish_failure(error)
