"""A world of one: plain PyTorch, which needs no servers, sockets or threads.

Model and optimizer are left alone, but for what the settings add: ``clip_grad_norm``,
``clip_grad_value``, ``ema``, ``check_finite``, and with a scaler the gradients' norm, which are
part of `optimizer.step` then (`params.addedsteps`), and ``trace``. Settings of how something is
sent, divided or held do nothing, as nothing is: ``wire_dtype`` rounds nothing, for one. Steps are
counted only where a setting has them counted, or somebody has asked for metrics.
"""

from __future__ import annotations

import atexit
import functools
import os
import secrets
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from foreprop.config import LOGGER, Config
from foreprop.config.combinations import check_combinations
from foreprop.config.launchers import promised_ranks
from foreprop.core.codec import choices_of
from foreprop.engine.metrics import Metrics, Totals
from foreprop.engine.optimizer import named_parameters
from foreprop.engine.trace import TraceRecorder, check_folders, trace_path
from foreprop.errors import ConfigError
from foreprop.params.addedsteps import AddedSteps
from foreprop.params.compute_trace import ComputeTrace
from foreprop.params.moving_average import averaged_state_dict, averages_from
from foreprop.session.figures import Follower, facts_of
from foreprop.session.session import Session, report_idle


def _named(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None
) -> dict[str, torch.nn.Parameter]:
    own = [] if optimizer is None else named_parameters(model, optimizer)
    return dict(model.named_parameters()) | {name: parameter for name, parameter, _ in own}


@functools.cache
def report_promised() -> None:
    """Warn, once per process, if a launcher has started several that each train alone."""
    if (promised := promised_ranks()) is not None:
        LOGGER.warning(
            "%s is %d, but this process trains alone, as RANK and WORLD_SIZE do not say who the"
            " others are: start it by torchrun or `foreprop run` (docs/recipes.md)",
            *promised,
        )


class LoneSession(Session):
    """The session of a world of one. See `Session` for what it offers."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        config: Config,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self._config = config
        self._model = model
        self._optimizer = optimizer
        self._closed = False
        self._at_end: list[Callable[[], None]] = []
        self._steps: AddedSteps | None = None
        self._trace: _LoneTrace | None = None
        self._follower: Follower | None = None
        report_promised()
        report_idle(model, optimizer)
        check_folders(config)
        if isinstance(config.compression, str):
            from foreprop.features.compression.choosing import check_codecs

            check_codecs(choices_of(config.compression))
        scaler = scaler if scaler is not None and scaler.is_enabled() else None
        finite = True if config.check_finite else None
        asked = (
            config.clip_grad_norm,
            config.clip_grad_value,
            config.ema,
            config.trace,
            config.log_steps,
            config.watch,
            scaler,
            finite,
        )
        if optimizer is None:
            check_combinations(config, {"no optimizer": "parallelize() was given no optimizer"})
        elif any(setting is not None for setting in asked):
            self._steps = AddedSteps(model, optimizer, config, scaler, checks_finite=True)
        if config.trace is not None:
            named = _named(model, optimizer)
            self._trace = _LoneTrace(config, named, model, lambda: self._count + 1)
        if config.log_steps is not None or config.watch is not None:
            self._followed()
            atexit.register(self.close)
        open_lone_sessions.add(self)

    @property
    def config(self) -> Config:
        return self._config

    @property
    def _count(self) -> int:
        return 0 if self._steps is None else self._steps.count

    @property
    def rank(self) -> int:
        return 0

    @property
    def world_size(self) -> int:
        return 1

    @property
    def joined_at(self) -> None:
        return None

    @property
    def planning(self) -> bool:
        return False

    def flush(self) -> None:
        """Do nothing: every parameter shows the last step as soon as it is over."""

    @property
    def grad_norm(self) -> float | None:
        norm = None if self._steps is None else self._steps.norm
        return None if norm is None else float(norm)

    def ema_state_dict(self) -> dict[str, Any]:
        steps = self._averaging()
        return averaged_state_dict(
            self._model, steps.parameters, steps.averages_of(steps.parameters)
        )

    def load_ema_state_dict(self, state: Mapping[str, Any]) -> None:
        steps = self._averaging()
        averages = averages_from(state, self._model, steps.parameters)
        steps.put_averages(steps.parameters, averages)

    def _averaging(self) -> AddedSteps:
        if self._steps is None or self._config.ema is None:
            raise ConfigError(
                "there are no moving averages: set their decay, parallelize(..., ema=0.999)"
            )
        return self._steps

    def state_dict(self) -> dict[str, Any]:
        return {"residuals": {}}

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Do nothing: no codec has kept anything back."""

    def master_state_dict(self) -> dict[str, Any]:
        return averaged_state_dict(self._model, [], [])

    def rows(self, name: str, numbers: torch.Tensor) -> torch.Tensor:
        named = _named(self._model, self._optimizer)
        if name not in named:
            raise ConfigError(f"no parameter is called {name!r}; there are {list(named)}")
        with torch.no_grad():
            return torch.nn.functional.embedding(numbers.to(named[name].device), named[name])

    def set_rows(self, name: str, numbers: torch.Tensor, values: torch.Tensor) -> None:
        raise ConfigError(
            f"{name} is not a remote table: change the parameter itself, under torch.no_grad()"
        )

    def save_tables(self, folder: str | os.PathLike[str]) -> None:
        raise ConfigError(_NO_TABLES)

    def load_tables(self, folder: str | os.PathLike[str]) -> None:
        raise ConfigError(_NO_TABLES)

    def stats(self) -> dict[str, Any]:
        return {
            "steps": None if self._steps is None else self._steps.count,
            "pushes": 0,
            "pushed_bytes": 0,
            "replies": 0,
            "reply_bytes": 0,
            "queue_depth": 0,
            "max_queue_depth": 0,
            "straggler": None,
            "waits": 0,
            "waited_s": 0.0,
            "waited_s_by_parameter": {},
        }

    def metrics(self) -> Metrics:
        return self._followed().metrics()

    def call_every(self, steps: int, callback: Callable[[Metrics], object]) -> None:
        self._followed().call_every(steps, callback)

    def _followed(self) -> Follower:
        if self._follower is None:
            if self._steps is None and self._optimizer is not None:
                self._steps = AddedSteps(
                    self._model, self._optimizer, self._config, None, checks_finite=True
                )
            self._follower = Follower(lambda: Totals(step=self._count))
            self._follower.begin(self._config, secrets.token_hex(8), rank=0, world_size=1)
            if self._steps is not None:
                self._steps.on_step = self._follower.end_step
        return self._follower

    def describe(self) -> str:
        return "a world of one: plain PyTorch, without servers"

    def close(self) -> None:
        self._end(None)

    def _end(self, failure: BaseException | None) -> None:
        if self._closed:
            return
        self._closed = True
        open_lone_sessions.discard(self)
        for function in self._at_end:
            function()
        if self._steps is not None:
            self._steps.remove()
        if self._follower is not None:
            atexit.unregister(self.close)
            self._follower.end(failure)
        if self._trace is not None:
            self._trace.end()

    def __enter__(self) -> LoneSession:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._end(error)

    def __repr__(self) -> str:
        step = "" if self._steps is None else f", step {self._steps.count}"
        return f"<foreprop.Session rank 0 of 1{step}>"


open_lone_sessions: weakref.WeakSet[LoneSession] = weakref.WeakSet()

_NO_TABLES = (
    "there are no remote tables: embeddings with sparse=True that were made under"
    " torch.device('meta')"
)


class _LoneTrace:
    def __init__(
        self,
        config: Config,
        named: Mapping[str, torch.nn.Parameter],
        model: torch.nn.Module,
        current_step: Callable[[], int],
    ) -> None:
        path = trace_path(Path(config.trace or ""), "worker-0", secrets.token_hex(8))
        self._recorder = TraceRecorder(path, "worker 0", 0, config.trace_steps)
        self._recorder.describe(facts_of(config, named, ranks=1, nodes=1))
        self._compute = ComputeTrace(model, self._recorder, current_step)
        self._handles: list[RemovableHandle] = []
        for name, tensor in named.items():
            parameter: Any = tensor
            if parameter.requires_grad:
                handle = parameter.register_post_accumulate_grad_hook(
                    lambda _, name=name: self._compute.gradient_ready(name)
                )
                self._handles.append(handle)
        atexit.register(self.end)

    def end(self) -> None:
        atexit.unregister(self.end)
        self._compute.remove()
        for handle in self._handles:
            handle.remove()
        self._recorder.write()
