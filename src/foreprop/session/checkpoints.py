"""What a session's checkpoints are made of: averages, masters, tables, the optimizer's state.

*Masters* are the parameters in full: with ``wire_dtype`` or a codec servers may have more of them
than the workers see. *Residuals* are what lossy codecs have kept back of the gradients. Optimizer
state that servers have passes through the user's optimizer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from foreprop.backends.composedworker import ServedBackend
from foreprop.config import LOGGER
from foreprop.engine.tensors import AVERAGE
from foreprop.errors import ConfigError, TrainingLoopError
from foreprop.features.tables.parts import VALUES
from foreprop.params.moving_average import averaged_state_dict, averages_from
from foreprop.session.training import Training

if TYPE_CHECKING:
    from foreprop.backends.servedstate import ServedState
    from foreprop.features.collectives.gradientsums import LocalState
    from foreprop.features.compression.remoteresiduals import NodeResiduals, ServersResiduals
    from foreprop.features.compression.residuals import Residuals
    from foreprop.features.tables.remotetables import RemoteTables
    from foreprop.features.tables.rowparameter import RemoteRows

    KeptState = LocalState | ServedState

Values = Mapping[str, torch.Tensor]
"""Each parameter's tensor, by its name."""


class Checkpoints:
    """What one session gives away and takes between its steps. Training thread."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._start: Callable[[], tuple[Values, Values]] | None = None

    def ema_state_dict(self) -> dict[str, Any]:
        training = self._training
        self._check_averages()
        training.flush()
        if training.added is None:
            averages = self._by_number(lambda state: state.pull_averages(training.completed))
        else:
            averages = training.added.averages_of(self._own_parameters())
        with self._tables_aside(averages, AVERAGE) as averages:
            return averaged_state_dict(training.user.model, self._own_parameters(), averages)

    def load_ema_state_dict(self, state: Mapping[str, Any]) -> None:
        training = self._training
        self._check_averages()
        training.flush()
        with self.tables_left_out():
            averages = averages_from(state, training.user.model, self._own_parameters())
        if training.added is not None:
            training.added.put_averages(self._own_parameters(), averages)
            return
        for backend, numbers in training.backends.parts:
            own = [averages[number] for number in numbers]
            backend.state.replace_averages(training.completed, own)

    def master_state_dict(self) -> dict[str, Any]:
        with torch.no_grad(), self._tables_aside(self.masters(), VALUES) as masters:
            return averaged_state_dict(self._training.user.model, self._own_parameters(), masters)

    def masters(self) -> Sequence[torch.Tensor]:
        """Each parameter's values in full, by the session's numbers."""
        training = self._training
        training.flush()
        if training.completed or self._start is None:
            return self._by_number(lambda state: state.pull_masters(training.completed))
        (shown, full), rounded = self._start(), self._rounded()
        masters: list[torch.Tensor] = []
        for own in training.parameters:
            masters.append(own.parameter)
            if own.index in rounded and own.name in full:
                with torch._C.DisableTorchFunctionSubclass():
                    now = own.parameter.detach().cpu()
                    # but for elements that have been changed by hand since they were shown
                    masters[-1] = torch.where(now == shown[own.name], full[own.name], now)
        return masters

    def begin_rounded(self, shown: Values, start: Callable[[], tuple[Values, Values]]) -> None:
        """Show the workers' values as they were, where servers have begun with them in full.

        ``start`` gives what was ``shown``, and the same in full, to whoever asks before the first
        step.
        """
        self._training.flush()  # rank 0's values have come
        self._start, rounded = start, self._rounded()
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for own in self._training.parameters:
                if own.index in rounded and own.name in shown:
                    with _unsafe_preserve_version_counter(own.parameter):
                        own.parameter.copy_(shown[own.name])

    def forget_start(self) -> None:
        """Let servers be asked from now on: a step has been made, or there are others."""
        self._start = None

    def _rounded(self) -> set[int]:
        # parameters that servers update, and so may have more of, but for remote tables
        training = self._training
        parts = training.backends.parts
        served = (own for backend, own in parts if isinstance(backend, ServedBackend))
        return {
            number
            for numbers in served
            for number in numbers
            if training.infos[number].init is None
            and (training.infos[number].rows or not training.by_workers)
        }

    def state_dict(self) -> dict[str, Any]:
        training = self._training
        training.flush()
        averaging = training.averaging
        step = training.completed + 1 if averaging is None else averaging.rounds.step
        found: dict[str, Any] = {}
        for kept in self._kept():
            for name, arrays in kept.whole(step).items():
                found.setdefault(name, {}).update(arrays)
        return {"residuals": found}

    def replace_residuals(self, whole: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Give this rank's residuals, by parameter, to another backend."""
        for kept in self._kept():
            kept.replace(whole)

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        from foreprop.features.compression.residuals import check_states, divided, entries

        check_states(states)
        training = self._training
        world, averages = training.world, training.config.reduction == "mean"
        training.flush()
        taken: set[tuple[str, str]] = set()
        for kept in self._kept():
            own = divided(states, ranks=kept.ranks, world_size=world.size, averages=averages)
            taken |= kept.replace(own)
        given = {(name, key) for state in states for name, key, _ in entries(state)}
        if world.rank == 0 and (lost := sorted({name for name, _ in given - taken})):
            LOGGER.warning(
                "what codecs have kept back of the gradients of %s is dropped: compression is %r"
                " now, and was another one",
                *(", ".join(lost), training.config.compression),
            )

    def _kept(self) -> Iterator[Residuals | NodeResiduals | ServersResiduals]:
        for backend in self._training.backends.all:
            if backend.codecs is not None:
                yield from backend.codecs.kept

    def _by_number(
        self, pull: Callable[[KeptState], Sequence[torch.Tensor]]
    ) -> Sequence[torch.Tensor]:
        found: dict[int, torch.Tensor] = {}
        for backend, numbers in self._training.backends.parts:
            found.update(zip(numbers, pull(backend.state), strict=True))
        return [found[number] for number in sorted(found)]

    def _check_averages(self) -> None:
        if self._training.config.ema is None:
            raise ConfigError(
                "there are no moving averages: set their decay, parallelize(..., ema=0.999)"
            )

    def _own_parameters(self) -> list[torch.nn.Parameter]:
        return [synchronised.parameter for synchronised in self._training.parameters]

    @contextlib.contextmanager
    def _tables_aside(
        self, values: Sequence[torch.Tensor], entry: str
    ) -> Iterator[Sequence[torch.Tensor]]:
        """Yield the values with those of remote tables, which are set aside until it ends."""
        remote = self._training.remote
        if remote is None:
            yield [value.detach() for value in values]
            return
        remote.check_whole()
        with remote.aside():
            yield remote.put_whole(values, entry)

    def tables_left_out(self) -> contextlib.AbstractContextManager[None]:
        remote = self._training.remote
        return contextlib.nullcontext() if remote is None else remote.aside()

    def rows(self, name: str, numbers: torch.Tensor) -> torch.Tensor:
        training = self._training
        found = next((own for own in training.parameters if own.name == name), None)
        if found is None:
            names = [own.name for own in training.parameters]
            raise ConfigError(f"no parameter is called {name!r}; there are {names}")
        if training.infos[found.index].init is not None:
            return cast("RemoteRows", found.arrival).rows(numbers)
        with torch.no_grad():
            on_its_device = numbers.to(found.parameter.device)
            return torch.nn.functional.embedding(on_its_device, found.parameter)

    @property
    def tables(self) -> RemoteTables:
        return self._training.remote or remote_tables(self._training)

    def pull_state(self) -> None:
        training = self._training
        if training.remote is not None:
            training.remote.check_whole()
        announced = 0 if training.settings is None else training.settings.announced_step
        if announced > training.completed and not training.by_workers:
            raise TrainingLoopError(
                "the optimizer's state is used between backward() and step(), in step"
                f" {training.completed + 1}: servers have been sent gradients, and some may be of"
                " the next state already. Use it after step(), or set parallelize(...,"
                " update='workers')."
            )
        training.settle_all()
        for backend in training.backends.all:
            backend.state.pull(training.completed)

    def replace_state(self) -> None:
        self._training.settle_all()  # the updates so far go by the old state
        for backend in self._training.backends.all:  # servers clear it: they are last
            backend.state.replace(self._training.completed)


def remote_tables(training: Training) -> RemoteTables:
    """All remote tables; there may be none."""
    from foreprop.features.tables.remotetables import RemoteTables

    infos = training.infos
    remote = [table for table in training.tables if infos[table.owner.index].init is not None]
    return RemoteTables(
        cast("list[RemoteRows]", remote),
        training.user.optimizer,
        infos,
        training.board("tables"),
        world=training.world,
        config=training.config,
    )
