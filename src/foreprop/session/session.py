"""A model, its optimizer and the engine between them."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from foreprop.cluster.parting import wait_for_all
from foreprop.cluster.rendezvous import Board, step_board
from foreprop.cluster.world import World
from foreprop.collectives.hybrid import connect, is_served, needs_another_backend
from foreprop.config import Config
from foreprop.core.manifest import BUFFERS_BLOB, ITEMSIZE_BYTES, NO_GROUP, ParameterInfo
from foreprop.core.norm import SquareSum
from foreprop.core.rowinit import RowInit
from foreprop.errors import ConfigError, ForepropError, TrainingLoopError
from foreprop.gradients.averaged import AveragedParameter
from foreprop.gradients.averaging import Averaging
from foreprop.gradients.settlingstate import give_plain_state
from foreprop.gradients.shownstate import ShownState
from foreprop.gradients.update import Needs, SettingsMark, agree, settled_beforehand
from foreprop.hooks import buffers, compiled
from foreprop.hooks.compute_trace import ComputeTrace
from foreprop.hooks.modelhooks import (
    BeforeModule,
    CallingHook,
    before_forward,
    before_loading,
    keep_copies_plain,
)
from foreprop.hooks.optimizercopies import OWN_ATTRIBUTES, keep_copy_plain
from foreprop.hooks.scripted import watch_scripts
from foreprop.hooks.uncaught import watch_uncaught_errors
from foreprop.numerics.loss_scale import LossScale, is_scaled, refuse_scaler
from foreprop.numerics.moving_average import averaged_state_dict, averages_from
from foreprop.observe.trace import TraceRecorder, trace_path
from foreprop.path.backend import Engine, Setup, part
from foreprop.path.memory import Memory
from foreprop.path.optimizer import (
    can_be_served,
    check_row_wise,
    named_parameters,
    others_named,
)
from foreprop.path.parameter import SynchronisedParameter, Watched
from foreprop.path.stalereaders import StaleReaders
from foreprop.path.tensors import AVERAGE
from foreprop.path.waiting import is_differentiable
from foreprop.session.advice import give_advice
from foreprop.session.contract import Session
from foreprop.session.firsterror import error_under_way, put_behind
from foreprop.tables.embeddings import Embeddings, check_kind, check_rest
from foreprop.tables.kept import VALUES
from foreprop.tables.lookahead import lookahead
from foreprop.tables.remote import RemoteTable
from foreprop.tables.rowparameter import RowParameter
from foreprop.tables.tables import RemoteTables

if TYPE_CHECKING:  # what only architecture="auto" and slice_elems="auto" need
    from foreprop.auto.planning import Outlook, Planning
    from foreprop.auto.stepprobe import StepProbe

_open_sessions: weakref.WeakSet[ConnectedSession] = weakref.WeakSet()
_managed: dict[int, tuple[str, weakref.ref[ConnectedSession]]] = {}
"""The parameters of all open sessions, by id: their names there."""


class ConnectedSession(Session):
    """A session of several processes, or of one with servers. See `Session` for what it offers."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        world: World,
        config: Config,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.config = config
        self.completed = 0  # steps since the backend was connected
        self.fixed_passes = config.backward_passes
        self.reduces_by_kind = config.sparse_reduction not in (None, config.reduction)
        self._world = world
        self._model = model
        self._closed = False
        self._optimizer = optimizer or torch.optim.SGD(model.parameters())
        own = list(named_parameters(model, self._optimizer))
        self._embeddings = Embeddings(model, own, self._optimizer, config)
        scaled = scaler is not None and scaler.is_enabled()
        self._choice = settled_beforehand(
            config,
            optimizer,
            scaler=scaled,
            dense=len(own) > len(self._embeddings.row_wise),
            collectives=not is_served(config),
        )
        """Who updates; None until the first step has shown it."""
        self._needs = Needs()
        self._settings: SettingsMark | None = None  # when the first gradient came
        self._stepped = optimizer is None  # or there is nothing to step
        self._handled_before = sys.exception()
        self.thread_id = threading.get_ident()
        self._loss_scale: LossScale | None = None
        if scaler is not None and scaled and not self._by_workers:
            self._loss_scale = LossScale(scaler, self._optimizer)
        check_rest(model, own)
        _check_unmanaged(own)
        self._optimized = len(own)
        others = others_named(model, self._optimizer)
        self._named = own + [entry for entry in others if id(entry[1]) not in _managed]
        self._managed_ids = {id(parameter) for _, parameter, _ in self._named} | _managed.keys()
        self._buffers = buffers.ModelBuffers(model)
        self._compute_trace: ComputeTrace | None = None
        self._restore: list[Callable[[], None]] = [self._embeddings.restore]
        self._trace: TraceRecorder | None = None
        self._completed_before = 0
        self._norm_before: float | None = None  # of the last of those steps
        self._planning: Planning | None = None
        self._outlook: Outlook | None = None
        session = weakref.ref(self)
        self._state = ShownState(
            self._optimizer,
            fetch=lambda: _alive(session)._pull_state(),
            forget=lambda: _alive(session)._backend.drop_state(),
            replace=lambda: _alive(session)._replace_state(),
        )
        self._forward_hook: RemovableHandle | None = None
        self._connected = False
        self.leaves_rows = False
        self.stale_readers = StaleReaders() if config.check_stale else None
        try:
            self._connect(self._embeddings.row_wise)
            if self.rank != 0:
                self._fetch_buffers()
            self._adopt()
        except BaseException as error:
            self._release(failure=error)
            raise
        self._planning = self._begin_planning()

    # The start.
    def _connect(self, row_wise: Collection[str]) -> None:
        """Synchronise the parameters of these names row by row, the others in slices or chunks."""
        self.completed = 0
        self._buffers_step = 0
        self._announced: Any = None
        self._announced_step = 0
        self._use_order: list[int] = []
        self._begun = False
        self._in_first_forward = False
        self._parameters: list[SynchronisedParameter | AveragedParameter] = []
        self._averaging = Averaging(
            self._optimizer, self.fixed_passes, collectives=not is_served(self.config)
        )
        self._tables: list[RowParameter | RemoteTable] = []
        self._backend = connect(self._setup(row_wise))
        self.engine: Engine = self._backend.engine
        self._connected = True
        try:
            self._parameters += [
                self._synchronised(index, name, parameter)
                for index, (name, parameter, _) in enumerate(self._named)
            ]
            self._tables += [
                p for p in self._parameters if isinstance(p, (RowParameter, RemoteTable))
            ]
            self._remote = self._find_remote_tables()
            self._backend.start(self._parameters)
            if self.rank == 0 and self.world_size > 1:
                self._publish_buffers(0)
        except BaseException as error:
            self._backend.refuse(error)
            raise
        for parameter in self._parameters:
            parameter.watch()
            _managed[id(parameter.parameter)] = (parameter.name, weakref.ref(self))
        self._forward_hook = before_forward(self._model, buffers.FirstForward(self))

    def _setup(self, row_wise: Collection[str]) -> Setup:
        model_parameters = self._model.parameters()
        return Setup(
            world=self._world,
            config=self.config,
            optimizer=self._optimizer,
            parameters=[parameter for _, parameter, _ in self._named],
            infos=[
                _parameter_info(
                    *entry,
                    rows=entry[0] in row_wise,
                    sparse=entry[0] in self._embeddings.sparse,
                    init=self._embeddings.remote.get(entry[0]),
                )
                for entry in self._with_groups(row_wise)
            ],
            frozen=[p for p in model_parameters if id(p) not in self._managed_ids],
            buffers=self._buffers,
            memory=self._parameters,
            make_trace=self._make_trace,
            loss_scale=self._loss_scale,
            by_workers=self._by_workers,
        )

    def _with_groups(
        self, row_wise: Collection[str]
    ) -> Iterator[tuple[str, torch.nn.Parameter, int]]:
        """With the group that servers need to know, if they are to update the parameter."""
        for name, parameter, group in self._named:
            served = not self._by_workers or name in row_wise
            yield name, parameter, group if served else NO_GROUP

    @property
    def _by_workers(self) -> bool:
        """Whether it is settled that workers update all but tables by rows."""
        return self._choice is not None and self._choice.by_workers

    def _synchronised(
        self, index: int, name: str, parameter: torch.nn.Parameter
    ) -> SynchronisedParameter | AveragedParameter:
        if self.engine.parameters[index].init is not None:
            return RemoteTable(index, name, parameter, self, self._backend.rows)
        if self.engine.parameters[index].rows:
            return RowParameter(index, name, parameter, self, self._backend.rows)
        wanted = index < self._optimized
        if wanted and self._choice is not None and not self._choice.by_workers:
            return SynchronisedParameter(index, name, parameter, self)
        averaged = AveragedParameter(index, name, parameter, self, self._averaging, wanted=wanted)
        self._averaging.parameters.append(averaged)
        return averaged

    def _find_remote_tables(self) -> RemoteTables:
        return RemoteTables(
            [p for p in self._parameters if isinstance(p, RemoteTable)],
            self.engine.parameters,
            self._optimizer,
            self._backend,
            world=self._world,
            config=self.config,
        )

    def _make_trace(self, session_id: str) -> TraceRecorder | None:
        if self.config.trace is not None and self._trace is None:
            path = trace_path(Path(self.config.trace), f"worker-{self.rank}", session_id)
            self._trace = TraceRecorder(path, f"worker {self.rank}", self.rank)
        return self._trace

    def _adopt(self) -> None:
        self._adopt_optimizer()
        self._adopt_model()
        if self._loss_scale is not None:
            session = weakref.ref(self)
            self._restore.append(self._loss_scale.adopt(lambda: _alive(session).grad_norm))
        self._restore += [*give_advice(), compiled.watch_entries(self), *watch_scripts()]
        self._restore += keep_copies_plain()
        if self.stale_readers is not None:
            self._restore.append(self.stale_readers.watch())
        if self._embeddings.row_wise or self._embeddings.candidates:
            self._restore.append(lookahead.join())
        _open_sessions.add(self)
        _close_at_exit()

    def _adopt_optimizer(self) -> None:
        """The user's optimizer object stays; its step and zero_grad become ours."""
        optimizer = self._optimizer
        session = weakref.ref(self)
        own_step, own_zero_grad = optimizer.step, optimizer.zero_grad
        had = {name: name in vars(optimizer) for name in ("step", "zero_grad")}

        @torch.optim.Optimizer.profile_hook_step
        def later(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            if not _alive(session)._by_workers:
                refuse_scaler(self)
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            with _alive(session).told_if_it_fails():
                _alive(session)._step()
            return loss

        def step(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            alive = _alive(session)
            alive._stepped = True
            if alive._choice is None and is_scaled(self):
                alive._need("a GradScaler leaves it to the optimizer to unscale gradients")
                alive._begin()
            if alive._makes_whole_steps():
                with alive.told_if_it_fails():
                    result = alive._step_whole(own_step, *args, **kwargs)
            else:
                result = later(self, *args, **kwargs)
            self._opt_called = True  # type: ignore[attr-defined]  # schedulers look at this
            return result

        def zero_grad(self: torch.optim.Optimizer, set_to_none: bool = True) -> None:
            _alive(session)._discard_gradients(set_to_none)
            own_zero_grad(set_to_none=set_to_none)

        before = {k: v for k, v in vars(optimizer).items() if k in OWN_ATTRIBUTES}
        if hasattr(own_step, "_wrapped_by_lr_sched"):
            step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
        optimizer.zero_grad = types.MethodType(zero_grad, optimizer)  # type: ignore[method-assign]

        def restore() -> None:
            for name, own in (("step", own_step), ("zero_grad", own_zero_grad)):
                if had[name]:
                    setattr(optimizer, name, own)
                else:
                    vars(optimizer).pop(name, None)
            give_plain_state(optimizer)

        self._restore.append(restore)
        if not self._by_workers:
            self._state.watch()

        def pull_state(*_: Any) -> None:
            _alive(session)._state.lend()

        def drop_state(*_: Any) -> None:
            _alive(session)._state.take_back()

        self._restore.append(keep_copy_plain(optimizer, before, pull_state, drop_state))
        handles = [
            optimizer.register_state_dict_pre_hook(CallingHook(pull_state)),
            optimizer.register_state_dict_post_hook(CallingHook(drop_state)),
            optimizer.register_load_state_dict_pre_hook(
                # the updates so far go by the old state
                CallingHook(lambda *_: _alive(session)._settle_all())
            ),
            optimizer.register_load_state_dict_post_hook(
                CallingHook(lambda _: _alive(session)._state.loaded())
            ),
        ]
        self._restore += [handle.remove for handle in handles]

    def _adopt_model(self) -> None:
        model: Any = self._model
        if self._trace is not None:
            self._compute_trace = ComputeTrace(model, self._trace, lambda: self.completed + 1)
            self._restore.append(self._compute_trace.remove)
        handles = [
            before_loading(module, buffers.BeforeLoadStateDict(self))
            for module in model.modules()  # a part may be loaded by itself
            if next(module.parameters(recurse=False), None) is not None
        ]
        if self.config.wait == "modules":
            handles += [before_forward(module, BeforeModule()) for module in model.modules()]
        if self.config.whole_tables not in (None, "all"):
            handles.append(model.register_state_dict_pre_hook(buffers.StateDictBegins(self)))
            handles.append(model.register_state_dict_post_hook(buffers.StateDictEnds(self)))
        handles += self._remote.watch(self._embeddings.modules_of)
        if self._buffers:
            handles.append(before_forward(model, buffers.BeforeForward(self)))
            handles.append(model.register_state_dict_pre_hook(buffers.BeforeStateDict(self)))
        self._restore += [handle.remove for handle in handles]

    def add_undo(self, *functions: Callable[[], None]) -> None:
        """Call these when the session ends."""
        self._restore += functions

    # What a user asks for.
    @property
    def rank(self) -> int:
        return self._world.rank

    @property
    def world_size(self) -> int:
        return self._world.size

    @property
    def planning(self) -> bool:
        return self._planning is not None

    def flush(self) -> None:
        self._settle_all()
        self._settle_tables()

    def _settle_tables(self) -> None:
        for parameter in self._parameters:
            parameter.settle_whole()

    def saving(self, begins: bool) -> None:
        """What is read until it ends is a checkpoint's: see `Config.whole_tables`."""
        self.leaves_rows = begins and not self._remote.keeps_whole

    def _settle_all(self) -> None:
        """Wait for what the servers send by themselves."""
        self.engine.raise_if_failed()
        self.engine.start_step()
        for parameter in self._parameters:
            parameter.check_stepped()
            parameter.settle()

    @property
    def grad_norm(self) -> float | None:
        return self.engine.grad_norm(self.completed) if self.completed else self._norm_before

    def ema_state_dict(self) -> dict[str, Any]:
        self._check_averages()
        self.flush()
        averages = self._backend.pull_averages(self.completed)
        with self._tables_aside(averages, AVERAGE) as averages:
            return averaged_state_dict(self._model, self._own_parameters(), averages)

    def load_ema_state_dict(self, state: Mapping[str, Any]) -> None:
        self._check_averages()
        self.flush()
        with self._remote.aside():
            averages = averages_from(state, self._model, self._own_parameters())
        self._backend.replace_averages(self.completed, averages)

    def master_state_dict(self) -> dict[str, Any]:
        self.flush()
        masters = self._backend.pull_masters(self.completed)
        with torch.no_grad(), self._tables_aside(masters, VALUES) as masters:
            return averaged_state_dict(self._model, self._own_parameters(), masters)

    # Tables row by row.
    def rows(self, name: str, numbers: torch.Tensor) -> torch.Tensor:
        found = self._parameter(name)
        if isinstance(found, RemoteTable):
            return found.rows(numbers)
        with torch.no_grad():
            on_its_device = numbers.to(found.parameter.device)
            return torch.nn.functional.embedding(on_its_device, found.parameter)

    def set_rows(self, name: str, numbers: torch.Tensor, values: torch.Tensor) -> None:
        self._remote.set_rows(name, numbers, values)

    def save_tables(self, folder: str | os.PathLike[str]) -> None:
        self._remote.save(folder)

    def load_tables(self, folder: str | os.PathLike[str]) -> None:
        self._remote.load(folder)

    def _parameter(self, name: str) -> SynchronisedParameter | AveragedParameter:
        for parameter in self._parameters:
            if parameter.name == name:
                return parameter
        raise ConfigError(
            f"no parameter is called {name!r}; there are {[p.name for p in self._parameters]}"
        )

    @contextlib.contextmanager
    def _tables_aside(
        self, values: Sequence[torch.Tensor], entry: str
    ) -> Iterator[Sequence[torch.Tensor]]:
        """While a state dict is made with other values: with those of the remote tables, too."""
        self._remote.check_whole()
        with self._remote.aside():
            yield self._remote.put_whole(values, entry)

    def _own_parameters(self) -> list[torch.nn.Parameter]:
        return [synchronised.parameter for synchronised in self._parameters]

    def _check_averages(self) -> None:
        if self.config.ema is None:
            raise ConfigError(
                "there are no moving averages: set their decay, parallelize(..., ema=0.999)"
            )

    def stats(self) -> dict[str, Any]:
        counters = self.engine.counters
        names = [info.name for info in self.engine.parameters]
        return {
            "steps": self._completed_before + self.completed,
            "pushes": counters.pushes,
            "pushed_bytes": counters.pushed_bytes,
            "replies": counters.replies,
            "reply_bytes": counters.reply_bytes,
            "queue_depth": self.engine.queue_depth,
            "max_queue_depth": counters.max_queue_depth,
            "waits": counters.waits,
            "waited_s": counters.waited_s,
            "waited_s_by_parameter": {
                names[index]: seconds for index, seconds in counters.waited_s_by_parameter.items()
            },
        }

    def close(self) -> None:
        first = error_under_way(self._handled_before)
        try:
            self._close(first)
        except ForepropError as error:
            if first is None:
                raise
            put_behind(first, error)

    def _close(self, first: BaseException | None) -> None:
        if self._closed:
            return
        try:
            if not self.engine.failed:
                self._settle_all()
                self.saving(True)
                self._settle_tables()
        except ForepropError as error:
            self._release(failure=first or error)
            raise
        self._release(failure=None)

    @contextlib.contextmanager
    def told_if_it_fails(self) -> Iterator[None]:
        """What is broken off here cannot be gone on with: the other ranks need not wait for it."""
        try:
            yield
        except BaseException as error:
            self.give_up(error)
            raise

    def give_up(self, error: BaseException) -> None:
        """This rank's training has ended with an error: tell the others, whatever comes after."""
        if self._connected and not self.engine.failed:
            self.engine.give_up(error)

    def __enter__(self) -> ConnectedSession:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
            return
        try:
            self._release(failure=error)
        except ForepropError as second:
            put_behind(error, second)

    def __repr__(self) -> str:
        step = self._completed_before + self.completed
        return f"<foreprop.Session rank {self.rank} of {self.world_size}, step {step}>"

    def describe(self) -> str:
        interface = f" (interface={self.config.interface})" if self.config.interface else ""
        return self._backend.describe() + interface

    # A step.
    @property
    def eager(self) -> bool:
        return self.completed >= self._learning_steps

    @property
    def _learning_steps(self) -> int:
        """With several models in one process (a GAN) the first step shows only half the loop."""
        return 1 if self._world.sessions < 2 else 2

    def begin_pushing(self) -> None:
        """Announce the optimizer's numbers before a step's first push, if they have changed."""
        step = self.completed + 1
        if self._announced_step == step:
            return
        self._state.take()
        self._begin()
        if self._by_workers and not self._tables:
            return
        self._check_same_parameters()
        numbers = self._backend.numbers()
        if numbers != self._announced:
            self._backend.announce(step)
            self._announced = numbers
        self._announced_step = step

    def forward_started(self) -> None:
        """What was used before the model's first forward pass (a copy, a print) does not count."""
        if not self._in_first_forward:
            self._in_first_forward = True
            self._use_order.clear()
            for parameter in self._parameters:
                parameter.watch()

    def first_use_begins(self, parameter: Watched) -> None:
        if self._probe is not None:
            self._probe.asked(parameter)

    def is_first_use(self, parameter: Watched, result: Any) -> bool:
        if not self._in_first_forward and not is_differentiable(result):
            return False
        if self._probe is not None:
            self._probe.used(parameter)
        self._use_order.append(parameter.index)
        return True

    def memory_of(self, parameter: torch.Tensor) -> Memory:
        return self._backend.memory_of(parameter)

    def gradient_ready(self, parameter: Watched) -> None:
        if self._compute_trace is not None:
            self._compute_trace.gradient_ready(parameter.name)
        if self._probe is not None:
            self._probe.ready(parameter)
        if self._choice is None and self._settings is None:
            self._settings = SettingsMark(self._optimizer)

    def aggregated_gradient(self, parameter: int) -> torch.Tensor:
        """What the last update of the parameter was made with, flat, from who made it."""
        return self._backend.pull_gradient(parameter, self.completed)

    def gradients_read(self, parameter: Watched, *, norm: bool = False) -> None:
        """Somebody reads or edits this rank's own gradient: have it averaged, and the others'."""
        # collectives average all or nothing, and what they update themselves is not to be had yet
        if parameter.index < self._optimized or self.engine.every_parameter:
            what = "the norm of gradients is taken" if norm else f"{parameter.name}.grad is used"
            self._need(f"{what} between backward() and step()", norm=norm)
        self._begin()
        self._averaging.average_all(every=self.engine.every_parameter)

    def check_layout(self, parameter: int, layout: torch.layout) -> None:
        info = self.engine.parameters[parameter]
        sparse = layout != torch.strided
        if sparse and info.group != NO_GROUP and not self._by_workers:
            check_row_wise(self._optimizer, {info.name: info.group})
        check_kind(info, self.config.aggregation, sparse=sparse)

    def _begin(self) -> None:
        """Before the first gradient leaves: who updates, and the priorities."""
        if self._begun:
            return
        self._begun = True
        if self._choice is None or self._choice.by_workers:
            self._choose()
        self._learn_priorities()

    def square_sums(self, round_: int) -> Sequence[SquareSum]:
        return self._backend.square_sums(round_)

    def _need(self, reason: str, *, norm: bool = False) -> None:
        """The first step shows something that servers cannot do."""
        if self._needs.reason is None:
            self._needs = Needs(reason, norm)

    def _choose(self) -> None:
        """What the first step has shown, on whatever rank, decides."""
        self._look_at_first_step()
        self._state.take()
        self._choice = choice = agree(self._board("update"), self._needs, self._choice)
        self._report(choice.text)
        if choice.by_workers:
            self._averaging.measures = choice.norm and self._backend.can_measure
            with self._state.quietly():
                self._backend.leave_updates()
            self._state.end()
            return
        for averaged in [p for p in self._averaging.parameters if p.index < self._optimized]:
            self._averaging.parameters.remove(averaged)
            self._parameters[averaged.index] = self._served_instead(averaged)
        if self._planning is not None:
            self._planning = self._begin_planning()

    def _look_at_first_step(self) -> None:
        """What leaves no other trace."""
        replaced = [p.name for p in self._averaging.parameters if p.is_replaced]
        if replaced:
            self._need(f"the gradient of {replaced[0]} is replaced after backward()")
        several = [p.passes for p in self._averaging.parameters if p.passes - p.discards > 1]
        if several and self.fixed_passes is None:
            self._need(f"{max(several)} backward passes make the first step, and may vary")
        if self._settings is not None and self._settings.is_set():
            self._need("the optimizer's settings (lr, ...) change between backward() and step()")

    def _served_instead(self, averaged: AveragedParameter) -> SynchronisedParameter:
        averaged.detach()
        served = SynchronisedParameter(averaged.index, averaged.name, averaged.parameter, self)
        passes, discards = averaged.passes - averaged.discards, averaged.discards
        served.take_over(averaged.gradient, averaged.start, passes=passes, discards=discards)
        return served

    def _board(self, key: str) -> Board:
        about = f"{key}/{self._backend.session_id}"
        return step_board(self._world, self.config, about, self.engine.raise_if_failed)

    def _makes_whole_steps(self) -> bool:
        """Whether the user's own step is called, when all gradients are here."""
        return self._by_workers and not self._averaging.defers()

    def _step_whole(self, own_step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The user's own `step()`, on averaged gradients; it may have a closure that makes them."""
        self.engine.raise_if_failed()
        if not (args or kwargs):
            self._finish_rounds()
            self._averaging.receive_all()
        result = own_step(*args, **kwargs)
        if args or kwargs:
            self._finish_rounds()
        self._end_step()
        return result

    def _step(self) -> None:
        self.engine.raise_if_failed()
        self.saving(False)  # if a state_dict() was broken off
        if self._loss_scale is not None:
            self._loss_scale.check_stepping()
        self._check_optimizer_unchanged()
        if self._announced_step > self.completed:
            self._state.check_unedited()
        self._finish_rounds()
        if self._by_workers:
            self._averaging.defer_step()
        self._end_step()

    def _finish_rounds(self) -> None:
        """All gradients of the step leave that have not left."""
        if self._probe is not None:
            self._probe.end()
        self._begin()
        step = self.completed + 1
        self.begin_pushing()
        with torch._C.DisableTorchFunctionSubclass():
            for parameter in self._parameters:
                parameter.finish_step(step)

    def _end_step(self) -> None:
        self._averaging.end_step(learning=not self.eager)
        step = self.completed = self.completed + 1
        for parameter in self._tables:
            parameter.prefetch()
        if self.rank == 0 and self.world_size > 1:
            self._publish_buffers(step)
        self.engine.end_step(self._averaging.rounds.step - 1)
        self._plan()

    # architecture="auto", slice_elems="auto".
    def _begin_planning(self) -> Planning | None:
        config = self.config
        if self.world_size == 1 or "auto" not in (config.architecture, config.slice_elems):
            return None
        from foreprop.auto.planning import Planning

        return Planning(
            config,
            self._world,
            self._parameters,
            self.engine.parameters,
            self._embeddings.candidates,
            type(self._model).__name__,
            servable=can_be_served(self._optimizer),
        )

    @property
    def _probe(self) -> StepProbe | None:
        return None if self._planning is None else self._planning.probe

    def _plan(self) -> None:
        """After a step: measure the next one, or make and adopt the plan, or see how it did."""
        if self._outlook is not None:
            self._report(self._outlook.end_step())
            if self._outlook.is_over:
                self._outlook = None
        if self._planning is None:
            return
        enough = self._planning.end_step()
        if self._probe is not None:
            self._settle_all()  # what is measured is to be the device's time, or the links'
        if enough:
            self._adopt_plan(self._planning)
        elif self._probe is not None:
            self._probe.begin()

    def _adopt_plan(self, planning: Planning) -> None:
        """All ranks alike, after the same step: connect anew if something is to change."""
        self._planning = None
        plan = planning.decide(self._backend.session_id, self.engine.raise_if_failed)
        self._report(plan.text)
        before, self.config = self.config, plan.applied_to(self.config)
        row_wise = {info.name for info in self.engine.parameters if info.rows}
        if needs_another_backend(before, self.config, planning.nodes) or plan.row_wise != row_wise:
            with self._state.quietly():
                self._reconnect(plan.row_wise)
        self._outlook = plan.outlook()

    def _report(self, text: str | None) -> None:
        if text and self.rank == 0:
            print(f"foreprop: {text}", file=sys.stderr, flush=True)

    def _reconnect(self, row_wise: Collection[str]) -> None:
        """End the present backend and go on with another one where it was."""
        self._pull_state()
        state = dict(self._optimizer.state)
        self.flush()
        self._norm_before = self.grad_norm
        averages = self.ema_state_dict() if self.config.ema is not None else None
        self._disconnect(None)
        self._let_go()
        self._optimizer.state.clear()
        self._optimizer.state.update(state)
        self._completed_before += self.completed
        self._embeddings.make_sparse(row_wise)
        self._connect(row_wise)
        if averages is not None:
            self.load_ema_state_dict(averages)

    def _check_same_parameters(self) -> None:
        count = sum(len(group["params"]) for group in self._optimizer.param_groups)
        if count != self._optimized:
            raise ConfigError(
                f"the optimizer had {self._optimized} parameters at parallelize() and has"
                f" {count} now; call add_param_group() before parallelize()"
            )

    def _check_optimizer_unchanged(self) -> None:
        if self._by_workers and not self._tables:
            return
        self._check_same_parameters()
        pushed = self._announced_step == self.completed + 1
        if pushed and self._backend.numbers() != self._announced:
            raise TrainingLoopError(
                "the optimizer's settings (lr, ...) were changed between backward() and"
                " step(), when servers had been sent gradients with the old ones. Change them after"
                " step(), as LR schedulers do, or before backward(); or set parallelize(...,"
                " update='workers'), with which step() takes what it finds."
            )

    def _learn_priorities(self) -> None:
        """Rank 0's order of first use becomes everybody's priorities."""
        board = self._board("priorities")
        for parameter in self._parameters:
            parameter.unwatch()
        self._forget_forward_hook()
        if self.rank == 0:
            used = set(self._use_order)
            rest = [i for i in range(len(self._parameters)) if i not in used]
            order = self._use_order + rest
            board.publish("order", json.dumps(order))
        else:
            what = "rank 0's first step (its forward pass gives the priorities)"
            order = json.loads(board.lookup("order", what))
        self.engine.learn_priorities(order)

    def _forget_forward_hook(self) -> None:
        if self._forward_hook is not None:
            self._forward_hook.remove()
            self._forward_hook = None

    def _discard_gradients(self, set_to_none: bool) -> None:
        for parameter in self._parameters:
            parameter.gradient_discarded(dropped=set_to_none)
            if not set_to_none:
                parameter.replace_busy_gradient()

    def compiled_code_entered(self) -> None:
        """Compiled code must see ordinary parameters, and evaluation rank 0's buffers."""
        if self._probe is not None:
            self._probe.compiled_code_entered()
        for parameter in self._parameters:
            parameter.unwatch()
            parameter.settle_if_stepped()
        if self._buffers and not self._model.training:
            self.synchronise_buffers()

    # Buffers.
    def synchronise_buffers(self) -> None:
        if self.rank != 0 and self._buffers_step != self.completed:
            self._buffers.check_size()
            self._fetch_buffers()
            self._buffers_step = self.completed

    def _publish_buffers(self, step: int) -> None:
        self._buffers.check_size()
        if tensors := self._buffers.now():
            self.engine.publish_blob(BUFFERS_BLOB, step, buffers.pack(tensors))

    def _fetch_buffers(self) -> None:
        if tensors := self._buffers.now():
            data = self.engine.fetch_blob(BUFFERS_BLOB, self.completed)
            buffers.unpack_into(tensors, data)

    # Optimizer state passes through the user's optimizer for checkpoints.
    def _pull_state(self) -> None:
        self._remote.check_whole()
        if self._announced_step > self.completed and not self._by_workers:
            raise TrainingLoopError(
                "the optimizer's state is used between backward() and step(), in step"
                f" {self.completed + 1}: servers have been sent gradients, and some may be of the"
                " next state already. Use it after step(), or set parallelize(...,"
                " update='workers')."
            )
        self._settle_all()
        self._backend.pull_state(self.completed)

    def _replace_state(self) -> None:
        self._settle_all()  # the updates so far go by the old state
        self._backend.replace_state(self.completed)

    # The end.
    def _release(self, *, failure: BaseException | None) -> None:
        if self._closed:
            return
        self._closed = True
        _open_sessions.discard(self)
        if failure is None:
            self._report(self._missing_steps())
        try:
            if self._connected:
                with self._state.quietly():
                    self._disconnect(failure)
        finally:
            self._let_go()
            for undo in reversed(self._restore):
                undo()
            self._restore.clear()
            if self._trace is not None:
                self._trace.write()  # last: it may raise

    def _missing_steps(self) -> str | None:
        """What to say of a loop that never made a step with the optimizer that was given."""
        if self._stepped or not any(p.passes for p in self._averaging.parameters):
            return None
        text = "step() of the optimizer that was given to parallelize() was never called"
        if self._begun:
            return f"{text}: gradients were averaged when they were read, with no overlap"
        return f"{text}, and no gradient was read: nothing has been synchronised, ranks may differ"

    def _disconnect(self, failure: BaseException | None) -> None:
        failed = failure is not None or self.engine.failed
        self._connected = False
        engine, backend, partings = self.engine, self._backend, self._world.partings
        backend.close(failed=failed)
        if self._closed and self._has_siblings and not failed:
            partings.begin(lambda: part(engine, backend))
            return
        part(engine, backend, failure)
        if not failed:
            partings.wait()

    @property
    def _has_siblings(self) -> bool:
        """Whether this rank has another session open."""
        return any(session._world is self._world for session in _open_sessions)

    def _let_go(self) -> None:
        self._forget_forward_hook()
        for parameter in self._parameters:
            parameter.detach()
            _, session = _managed.get(id(parameter.parameter), ("", None))
            if session is not None and session() is self:
                del _managed[id(parameter.parameter)]

    def _give_away(self, parameter: torch.Tensor) -> bool:
        """Another session's optimizer has it; False if this one's has, too."""
        for averaged in self._averaging.parameters:
            if averaged.parameter is parameter and averaged.index >= self._optimized:
                self._averaging.parameters.remove(averaged)
                averaged.give_away()
                del _managed[id(parameter)]
                return True
        return False

    def _forget_in_child(self) -> None:
        self._backend.forget_in_child()


def _parameter_info(
    name: str,
    parameter: torch.nn.Parameter,
    group: int,
    *,
    rows: bool,
    sparse: bool,
    init: RowInit | None,
) -> ParameterInfo:
    dtype = str(parameter.dtype).removeprefix("torch.")
    if dtype not in ITEMSIZE_BYTES:
        raise ConfigError(
            f"parameter {name} is {dtype}; parameters must be one of {sorted(ITEMSIZE_BYTES)}"
        )
    if torch.nn.parameter.is_lazy(parameter):
        raise ConfigError(
            f"parameter {name} is not initialised yet (a lazy module): run one forward pass"
            " before parallelize()"
        )
    shape = tuple(parameter.shape)
    return ParameterInfo(
        name=name, shape=shape, dtype=dtype, group=group, rows=rows, sparse=sparse, init=init
    )


def _check_unmanaged(named: Sequence[tuple[str, torch.nn.Parameter, int]]) -> None:
    """Take over what another session only reads; refuse what it updates."""
    for name, parameter, _ in named:
        if id(parameter) not in _managed:
            continue
        theirs, reference = _managed[id(parameter)]
        session = reference()
        if session is None or not session._give_away(parameter):
            raise ConfigError(
                f"parameter {name} belongs to another open session, as {theirs}:"
                " give each parameter to one optimizer, and close() a session before another one"
                " takes its parameters"
            )


def is_managed(parameter: torch.Tensor) -> bool:
    """Whether an open session has the parameter."""
    return id(parameter) in _managed


def _alive(session: weakref.ref[ConnectedSession]) -> ConnectedSession:
    found = session()
    if found is None or found._closed:
        raise TrainingLoopError("this optimizer's foreprop session has been closed")
    return found


_exit_registered = False


def _close_at_exit() -> None:
    global _exit_registered  # noqa: PLW0603 - once per process
    if not _exit_registered:
        _exit_registered = True
        atexit.register(close_all)
        watch_uncaught_errors(_open_sessions)
        os.register_at_fork(after_in_child=_forget_all_in_child)


def close_all() -> None:
    """Close every open session of this process; after an uncaught error, tell the others why."""
    failure = getattr(sys, "last_value", None)
    for session in list(_open_sessions):
        try:
            if failure is not None:
                session._release(failure=failure)
            else:
                session.close()
        except ForepropError as error:
            print(f"foreprop: at the end: {error}", file=sys.stderr, flush=True)
    wait_for_all()


def _forget_all_in_child() -> None:
    for session in list(_open_sessions):
        session._forget_in_child()
    _open_sessions.clear()
