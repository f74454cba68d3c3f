"""A model, its optimizer and the engine between them: what `parallelize` returns."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import types
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from foreprop.config import Config
from foreprop.core.manifest import BUFFERS_BLOB, ITEMSIZE_BYTES, ParameterInfo
from foreprop.core.rowinit import RowInit
from foreprop.engine.keptrows import VALUES
from foreprop.engine.slicestore import AVERAGE
from foreprop.engine.world import World
from foreprop.errors import ConfigError, ForepropError, TrainingLoopError
from foreprop.observe.trace import TraceRecorder, trace_path
from foreprop.training import buffers, compiled
from foreprop.training.advice import give_advice
from foreprop.training.backend import Engine, Setup
from foreprop.training.board import Board
from foreprop.training.compute_trace import ComputeTrace
from foreprop.training.embeddings import Embeddings, check_kind, check_rest
from foreprop.training.hybrid import connect, needs_another_backend
from foreprop.training.lookahead import lookahead
from foreprop.training.loss_scale import LossScale, announce_scalers, refuse_scaler
from foreprop.training.memory import Memory
from foreprop.training.moving_average import averaged_state_dict, averages_from
from foreprop.training.optimizer import can_be_served, check_row_wise, named_parameters
from foreprop.training.parameter import SynchronisedParameter
from foreprop.training.remote import RemoteTable
from foreprop.training.rows import RowParameter
from foreprop.training.tables import RemoteTables
from foreprop.training.waiting import is_differentiable

if TYPE_CHECKING:  # what only architecture="auto" and slice_elems="auto" need
    from foreprop.training.planning import Outlook, Planning
    from foreprop.training.stepprobe import StepProbe

_open_sessions: weakref.WeakSet[Session] = weakref.WeakSet()
_managed: dict[int, str] = {}
"""The parameters of all open sessions, by id: their names."""


class Session:
    """One model and optimizer in synchronous data-parallel training. Made by `parallelize`."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
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
        self._optimizer = optimizer
        self._closed = False
        self._loss_scale: LossScale | None = None
        if scaler is not None and scaler.is_enabled():
            self._loss_scale = LossScale(scaler, optimizer)
        self._named = list(named_parameters(model, optimizer))
        self._embeddings = Embeddings(model, self._named, optimizer, config)
        check_rest(model, self._named)
        self._managed_ids = {id(parameter) for _, parameter, _ in self._named} | _managed.keys()
        _check_unmanaged(self._named)
        self._buffers = buffers.ModelBuffers(model)
        self._compute_trace: ComputeTrace | None = None
        self._restore: list[Callable[[], None]] = [self._embeddings.restore]
        self._trace: TraceRecorder | None = None
        self._completed_before = 0
        self._norm_before: float | None = None  # of the last of those steps
        self._planning: Planning | None = None
        self._outlook: Outlook | None = None
        self._forward_hook: RemovableHandle | None = None
        self._connected = False
        self.leaves_rows = False
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
        self._in_first_forward = False
        self._parameters: list[SynchronisedParameter] = []
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
            _managed[id(parameter.parameter)] = parameter.name
        model: Any = self._model
        self._forward_hook = model.register_forward_pre_hook(buffers.FirstForward(self))

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
                for entry in self._named
            ],
            frozen=[p for p in model_parameters if id(p) not in self._managed_ids],
            buffers=self._buffers,
            memory=self._parameters,
            make_trace=self._make_trace,
            loss_scale=self._loss_scale,
        )

    def _synchronised(
        self, index: int, name: str, parameter: torch.nn.Parameter
    ) -> SynchronisedParameter:
        if self.engine.parameters[index].init is not None:
            return RemoteTable(index, name, parameter, self, self._backend.rows)
        if self.engine.parameters[index].rows:
            return RowParameter(index, name, parameter, self, self._backend.rows)
        return SynchronisedParameter(index, name, parameter, self)

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
        self._restore += [*give_advice(), compiled.watch_entries(self)]
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
        def step(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            refuse_scaler(self)
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            _alive(session)._step()
            self._opt_called = True  # type: ignore[attr-defined]  # schedulers look at this
            return loss

        def zero_grad(self: torch.optim.Optimizer, set_to_none: bool = True) -> None:
            _alive(session)._discard_gradients(set_to_none)
            own_zero_grad(set_to_none=set_to_none)

        self._restore.append(announce_scalers(optimizer))
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

        self._restore.append(restore)
        handles = [
            optimizer.register_state_dict_pre_hook(lambda _: _alive(session)._pull_state()),
            optimizer.register_state_dict_post_hook(
                lambda *_: _alive(session)._backend.drop_state()
            ),
            optimizer.register_load_state_dict_post_hook(
                lambda _: _alive(session)._replace_state()
            ),
        ]
        self._restore += [handle.remove for handle in handles]

    def _adopt_model(self) -> None:
        model: Any = self._model
        if self._trace is not None:
            self._compute_trace = ComputeTrace(model, self._trace, lambda: self.completed + 1)
            self._restore.append(self._compute_trace.remove)
        handles = [
            module.register_load_state_dict_pre_hook(buffers.BeforeLoadStateDict(self))
            for module in model.modules()  # a part may be loaded by itself
            if next(module.parameters(recurse=False), None) is not None
        ]
        if self.config.whole_tables not in (None, "all"):
            handles.append(model.register_state_dict_pre_hook(buffers.StateDictBegins(self)))
            handles.append(model.register_state_dict_post_hook(buffers.StateDictEnds(self)))
        handles += self._remote.watch(self._embeddings.modules_of)
        if self._buffers:
            handles.append(model.register_forward_pre_hook(buffers.BeforeForward(self)))
            handles.append(model.register_state_dict_pre_hook(buffers.BeforeStateDict(self)))
        self._restore += [handle.remove for handle in handles]

    # What a user asks for.
    @property
    def rank(self) -> int:
        return self._world.rank

    @property
    def world_size(self) -> int:
        return self._world.size

    @property
    def planning(self) -> bool:
        """Whether ``architecture="auto"`` or ``slice_elems="auto"`` is still to be decided."""
        return self._planning is not None

    def flush(self) -> None:
        """Wait until every parameter shows the result of the last `optimizer.step()`."""
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
        """The global 2-norm of the last step's aggregated gradients, before clipping.

        What ``torch.nn.utils.clip_grad_norm_`` returns. Blocks until all ranks' gradients of that
        step are aggregated, so ask late: after the next forward pass it is there. None before the
        first step, and unless ``clip_grad_norm`` is set or a scaler was given.
        """
        return self.engine.grad_norm(self.completed) if self.completed else self._norm_before

    def ema_state_dict(self) -> dict[str, Any]:
        """A copy of the model's state dict with the moving averages instead of the parameters.

        Any rank may ask by itself, between steps. The averages are in float32 at least. Needs
        ``ema``; raises `ConfigError` otherwise.
        """
        self._check_averages()
        self.flush()
        averages = self._backend.pull_averages(self.completed)
        with self._tables_aside(averages, AVERAGE) as averages:
            return averaged_state_dict(self._model, self._own_parameters(), averages)

    def load_ema_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `ema_state_dict` gave, on every rank alike; buffers are left alone."""
        self._check_averages()
        self.flush()
        with self._remote.aside():
            averages = averages_from(state, self._model, self._own_parameters())
        self._backend.replace_averages(self.completed, averages)

    def master_state_dict(self) -> dict[str, Any]:
        """A copy of the model's state dict with the parameters in full.

        With ``wire_dtype`` servers keep more of them than the workers see; otherwise, and with
        ``architecture="ring"``, it is just a copy. Any rank may ask by itself, between steps.
        """
        self.flush()
        masters = self._backend.pull_masters(self.completed)
        with torch.no_grad(), self._tables_aside(masters, VALUES) as masters:
            return averaged_state_dict(self._model, self._own_parameters(), masters)

    # Tables row by row.
    def rows(self, name: str, numbers: torch.Tensor) -> torch.Tensor:
        """A copy of some rows of a parameter as they are after the last `optimizer.step()`.

        ``numbers``: integers of any shape, on any device; the result has that shape and the rows'.
        Only these rows are fetched. Any rank may ask by itself, between steps. Raises `IndexError`
        for rows that are not there.
        """
        found = self._parameter(name)
        if isinstance(found, RemoteTable):
            return found.rows(numbers)
        with torch.no_grad():
            on_its_device = numbers.to(found.parameter.device)
            return torch.nn.functional.embedding(on_its_device, found.parameter)

    def set_rows(self, name: str, numbers: torch.Tensor, values: torch.Tensor) -> None:
        """Change some rows of a remote table by hand, between steps, on every rank alike.

        ``numbers``: (N,), each once; ``values``: (N, elements per row); rank 0's count. Their
        optimizer state stays. Blocks until the servers have them.
        """
        self._remote.set_rows(name, numbers, values)

    def save_tables(self, folder: str | os.PathLike[str]) -> None:
        """Write all remote tables into a folder: values, optimizer state and averages, in full.

        Any rank may, by itself, between steps; nobody needs room for a table. Rows that were never
        updated or set take no space: they begin alike again.
        """
        self._remote.save(folder)

    def load_tables(self, folder: str | os.PathLike[str]) -> None:
        """Go on from what `save_tables` wrote, with any number of servers and workers.

        On every rank alike, between steps; rank 0 reads. Raises `ConfigError` on all ranks for
        tables that do not fit, of which nothing is loaded.
        """
        self._remote.load(folder)

    def _parameter(self, name: str) -> SynchronisedParameter:
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
        """Totals since the start: bytes, frames, seconds waited (by parameter), queue depth."""
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
        """Finish what is under way, say goodbye, stop this process's servers. Idempotent.

        Called at exit by itself. Afterwards model and optimizer are ordinary PyTorch again; the
        optimizer's state has stayed with the servers, if there are any: take ``state_dict()``
        before.
        """
        if self._closed:
            return
        try:
            if not self.engine.failed:
                self._settle_all()
                self.saving(True)
                self._settle_tables()
        except ForepropError as error:
            self._release(failure=error)
            raise
        self._release(failure=None)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        else:
            self._release(failure=error)

    def __repr__(self) -> str:
        step = self._completed_before + self.completed
        return f"<foreprop.Session rank {self.rank} of {self.world_size}, step {step}>"

    def describe(self) -> str:
        """One line: who takes part, how, and over which interface."""
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

    def first_use_begins(self, parameter: SynchronisedParameter) -> None:
        if self._probe is not None:
            self._probe.asked(parameter)

    def is_first_use(self, parameter: SynchronisedParameter, result: Any) -> bool:
        if not self._in_first_forward and not is_differentiable(result):
            return False
        if self._probe is not None:
            self._probe.used(parameter)
        self._use_order.append(parameter.index)
        return True

    def memory_of(self, parameter: torch.Tensor) -> Memory:
        return self._backend.memory_of(parameter)

    def gradient_ready(self, parameter: SynchronisedParameter) -> None:
        if self._compute_trace is not None:
            self._compute_trace.gradient_ready(parameter.name)
        if self._probe is not None:
            self._probe.ready(parameter)

    def check_layout(self, parameter: int, layout: torch.layout) -> None:
        info = self.engine.parameters[parameter]
        sparse = layout != torch.strided
        if sparse:
            check_row_wise(self._optimizer, {info.name: info.group})
        check_kind(info, self.config.aggregation, sparse=sparse)

    def _step(self) -> None:
        self.engine.raise_if_failed()
        self.saving(False)  # if a state_dict() was broken off
        if self._loss_scale is not None:
            self._loss_scale.check_stepping()
        self._check_optimizer_unchanged()
        if self._probe is not None:
            self._probe.end()
        if self.completed == 0:
            self._learn_priorities()
        step = self.completed + 1
        self.begin_pushing()
        with torch._C.DisableTorchFunctionSubclass():
            for parameter in self._parameters:
                parameter.finish_step(step)
        self.completed = step
        for parameter in self._tables:
            parameter.prefetch()
        if self.rank == 0 and self.world_size > 1:
            self._publish_buffers(step)
        self.engine.end_step(step)
        self._plan()

    # architecture="auto", slice_elems="auto".
    def _begin_planning(self) -> Planning | None:
        config = self.config
        if self.world_size == 1 or "auto" not in (config.architecture, config.slice_elems):
            return None
        from foreprop.training.planning import Planning

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
            self._tell(self._outlook.end_step())
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
        self._tell(plan.text)
        before, self.config = self.config, plan.applied_to(self.config)
        row_wise = {info.name for info in self.engine.parameters if info.rows}
        if needs_another_backend(before, self.config, planning.nodes) or plan.row_wise != row_wise:
            self._reconnect(plan.row_wise)
        self._outlook = plan.outlook()

    def _tell(self, text: str | None) -> None:
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
        if count != len(self._parameters):
            raise ConfigError(
                f"the optimizer had {len(self._parameters)} parameters at parallelize() and has"
                f" {count} now; call add_param_group() before parallelize()"
            )

    def _check_optimizer_unchanged(self) -> None:
        self._check_same_parameters()
        pushed = self._announced_step == self.completed + 1
        if pushed and self._backend.numbers() != self._announced:
            raise TrainingLoopError(
                "the optimizer's settings (lr, ...) were changed between backward() and"
                " step(), when gradients had been pushed with the old ones. Change them after"
                " step(), as LR schedulers do, or before backward()."
            )

    def _learn_priorities(self) -> None:
        """Rank 0's order of first use becomes everybody's priorities."""
        board = Board(
            self._world,
            self.config,
            f"priorities/{self._backend.session_id}",
            self.engine.raise_if_failed,
        )
        for parameter in self._parameters:
            parameter.unwatch()
        self._forget_forward_hook()
        if self.rank == 0:
            used = set(self._use_order)
            rest = [i for i in range(len(self._parameters)) if i not in used]
            order = self._use_order + rest
            board.tell("order", json.dumps(order))
        else:
            what = "rank 0's first step (its forward pass gives the priorities)"
            order = json.loads(board.hear("order", what))
        self.engine.learn_priorities(order)

    def _forget_forward_hook(self) -> None:
        if self._forward_hook is not None:
            self._forward_hook.remove()
            self._forward_hook = None

    def _discard_gradients(self, set_to_none: bool) -> None:
        for parameter in self._parameters:
            parameter.gradient_discarded()
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
        try:
            if self._connected:
                self._disconnect(failure)
        finally:
            self._let_go()
            for undo in reversed(self._restore):
                undo()
            self._restore.clear()
            if self._trace is not None:
                self._trace.write()

    def _disconnect(self, failure: BaseException | None) -> None:
        failed = failure is not None or self.engine.failed
        self._connected = False
        try:
            self.engine.close(failure=failure)
        finally:
            self._backend.close(failed=failed)

    def _let_go(self) -> None:
        self._forget_forward_hook()
        for parameter in self._parameters:
            parameter.detach()
            _managed.pop(id(parameter.parameter), None)

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
    for name, parameter, _ in named:
        if id(parameter) in _managed:
            raise ConfigError(
                f"parameter {name} belongs to another open session, as {_managed[id(parameter)]}:"
                " give each parameter to one optimizer, and close() a session before another one"
                " takes its parameters"
            )


def is_managed(parameter: torch.Tensor) -> bool:
    """Whether an open session has the parameter."""
    return id(parameter) in _managed


def _alive(session: weakref.ref[Session]) -> Session:
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
        os.register_at_fork(after_in_child=_forget_all_in_child)


def close_all() -> None:
    """Close every open session of this process; after an uncaught error, tell the others why."""
    failure = getattr(sys, "last_value", None)
    for session in list(_open_sessions):
        with contextlib.suppress(ForepropError):
            if failure is not None:
                session._release(failure=failure)
            else:
                session.close()


def _forget_all_in_child() -> None:
    for session in list(_open_sessions):
        session._forget_in_child()
    _open_sessions.clear()
