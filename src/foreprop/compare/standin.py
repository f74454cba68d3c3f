"""In one rank of a comparison: what takes the place of ``foreprop.parallelize``."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from foreprop.compare.ddp import Inner, ProcessGroup, Reduction, check_plain, usual_backend
from foreprop.compare.recorder import Recorder, digest_of
from foreprop.compare.systems import ALONE, CONTENDERS, DDP_BF16, Contender
from foreprop.config import Config, launch_info
from foreprop.errors import ConfigError
from foreprop.quantities import counted
from foreprop.session import session as sessions
from foreprop.session.alone import LoneSession
from foreprop.session.session import Session

_PATIENCE_STEPS = 25
"""Steps that optimizers make without a call of ``parallelize`` before we say so."""


class Enough(BaseException):
    """The script has made as many steps as it was asked for."""


class LocalSession(LoneSession):
    """A session whose gradients are nobody's business, or DDP's; rank and size are torchrun's."""

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

    ``began`` and ``ended`` are told, at the first session, who takes part, and at the end the
    digest of its parameters.
    ``backend``: DDP's, if the script makes no process group; None: as the model's device suggests.
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
        self._original: Callable[..., Session] = sessions.parallelize
        self._sessions: list[Session] = []
        self._reductions: list[Reduction] = []
        self._group: ProcessGroup | None = None
        self._parameters: list[torch.Tensor] = []
        self._has_optimizer = True
        self._foreign_steps = 0
        self._is_over = False

    @property
    def is_ready(self) -> bool:
        """Whether the script has called ``parallelize``."""
        return bool(self._sessions)

    # Its place.
    def install(self) -> None:
        """From now on; call before the script is run."""
        vars(sys.modules["foreprop"])["parallelize"] = self.parallelize
        vars(sessions)["parallelize"] = self.parallelize
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
            self._refuse_wrappers()
            self._watch_group()

    def _watch_group(self) -> None:
        """Where the script ends its process group itself, reducers go before it."""
        own = dist.destroy_process_group

        def destroy(*arguments: Any, **named: Any) -> None:
            self._end_reductions()
            own(*arguments, **named)

        dist.destroy_process_group = destroy

    def _refuse_wrappers(self) -> None:
        """A DDP of the script's own would reduce what ours has reduced."""
        make = DistributedDataParallel.__init__

        def made(wrapper: Any, module: torch.nn.Module, *rest: Any, **named: Any) -> None:
            if self._sessions and not isinstance(module, Inner):
                raise ConfigError(
                    "the script puts a model in DistributedDataParallel after parallelize(): take"
                    " that line out for the comparison, which puts the model in DDP itself"
                )
            make(wrapper, module, *rest, **named)

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
        """As `foreprop.parallelize`, with the system that is being measured."""
        if self._system.is_ours:
            session = self._original(model, optimizer, **_changed(self._system, settings))
        else:
            session = self._local(model, optimizer, **settings)
        self._sessions.append(session)
        if len(self._sessions) == 1:
            self._begin(session, model, optimizer)
        elif optimizer is not None:
            _follow(optimizer, self._before_step, lambda: None)
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
        """DDP's, or nobody's. What settings do within `optimizer.step` is done as for one rank."""
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

    # Its steps.
    def _begin(
        self,
        session: Session,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        """Of several sessions the first one's steps count."""
        self._parameters = list(model.parameters())
        self._has_optimizer = optimizer is not None
        if self._parameters:
            self._recorder.use_device(self._parameters[0].device)
        if optimizer is not None:
            _follow(optimizer, self._before_step, self._end_step)
        self._began(session.describe())

    def _before_step(self, *, has_closure: bool) -> None:
        for reduction in self._reductions:
            reduction.begin_step(has_closure=has_closure)

    def _end_step(self) -> None:
        if not self._is_over and self._recorder.end_step():
            self.finish()
        if self._is_over:
            raise Enough

    def _waited_s(self) -> float | None:
        if not self._system.is_ours:
            return None
        return float(sum(session.stats()["waited_s"] for session in self._sessions))

    # The end.
    def finish(self) -> None:
        """All ranks have made their last step: leave together, and tell."""
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
    """What ``parallelize`` is given in the place of what the script gives it."""
    config = settings.get("config")
    if config is not None:
        return settings | {"config": system.config_from(config)}
    preset = {"preset": system.preset} if system.preset else {}
    return settings | preset | dict(system.settings)


def _follow(
    optimizer: torch.optim.Optimizer,
    before: Callable[..., None],
    after: Callable[[], None],
) -> None:
    """Have ``step`` call both. Outside of all that a session has put there: ``after`` may raise."""
    own = optimizer.step

    def step(self: torch.optim.Optimizer, *arguments: Any, **named: Any) -> Any:
        before(has_closure=any(callable(value) for value in (*arguments, *named.values())))
        result = own(*arguments, **named)
        after()
        return result

    if hasattr(own, "_wrapped_by_lr_sched"):
        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
