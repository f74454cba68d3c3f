"""The backend of both: all-reduce for dense parameters, servers for row-wise ones (Parallax).

Each of the two knows its own parameters only, by numbers of its own; here they are put together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from foreprop.collectives.ring import RingBackend
from foreprop.core.manifest import ParameterInfo
from foreprop.core.norm import SquareSum
from foreprop.errors import ForepropError, InternalError
from foreprop.hooks.buffers import ModelBuffers
from foreprop.observe.trace import TraceRecorder
from foreprop.path.engines import Engine
from foreprop.path.memory import Memory, ParameterMemory
from foreprop.path.progress import Counters, Progress
from foreprop.servers.backend import Setup, Starting
from foreprop.servers.launch import Connections
from foreprop.servers.served import ServedBackend
from foreprop.tables.exchange import RowExchange


class HybridBackend:
    """Dense parameters by collectives, row-wise ones by servers."""

    def __init__(self, setup: Setup) -> None:
        self._trace: TraceRecorder | None = None
        self._setup = setup
        dense = [number for number, info in enumerate(setup.infos) if not info.rows]
        sparse = [number for number, info in enumerate(setup.infos) if info.rows]
        self._dense = RingBackend(self._dense_setup(dense))
        self.session_id = self._dense.session_id
        try:
            self._sparse = ServedBackend(self._sparse_setup(sparse))
        except BaseException as error:
            self._dense.engine.close(failure=error)
            raise
        self._engine = HybridEngine(setup.infos, self._dense, dense, self._sparse, sparse)
        self._is_sparse = [info.rows for info in setup.infos]
        self._dense_numbers, self._sparse_numbers = dense, sparse

    def _dense_setup(self, chosen: Sequence[int]) -> Setup:
        """Its part of the global norm is added to the servers'."""
        return dataclasses.replace(
            _part(self._setup, chosen),
            make_trace=self._make_trace,
            send_sum=lambda step, part: self._sparse.norm.add_part(step, part),
        )

    def _sparse_setup(self, chosen: Sequence[int]) -> Setup:
        """Buffers and frozen parameters are the other part's."""
        return dataclasses.replace(
            _part(self._setup, chosen),
            frozen=[],
            buffers=ModelBuffers(torch.nn.Module()),
            make_trace=lambda _: self._trace,
            part="rows",
        )

    def _make_trace(self, session_id: str) -> TraceRecorder | None:
        self._trace = self._setup.make_trace(session_id)
        return self._trace

    @property
    def engine(self) -> Engine:
        return self._engine

    @property
    def connections(self) -> Connections:
        return self._sparse.connections

    def rows_of(self, parameter: int) -> tuple[RowExchange, int]:
        return self._sparse.rows_of(self._sparse_numbers.index(parameter))

    # The start.
    def start(self, parameters: Sequence[Starting]) -> None:
        rows = self._is_sparse
        self._dense.start([p for p, sparse in zip(parameters, rows, strict=True) if not sparse])
        self._sparse.start([p for p, sparse in zip(parameters, rows, strict=True) if sparse])

    def memory_of(self, parameter: torch.Tensor) -> Memory:
        return self._dense.memory_of(parameter)

    # The optimizer's numbers and state. The servers' part clears the user's optimizer: it is last.
    def numbers(self) -> Any:
        return self._dense.numbers()

    def announce(self, step: int) -> None:
        self._dense.announce(step)
        self._sparse.announce(step)

    def pull_state(self, step: int) -> None:
        self._dense.pull_state(step)
        self._sparse.pull_state(step)

    def drop_state(self) -> None:
        self._sparse.drop_state()

    def leave_updates(self) -> None:
        self._dense.leave_updates()

    def replace_state(self, step: int) -> None:
        self._dense.replace_state(step)
        self._sparse.replace_state(step)

    def pull_gradient(self, parameter: int, step: int) -> torch.Tensor:
        return self._dense.pull_gradient(self._dense_numbers.index(parameter), step)

    can_measure = False

    def square_sums(self, round_: int) -> Sequence[SquareSum]:
        raise InternalError("collectives do not tell sums of squares")

    def pull_masters(self, step: int) -> Sequence[torch.Tensor]:
        return self._in_order(self._dense.pull_masters(step), self._sparse.pull_masters(step))

    def pull_averages(self, step: int) -> Sequence[torch.Tensor]:
        return self._in_order(self._dense.pull_averages(step), self._sparse.pull_averages(step))

    def _in_order(
        self, dense: Sequence[torch.Tensor], sparse: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """Both parts' by the session's numbers."""
        of_dense, of_sparse = iter(dense), iter(sparse)
        return [next(of_sparse if rows else of_dense) for rows in self._is_sparse]

    def replace_averages(self, step: int, averages: Sequence[torch.Tensor]) -> None:
        self._dense.replace_averages(step, [averages[n] for n in self._dense_numbers])
        self._sparse.replace_averages(step, [averages[n] for n in self._sparse_numbers])

    # The end.
    def refuse(self, error: BaseException) -> None:
        self._dense.refuse(error)
        self._sparse.refuse(error)

    def close(self, *, failed: bool) -> None:
        self._sparse.close(failed=failed)
        self._dense.close(failed=failed)

    def see_off(self, *, failed: bool) -> None:
        self._sparse.see_off(failed=failed)

    def forget_in_child(self) -> None:
        self._sparse.forget_in_child()

    def describe(self) -> str:
        names = ", ".join(info.name for info in self._setup.infos if info.rows)
        return f"{self._dense.describe()}; the rows of {names}: {self._sparse.describe()}"


def _part(setup: Setup, chosen: Sequence[int]) -> Setup:
    return dataclasses.replace(
        setup,
        parameters=[setup.parameters[number] for number in chosen],
        infos=[setup.infos[number] for number in chosen],
        memory=_Chosen(setup.memory, chosen),
    )


class _Chosen(Sequence[ParameterMemory]):
    """Some of a sequence's items, which may not all be there yet."""

    def __init__(self, whole: Sequence[ParameterMemory], chosen: Sequence[int]) -> None:
        self._whole = whole
        self._chosen = chosen

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index: Any) -> Any:
        return self._whole[self._chosen[index]]


class HybridEngine:
    """Two engines as one: by a parameter's number each call goes to the one that has it."""

    every_parameter = True  # collectives need it

    def __init__(
        self,
        parameters: Sequence[ParameterInfo],
        dense: RingBackend,
        dense_numbers: Sequence[int],
        sparse: ServedBackend,
        sparse_numbers: Sequence[int],
    ) -> None:
        self.parameters = parameters
        self._dense, self._sparse = dense.engine, sparse.engine
        self._dense_numbers, self._sparse_numbers = dense_numbers, sparse_numbers
        self._number = {whole: own for own, whole in enumerate(dense_numbers)}
        self._row_number = {whole: own for own, whole in enumerate(sparse_numbers)}
        # whoever waits for one of them learns of the other's failure
        if self._dense.chunks:
            sparse.norm.share(self._dense)
        self._dense.progress.beside.append(self._sparse.progress)
        self._sparse.progress.beside.append(self._dense.progress)

    @property
    def progress(self) -> Progress:
        return self._dense.progress

    @property
    def counters(self) -> Counters:
        """Of both, added up."""
        a, b = self._dense.counters, self._sparse.counters
        total = Counters(
            **{
                spec.name: getattr(a, spec.name) + getattr(b, spec.name)
                for spec in dataclasses.fields(Counters)
                if spec.name != "waited_s_by_parameter"
            }
        )
        for counters, numbers in ((a, self._dense_numbers), (b, self._sparse_numbers)):
            for own, seconds in counters.waited_s_by_parameter.items():
                total.waited_s_by_parameter[numbers[own]] = seconds
        return total

    @property
    def is_rank_zero(self) -> bool:
        return self._dense.is_rank_zero

    @property
    def failed(self) -> bool:
        return self._dense.failed or self._sparse.failed

    @property
    def queue_depth(self) -> int:
        return self._dense.queue_depth + self._sparse.queue_depth

    # Dense parameters.
    def push(self, parameter: int, step: int, *, flags: int = 0, with_value: bool = False) -> None:
        self._dense.push(self._number[parameter], step, flags=flags, with_value=with_value)

    def is_complete(self, parameter: int) -> bool:
        own = self._number.get(parameter)
        return own is None or self._dense.is_complete(own)

    def wait(self, parameter: int, step: int) -> None:
        self._dense.wait(self._number[parameter], step)

    def grad_norm(self, step: int) -> float | None:
        """Of all parameters: the servers' part is told the total."""
        return self._sparse.grad_norm(step)

    # A step.
    def start_step(self) -> None:
        self._sparse.start_step()
        self._dense.start_step()

    def end_step(self, step: int) -> None:
        self._sparse.end_step(step)
        self._dense.end_step(step)

    def learn_priorities(self, order: Sequence[int]) -> None:
        self._dense.learn_priorities([self._number[p] for p in order if p in self._number])
        self._sparse.learn_priorities([self._row_number[p] for p in order if p in self._row_number])

    # Buffers.
    def publish_blob(self, which: int, step: int, data: bytes) -> None:
        self._dense.publish_blob(which, step, data)

    def fetch_blob(self, which: int, step: int) -> memoryview:
        return self._dense.fetch_blob(which, step)

    # The end.
    def raise_if_failed(self) -> None:
        self._dense.raise_if_failed()
        self._sparse.raise_if_failed()

    def give_up(self, error: BaseException) -> None:
        self._sparse.give_up(error)
        self._dense.give_up(error)

    def close(self, *, failure: BaseException | None = None) -> None:
        failure = failure or self._sparse.progress.error or self._dense.progress.error
        try:
            self._dense.close(failure=failure)
        except ForepropError as error:
            self._sparse.close(failure=error)
            raise
        self._sparse.close(failure=failure or self._dense.progress.error)
