"""A model, its optimizer and the engine between them: what `parallelize` returns."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import types
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from foreprop.config import Config
from foreprop.core.manifest import BUFFERS_BLOB, ITEMSIZE_BYTES, Manifest, ParameterInfo
from foreprop.core.wire import MAX_PAYLOAD_BYTES
from foreprop.engine.launch import Connections
from foreprop.engine.slicestore import decode_state, encode_state
from foreprop.engine.worker import WorkerEngine
from foreprop.engine.world import World
from foreprop.errors import ConfigError, ForepropError, TrainingLoopError
from foreprop.observe.trace import TraceRecorder, trace_path
from foreprop.training import buffers, compiled
from foreprop.training.advice import give_advice
from foreprop.training.compute_trace import ComputeTrace
from foreprop.training.memory import MemoryFactory
from foreprop.training.optimizer import (
    check_optimizer,
    hyperparameters,
    named_parameters,
    optimizer_info,
)
from foreprop.training.parameter import SynchronisedParameter
from foreprop.version import __version__

FROZEN = BUFFERS_BLOB + 1  # the number of the first frozen parameter's blob
_NUMBERS_OF_A_PARAMETER = frozenset({"step", "mu_product", "eta", "mu"})
"""In optimizers' states: tensors that belong to a parameter, not to each of its elements."""

_open_sessions: weakref.WeakSet[Session] = weakref.WeakSet()
_managed: dict[int, str] = {}
"""The parameters of all open sessions, by id: their names."""


class Session:
    """One model and optimizer in synchronous data-parallel training. Made by `parallelize`."""

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, world: World, config: Config
    ) -> None:
        check_optimizer(optimizer)
        self.config = config
        self.completed = 0
        self.fixed_passes = config.backward_passes
        self._world = world
        self._model = model
        self._optimizer = optimizer
        self._closed = False
        self._named = list(named_parameters(model, optimizer))
        _check_unmanaged(self._named)
        managed = {id(parameter) for _, parameter, _ in self._named} | _managed.keys()
        self._frozen = [p for p in model.parameters() if id(p) not in managed]
        self._buffers = buffers.ModelBuffers(model)
        self._buffers_step = 0
        self._announced: tuple[Any, ...] | None = None
        self._announced_step = 0
        self.memory_factory = MemoryFactory()
        self._use_order: list[int] = []
        self._in_first_forward = False
        self._compute_trace: ComputeTrace | None = None
        self._loaded: dict[Any, Any] | None = None  # optimizer state, since the last step
        self._restore: list[Callable[[], None]] = []
        connections = Connections(world, config)
        manifest = self._manifest(connections)
        _check_frames(manifest)
        connections.open()
        self._connections = connections
        manifest = msgspec.structs.replace(manifest, session=connections.session_id)
        self._trace = self._make_trace(connections.session_id)
        self._parameters: list[SynchronisedParameter] = []
        self.engine = WorkerEngine(
            manifest,
            self._parameters,
            connections.streams,
            rank=world.rank,
            config=config,
            trace=self._trace,
            servers=connections.server_names(),
        )
        try:
            self._parameters += [
                SynchronisedParameter(index, name, parameter, self)
                for index, (name, parameter, _) in enumerate(self._named)
            ]
            self._start()
        except BaseException as error:
            connections.refuse(error)
            self._release(failure=error)
            raise

    # The start.
    def _manifest(self, connections: Connections) -> Manifest:
        return Manifest(
            foreprop=__version__,
            torch=torch.__version__.partition("+")[0],
            byteorder=sys.byteorder,
            session="",
            world_size=self._world.size,
            knobs=self.config.knobs(connections.servers),
            optimizer=optimizer_info(self._optimizer),
            parameters=tuple(
                _parameter_info(name, parameter, group) for name, parameter, group in self._named
            ),
            blob_bytes=(
                self._buffers.size_bytes,
                *(buffers.packed_bytes([parameter]) for parameter in self._frozen),
            ),
        )

    def _make_trace(self, session_id: str) -> TraceRecorder | None:
        if self.config.trace is None:
            return None
        path = trace_path(Path(self.config.trace), f"worker-{self.rank}", session_id)
        return TraceRecorder(path, f"worker {self.rank}", self.rank)

    def _start(self) -> None:
        if self.rank != 0:
            self.engine.await_values()  # before the servers know us: values may come at once
        self.engine.join(self._connections.check_refused)
        self._connections.settled()
        if self.rank == 0:
            for parameter in self._parameters:
                parameter.before_offering()
            self._send_state(0)  # first: who has the values may ask for it
            self.engine.offer_values()
            if self.world_size > 1:
                for number, frozen in enumerate(self._frozen, FROZEN):
                    self._publish(number, [frozen], 0)
                self._publish(BUFFERS_BLOB, self._buffers.now(), 0)
        else:
            for parameter in self._parameters:
                parameter.receive_initial_value()
            for number, frozen in enumerate(self._frozen, FROZEN):
                self._fetch(number, [frozen])
            self._fetch(BUFFERS_BLOB, self._buffers.now())
        self._optimizer.state.clear()
        for parameter in self._parameters:
            parameter.watch()
            _managed[id(parameter.parameter)] = parameter.name
        self._adopt_optimizer()
        self._adopt_model()
        self._restore += [*give_advice(), compiled.watch_entries(self)]
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
            optimizer.register_state_dict_post_hook(lambda *_: _alive(session)._drop_state()),
            optimizer.register_load_state_dict_post_hook(
                lambda _: _alive(session)._replace_state()
            ),
        ]
        self._restore += [handle.remove for handle in handles]

    def _adopt_model(self) -> None:
        model: Any = self._model
        self._forward_hook = model.register_forward_pre_hook(buffers.FirstForward(self))
        self._restore.append(self._forward_hook.remove)
        if self._trace is not None:
            self._compute_trace = ComputeTrace(model, self._trace, lambda: self.completed + 1)
            self._restore.append(self._compute_trace.remove)
        handles = [
            module.register_load_state_dict_pre_hook(buffers.BeforeLoadStateDict(self))
            for module in model.modules()  # a part may be loaded by itself
            if next(module.parameters(recurse=False), None) is not None
        ]
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

    def flush(self) -> None:
        """Wait until every parameter shows the result of the last `optimizer.step()`."""
        self.engine.raise_if_failed()
        self.engine.start_step()
        for parameter in self._parameters:
            parameter.check_stepped()
            parameter.settle()

    def stats(self) -> dict[str, Any]:
        """Totals since the start: bytes, frames, seconds waited (by parameter), queue depth."""
        counters = self.engine.counters
        names = [info.name for info in self.engine.manifest.parameters]
        return {
            "steps": self.completed,
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

        Called at exit by itself. Afterwards model and optimizer are ordinary PyTorch again, but
        the optimizer's state has stayed with the servers: take ``state_dict()`` before.
        """
        if self._closed:
            return
        try:
            if not self.engine.failed:
                self.flush()
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
        return (
            f"<foreprop.Session rank {self.rank} of {self.world_size}, "
            f"{self._connections.servers} servers, step {self.completed}>"
        )

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
        groups = hyperparameters(self._optimizer)
        if groups != self._announced:
            self.engine.announce_hyperparameters(step, msgspec.json.encode(groups))
            self._announced = groups
        self._announced_step = step

    def forward_started(self) -> None:
        """What was used before the model's first forward pass (a copy, a print) does not count."""
        if not self._in_first_forward:
            self._in_first_forward = True
            self._use_order.clear()
            for parameter in self._parameters:
                parameter.watch()

    def is_first_use(self, parameter: SynchronisedParameter, result: Any) -> bool:
        if not self._in_first_forward and not _is_differentiable(result):
            return False
        self._use_order.append(parameter.index)
        return True

    def gradient_ready(self, parameter: SynchronisedParameter) -> None:
        if self._compute_trace is not None:
            self._compute_trace.gradient_ready(parameter.name)

    def _step(self) -> None:
        self.engine.raise_if_failed()
        self._check_optimizer_unchanged()
        if self.completed == 0:
            self._learn_priorities()
        step = self.completed + 1
        self._loaded = None
        self.begin_pushing()
        with torch._C.DisableTorchFunctionSubclass():
            for parameter in self._parameters:
                parameter.finish_step(step)
        self.completed = step
        if self.rank == 0 and self.world_size > 1:
            self._buffers.check_size()
            self._publish(BUFFERS_BLOB, self._buffers.now(), step)

    def _check_same_parameters(self) -> None:
        count = sum(len(group["params"]) for group in self._optimizer.param_groups)
        if count != len(self._named):
            raise ConfigError(
                f"the optimizer had {len(self._named)} parameters at parallelize() and has {count}"
                " now; call add_param_group() before parallelize()"
            )

    def _check_optimizer_unchanged(self) -> None:
        self._check_same_parameters()
        if self._announced_step == self.completed + 1:
            groups = hyperparameters(self._optimizer)
            if groups != self._announced:
                raise TrainingLoopError(
                    "the optimizer's settings (lr, ...) were changed between backward() and"
                    " step(), when gradients had been pushed with the old ones. Change them after"
                    " step(), as LR schedulers do, or before backward()."
                )

    def _learn_priorities(self) -> None:
        """Rank 0's order of first use becomes everybody's priorities."""
        key = f"priorities/{self._connections.session_id}"
        for parameter in self._parameters:
            parameter.unwatch()
        self._forward_hook.remove()
        if self.rank == 0:
            used = set(self._use_order)
            rest = [i for i in range(len(self._parameters)) if i not in used]
            order = self._use_order + rest
            self._world.publish(key, json.dumps(order))
        else:
            what = "rank 0's first step (its forward pass gives the priorities)"
            found = self._world.lookup(
                key,
                timeout_s=self.config.step_timeout_s,
                setting="step_timeout_s",
                what=what,
                look=self.engine.raise_if_failed,
                report_s=self.config.stall_report_s,
            )
            order = json.loads(found)
        self.engine.learn_priorities(order)

    def _discard_gradients(self, set_to_none: bool) -> None:
        for parameter in self._parameters:
            parameter.gradient_discarded()
            if not set_to_none:
                parameter.replace_busy_gradient()

    def compiled_code_entered(self) -> None:
        """Compiled code must see ordinary parameters, and evaluation rank 0's buffers."""
        for parameter in self._parameters:
            parameter.unwatch()
            parameter.settle_if_stepped()
        if self._buffers and not self._model.training:
            self.synchronise_buffers()

    # Buffers and frozen parameters.
    def synchronise_buffers(self) -> None:
        if self.rank != 0 and self._buffers_step != self.completed:
            self._buffers.check_size()
            self._fetch(BUFFERS_BLOB, self._buffers.now())
            self._buffers_step = self.completed

    def _publish(self, which: int, tensors: Sequence[torch.Tensor], step: int) -> None:
        if tensors:
            self.engine.publish_blob(which, step, buffers.pack(tensors))

    def _fetch(self, which: int, tensors: Sequence[torch.Tensor]) -> None:
        if tensors:
            buffers.unpack_into(tensors, self.engine.fetch_blob(which, self.completed))

    # Optimizer state: it lives on the servers, and passes through here for checkpoints.
    def _pull_state(self) -> None:
        """Before ``optimizer.state_dict()``: fetch what single-process training would have."""
        self.flush()
        if self._loaded is not None:
            self._optimizer.state.update(self._loaded)
            return
        pieces: dict[int, list[dict[str, Any]]] = {}
        slices = self.engine.slices
        answers = self.engine.fetch_states([piece.number for piece in slices], self.completed)
        for piece in slices:
            state = decode_state(memoryview(answers[piece.number]), elems=piece.elems)
            pieces.setdefault(piece.parameter, []).append(state)
        for index, states in pieces.items():
            parameter = self._named[index][1]
            joined = _join_states(states, parameter)
            if joined:
                self._optimizer.state[parameter] = joined

    def _drop_state(self) -> None:
        self._optimizer.state.clear()

    def _replace_state(self) -> None:
        """After ``optimizer.load_state_dict()``: from the next step on, rank 0's counts.

        Until then every rank keeps what it has loaded, for rank 0's may still be on its way.
        """
        self.flush()  # the updates so far go by the old state
        if self.rank == 0:
            self._send_state(self.completed + 1)
        self._loaded = dict(self._optimizer.state)
        self._optimizer.state.clear()

    def _send_state(self, step: int) -> None:
        state = self._optimizer.state
        if not state and step == 0:
            return
        for piece in self.engine.slices:
            parameter = self._named[piece.parameter][1]
            part = _cut_state(state.get(parameter, {}), parameter, piece[2], piece[3])
            self.engine.send_state(piece.number, step, encode_state(part))

    # The end.
    def _release(self, *, failure: BaseException | None) -> None:
        if self._closed:
            return
        self._closed = True
        _open_sessions.discard(self)
        failed = failure is not None or self.engine.failed
        try:
            self.engine.close(failure=failure)
        finally:
            self._connections.close(kill=failed)
            self.memory_factory.stop()
            for parameter in self._parameters:
                parameter.detach()
                _managed.pop(id(parameter.parameter), None)
            for undo in reversed(self._restore):
                undo()
            self._restore.clear()
            if self._trace is not None:
                self._trace.write()

    def _forget_in_child(self) -> None:
        self._connections.forget_in_child()


def _parameter_info(name: str, parameter: torch.nn.Parameter, group: int) -> ParameterInfo:
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
    return ParameterInfo(name=name, shape=tuple(parameter.shape), dtype=dtype, group=group)


def _check_unmanaged(named: Sequence[tuple[str, torch.nn.Parameter, int]]) -> None:
    for name, parameter, _ in named:
        if id(parameter) in _managed:
            raise ConfigError(
                f"parameter {name} belongs to another open session, as {_managed[id(parameter)]}:"
                " give each parameter to one optimizer, and close() a session before another one"
                " takes its parameters"
            )


def _check_frames(manifest: Manifest) -> None:
    if max(manifest.blob_bytes) > MAX_PAYLOAD_BYTES:
        raise ConfigError(
            f"a frozen parameter (or all buffers) of {max(manifest.blob_bytes)} bytes is larger"
            f" than a frame of {MAX_PAYLOAD_BYTES}"
        )
    for piece in manifest.slices():
        info = manifest.parameters[piece.parameter]
        size_bytes = piece.elems * ITEMSIZE_BYTES[info.dtype]
        if size_bytes > MAX_PAYLOAD_BYTES:
            raise ConfigError(
                f"parameter {info.name} would be sent in a frame of {size_bytes} bytes; a frame"
                f" holds {MAX_PAYLOAD_BYTES}: use granularity='slice'"
            )


def _is_differentiable(result: Any) -> bool:
    if isinstance(result, torch.Tensor):
        return result.requires_grad
    return isinstance(result, (tuple, list)) and any(_is_differentiable(item) for item in result)


def _alive(session: weakref.ref[Session]) -> Session:
    found = session()
    if found is None or found._closed:
        raise TrainingLoopError("this optimizer's foreprop session has been closed")
    return found


def _join_states(states: Sequence[dict[str, Any]], parameter: torch.Tensor) -> dict[str, Any]:
    """One state of the parameter's shape from the states of its slices."""
    joined: dict[str, Any] = {}
    for key, first in states[0].items():
        if isinstance(first, torch.Tensor) and first.dim():
            flat = torch.cat([state[key] for state in states])
            joined[key] = flat.reshape(parameter.shape).to(parameter.device)
        else:
            joined[key] = first
    return joined


def _cut_state(
    state: dict[str, Any], parameter: torch.Tensor, start: int, stop: int
) -> dict[str, Any]:
    return {
        key: value.detach().reshape(-1)[start:stop]
        if isinstance(value, torch.Tensor) and _is_elementwise(key, value)
        else value
        for key, value in state.items()
    }


def _is_elementwise(key: str, value: torch.Tensor) -> bool:
    """One number per element of the parameter; of one without dimensions, the name tells."""
    return value.dim() > 0 or key not in _NUMBERS_OF_A_PARAMETER


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
