"""The shell of `RingMachine`: all-reduce on torch.distributed, updates on every rank.

A few threads each issue the collective whose turn it is, wait for it, and update the parameter that
it completes. The collectives themselves are torch's (gloo).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from foreprop.cluster.manyparts import forget_bytes, lookup_bytes, publish_bytes
from foreprop.collectives.gpu import DeviceWork
from foreprop.collectives.gradientsums import GradientSums, StepSettings
from foreprop.collectives.group import Group
from foreprop.collectives.local_update import LocalUpdater, RingUpdates
from foreprop.collectives.ordering import Ordering
from foreprop.core.frames import (
    Closing,
    CompleteParameter,
    Finish,
    GradientReady,
    NormArrived,
    PrioritiesLearned,
    SendNormPart,
)
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
    most_collectives,
)
from foreprop.errors import ForepropError, InternalError, PeerLost, StepTimeout, own_error
from foreprop.link.shutdown import done_here
from foreprop.numerics.norms import GradientNorms
from foreprop.observe.trace import RingStage
from foreprop.path.progress import NOTHING, Progress
from foreprop.servers.setup import Setup

if TYPE_CHECKING:
    from foreprop.collectives.codedsums import CodedSums

_LEAVE_S = 1.0
_KEPT_BLOBS = 3


class RingEngine:
    """One rank's part in one session over collectives.

    Errors from any thread are kept and raised in the training thread at its next call. With
    ``send_sum`` the global norm is also of other parameters: it is told each step's sum of squares,
    by any thread, and answers with `use_norm`.
    """

    every_parameter = True
    is_ahead = False
    """Averages land here one after the other, wherever the others are."""

    def __init__(
        self, setup: Setup, updater: LocalUpdater, group: Group, device: DeviceWork, session_id: str
    ) -> None:
        config = setup.config
        self.parameters = setup.infos
        self._group = group
        self._board = group.board
        self._device = device
        self._config = config
        self._aggregation = setup.aggregation
        self._send_sum = setup.send_sum
        self._trace = trace = setup.make_trace(session_id)
        names = [info.name for info in setup.infos]
        self.progress = Progress(
            names, rank=group.rank, config=config, trace=trace, look=setup.look
        )
        self.counters = self.progress.counters
        self._norms = GradientNorms(self.progress, config)
        self.settings = StepSettings(self._board, ranks=group.size)
        self.codecs: CodedSums | None = None
        self.sums = self._make_sums(setup)
        self.chunks = self.sums.chunks
        self._sizes_bytes = self.sums.chunk_sizes_bytes()
        self._updates = RingUpdates(self.sums, updater, self._aggregation)
        self.ordering = Ordering(
            group, self.progress.raise_if_failed, self.chunks, self._sizes_bytes, len(names)
        )
        self._machine = RingMachine(
            self.chunks,
            parameters=len(names),
            in_flight=most_collectives(config.chunks_in_flight),
            in_flight_elems=config.chunks_in_flight * config.chunk_elems,
            needs_norm=self._aggregation.needs_norm,
            shares_norm=self._send_sum is not None,
        )
        self.is_complete = self._machine.is_complete
        self._work = threading.Condition()
        self._todo: deque[ReduceChunk | MeasureParameter | UpdateParameter] = deque()
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
        group.on_silence(self._lose_silent)

    def _make_sums(self, setup: Setup) -> GradientSums:
        about = (setup, self.settings, self._group, self._device)
        if not setup.config.codecs:
            return GradientSums(*about)
        from foreprop.collectives.codedsums import CodedSums

        self.codecs = CodedSums(*about)
        return self.codecs

    # Training.
    def push(self, parameter: int, step: int, *, flags: int = 0, with_value: bool = False) -> None:
        """A parameter's gradient may be taken, or there is none in this step. Any thread."""
        del with_value  # every rank has its own
        self.sums.flags[parameter] = flags
        self.progress.gradient_ready(parameter, step)
        self.ordering.gradient_ready(parameter, step)
        self._dispatch(GradientReady(parameter, step))

    def learn_priorities(self, order: Sequence[int]) -> None:
        """The parameters in the order of their first use in the forward pass."""
        self.ordering.forward_order = list(order)
        self._dispatch(PrioritiesLearned(tuple(order)))

    def start_step(self) -> None:
        """Nothing has to be asked for."""

    def end_step(self, step: int) -> None:
        """`optimizer.step()` is over."""
        order = self.ordering.end_step(step)
        if order is not None:
            self._dispatch(OrderLearned(order, step + 1))

    def wait(self, parameter: int, step: int) -> None:
        """Block until the parameter is updated; raises what went wrong meanwhile."""
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
        if not self._aggregation.needs_norm:
            return None
        self.progress.raise_if_failed()
        return self._norms.of(step) if self.chunks else 0.0

    def use_norm(self, step: int, norm: float) -> None:
        """The global norm of the step, with what is not in the ring. Any thread."""
        self._dispatch(NormArrived(0, step, norm=norm))

    @property
    def queue_depth(self) -> int:
        with self._work:
            return self._machine.queue_depth

    # Buffers.
    def publish_blob(self, which: int, step: int, data: bytes) -> None:
        """Rank 0: leave a blob in the store for whoever asks."""
        publish_bytes(self._board, f"blob/{which}/{step}", data)
        forget_bytes(self._board, f"blob/{which}/{step - _KEPT_BLOBS}")

    def fetch_blob(self, which: int, step: int) -> memoryview:
        """Rank 0's blob of this step; blocks until it is there."""
        what = f"rank 0's buffers of step {step}"
        return lookup_bytes(
            self._board, f"blob/{which}/{step}", what, self.progress.raise_if_failed
        )

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
        well = error is None
        if error is None:
            self._dispatch(Closing())
            self._finished.wait(self._config.step_timeout_s)
            self._closing = True
            error = self._part()
        self._closing = True
        if error is not None:
            self._board.publish_failure(error)
        self._stop()
        # gloo ends when its collectives have, and one may wait for a rank that has left
        closer = threading.Thread(target=self._group.close, name="foreprop-ring-end", daemon=True)
        try:
            closer.start()
        except RuntimeError:  # the interpreter ends
            closer = done_here(closer)
        deadline = time.monotonic() + _LEAVE_S
        for thread in (closer, *self._threads):
            thread.join(None if error is None else max(0.0, deadline - time.monotonic()))
        if well and isinstance(error, StepTimeout):
            raise error

    def _part(self) -> ForepropError | None:
        """Leave together: another rank's last collective may still need this one."""
        if self.progress.error is not None:
            return self.progress.error
        try:
            self._group.part(self.progress.raise_if_failed)
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
        self.progress.raise_if_failed()
        with self._work:
            instructions = self._machine.handle(event)
            for instruction in instructions:
                if isinstance(instruction, (ReduceChunk, MeasureParameter, UpdateParameter)):
                    self._todo.append(instruction)
                    self._work.notify()
                elif isinstance(instruction, UseNorm):
                    self._updates.use_norm(instruction.norm)
                    self._norms.note(instruction.step, instruction.norm)
                elif isinstance(instruction, Finish):
                    self._finished.set()
        for instruction in instructions:
            if isinstance(instruction, SendNormPart) and self._send_sum is not None:
                self._send_sum(*instruction)
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
        """Carry out one instruction; collectives are issued in the order of the machine's."""
        with self._work:
            while not self._todo and not self._stopped:
                self._work.wait()
            if self._stopped:
                return False
            instruction = self._todo.popleft()
            if isinstance(instruction, ReduceChunk):
                started_ns = time.perf_counter_ns()
                work = self._group.sum(self.sums.fill(*instruction))
                self._under_way += 1
        if isinstance(instruction, UpdateParameter):
            self._updates.update(*instruction)
            self._device.finish()
            self._dispatch(ParameterUpdated(instruction.parameter))
            return True
        if isinstance(instruction, MeasureParameter):
            part = self._updates.measure(*instruction)
            self._dispatch(ParameterMeasured(instruction.parameter, part))
            return True
        try:
            work.wait()
            self._device.finish()
        except RuntimeError as error:
            if self._closing or self.progress.error is not None:
                return False
            raise self._group.cause(error, self._describe_awaited) from error
        finally:
            del work  # gloo's connections last as long, also in the traceback of an error
        with self._work:
            self._under_way -= 1
            more = self._under_way > 0
            self.ordering.reduced(instruction.chunk, more=more)
        self._note_reduced(instruction, started_ns)
        self._dispatch(ChunkReduced(instruction.chunk))
        return True

    def _note_reduced(self, instruction: ReduceChunk, started_ns: int) -> None:
        number, step = instruction
        with self._work:
            self.counters.pushes += 1
            self.counters.pushed_bytes += self._sizes_bytes[number]
        if self._trace is None:
            return
        for piece in self.chunks[number].pieces:
            self._trace.span(
                RingStage.CHUNK_REDUCED.value,
                self.parameters[piece.parameter].name,
                started_ns,
                step=step,
                slice_=number,
                size_bytes=self.sums.size_bytes(piece),
            )

    # Waiting and failing: what this rank reports, and publishes for the others' reports.
    def describe(self) -> str:
        """What is being reduced, what comes next, and what other ranks publish of themselves."""
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
        """What the training thread waits for."""
        awaited = self.progress.awaited
        if awaited == NOTHING:
            return "nothing"
        return self._describe_wait(awaited, self._machine.step_of(awaited))

    def _name_and_step(self, chunk: tuple[int, int]) -> str:
        parameter, step = chunk
        return f"{self.parameters[parameter].name}, step {step}"

    def look_around(self) -> None:
        """Nothing goes on: publish what is missing here, and look for failures elsewhere."""
        with self._work:
            following = self._machine.next_chunk
        self._group.publish_state(f"waits to reduce {self._name_and_step(following)}")
        try:
            self._board.check_failed()
        except ForepropError as error:
            self._fail(error)
            raise

    def _lose_silent(self, rank: int, why: str) -> None:
        """gloo waits for it, and does not know that it is stopped, or cut off. Its thread's."""
        about = f"{why}; rank {self._group.rank} was waiting for {self._describe_awaited()}"
        self._fail(PeerLost(about, peer=f"rank {rank}"))

    def _fail(self, error: ForepropError) -> None:
        if self._closing:
            return
        self.progress.keep(error)
        self._stop()
        self._finished.set()
        self.progress.notify()
        with contextlib.suppress(ForepropError):
            self._board.publish_failure(error)
