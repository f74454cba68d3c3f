"""A replacement of ``foreprop.parallelize`` in one rank of a comparison.

The first session is the one whose steps count. After the last of them the script is ended by an
exception, `Enough`, that leaves its ``optimizer.step()``; so that call is wrapped outside of all
that a session has put around it.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from foreprop.config import Config, launch_info
from foreprop.errors import ConfigError
from foreprop.quantities import counted
from foreprop.session.alone import LoneSession
from foreprop.session.composition import make_session, stand_in
from foreprop.session.session import Session
from foreprop.tools.compare.ddp import Inner, ProcessGroup, Reduction, check_plain, usual_backend
from foreprop.tools.compare.recorder import Recorder, digest_of
from foreprop.tools.compare.systems import ALONE, CONTENDERS, DDP_BF16, Contender

_PATIENCE_STEPS = 25
"""How many steps a script may make without calling ``parallelize`` before that is an error."""


class Enough(BaseException):
    """The script has made as many steps as it was asked for."""


class LocalSession(LoneSession):
    """A session whose gradients stay here, or are DDP's; rank and world size are torchrun's."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        config: Config,
        scaler: torch.amp.GradScaler | None,
        *,
        about: str,
    ) -> None:
        super().__init__(model, optimizer, config, scaler)
        self._about = about

    @property
    def rank(self) -> int:
        return launch_info().rank

    @property
    def world_size(self) -> int:
        return launch_info().world_size

    def describe(self) -> str:
        return self._about


class StandIn:
    """Makes the sessions that a script asks for, and ends the script when it has made its steps.

    ``began`` gets the description of the first session, ``ended`` the digest of its parameters.
    ``backend`` is DDP's, if the script makes no process group; None chooses by the model's device.
    """

    def __init__(
        self,
        system: str,
        recorder: Recorder,
        *,
        began: Callable[[str], None],
        ended: Callable[[str], None],
        backend: str | None = None,
        find_unused: bool = False,
    ) -> None:
        self._name, self._system = system, CONTENDERS[system]
        self._recorder, self._began, self._ended = recorder, began, ended
        recorder.waited_s = self._waited_s
        self._backend, self._find_unused = backend, find_unused
        self._sessions: list[Session] = []
        self._reductions: list[Reduction] = []
        self._group: ProcessGroup | None = None
        self._parameters: list[torch.Tensor] = []
        self._has_optimizer = True
        self._foreign_steps = 0
        self._is_over = False

    @property
    def is_ready(self) -> bool:
        return bool(self._sessions)

    def install(self) -> None:
        """Take the place of ``parallelize`` and watch torch, before the script is run."""
        stand_in(self.parallelize)
        register_optimizer_step_post_hook(self._any_step)
        own = torch.autograd.backward

        def backward(tensors: Any, *arguments: Any, **named: Any) -> None:
            self._recorder.add_loss(tensors)
            for reduction in self._reductions:
                reduction.begin_backward()
            own(tensors, *arguments, **named)
            if self._sessions and not self._has_optimizer:
                self._end_step()

        torch.autograd.backward = backward
        if not self._system.is_ours:
            self._watch_torch()

    def _watch_torch(self) -> None:
        """End our reducers before the script ends its process group, and refuse a DDP of its own.

        That one would reduce what ours has reduced.
        """
        end, make = dist.destroy_process_group, DistributedDataParallel.__init__

        def destroy(*arguments: Any, **named: Any) -> None:
            self._end_reductions()
            end(*arguments, **named)

        def made(wrapper: Any, module: torch.nn.Module, *rest: Any, **named: Any) -> None:
            if self._sessions and not isinstance(module, Inner):
                raise ConfigError(
                    "the script puts a model in DistributedDataParallel after parallelize(): take"
                    " that line out for the comparison, which puts the model in DDP itself"
                )
            make(wrapper, module, *rest, **named)

        dist.destroy_process_group = destroy
        DistributedDataParallel.__init__ = made  # type: ignore[method-assign,assignment]

    def _any_step(self, *_: Any) -> None:
        self._foreign_steps += not self._sessions
        if self._foreign_steps == _PATIENCE_STEPS:
            raise ConfigError(
                f"the script has made {_PATIENCE_STEPS} optimizer steps without calling"
                " foreprop.parallelize(model, optimizer): add foreprop's two lines to it"
            )

    def parallelize(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        **settings: Any,
    ) -> Session:
        """Do what `foreprop.parallelize` does, with the system that is being measured."""
        if self._system.is_ours:
            session = make_session(model, optimizer, **_changed(self._system, settings))
        else:
            session = self._local(model, optimizer, **settings)
        self._sessions.append(session)
        is_first = len(self._sessions) == 1  # whose steps count
        if is_first:
            self._parameters = list(model.parameters())
            self._has_optimizer = optimizer is not None
            if self._parameters:
                self._recorder.use_device(self._parameters[0].device)
        if optimizer is not None:
            self._wrap_step(optimizer, is_first)
        if is_first:
            self._began(session.describe())
        return session

    def _local(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        *,
        preset: Any = None,
        config: Config | None = None,
        world: Any = None,
        scaler: torch.amp.GradScaler | None = None,
        **settings: Any,
    ) -> Session:
        """DDP's session, or nobody's: what settings do in ``optimizer.step`` is done as alone."""
        chosen = (config or Config.resolve(preset, **settings)).replace(trace=None)
        check_plain(model)
        if self._name != ALONE:
            if self._group is None:
                backend = self._backend or usual_backend(model)
                self._group = ProcessGroup(backend, chosen.step_timeout_s)
            bf16 = self._name == DDP_BF16
            reduction = Reduction(model, bf16=bf16, find_unused=self._find_unused)
            self._reductions.append(reduction)
        info = launch_info()
        backend = f" on {dist.get_backend()}" if self._reductions else ""
        about = f"{counted(info.world_size, 'worker')}: {self._system.title}{backend}"
        return LocalSession(model, optimizer, chosen, scaler, about=about)

    def _wrap_step(self, optimizer: torch.optim.Optimizer, is_first: bool) -> None:
        own = optimizer.step

        def step(_: torch.optim.Optimizer, *arguments: Any, **named: Any) -> Any:
            has_closure = any(callable(value) for value in (*arguments, *named.values()))
            for reduction in self._reductions:
                reduction.begin_step(has_closure=has_closure)
            result = own(*arguments, **named)
            if is_first:
                self._end_step()
            return result

        if hasattr(own, "_wrapped_by_lr_sched"):
            step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]

    def _end_step(self) -> None:
        if not self._is_over and self._recorder.end_step():
            self.finish()
        if self._is_over:
            raise Enough

    def _waited_s(self) -> float | None:
        if not self._system.is_ours:
            return None
        return float(sum(session.stats()["waited_s"] for session in self._sessions))

    def finish(self) -> None:
        """Close the sessions and report the result; all ranks have made their last step."""
        if self._is_over:
            return
        self._is_over = True
        self._recorder.end()
        for session in reversed(self._sessions):
            session.close()
        self._ended(digest_of(self._parameters))
        self._end_reductions()
        if self._group is not None:
            self._group.end()

    def _end_reductions(self) -> None:
        while self._reductions:
            self._reductions.pop().end()


def _changed(system: Contender, settings: dict[str, Any]) -> dict[str, Any]:
    """A script's arguments of ``parallelize``, with what the system changes of them."""
    config = settings.get("config")
    if config is not None:
        return settings | {"config": system.config_from(config)}
    preset = {"preset": system.preset} if system.preset else {}
    return settings | preset | dict(system.settings)
