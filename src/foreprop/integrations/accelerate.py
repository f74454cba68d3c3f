"""accelerate: an `Accelerator` whose `prepare` gives models and optimizers to `parallelize`.

An optimizer waits until its model is prepared, too, and the other way round; then they get a
session.

What is private in accelerate is used in this file only, and in `params.wrappers`:
`Accelerator.prepare_model` wraps in DDP unless ``evaluation_mode`` is set, and `prepare` calls the
object's own `prepare_model` and `prepare_optimizer`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator, DistributedType

from foreprop.config import Config
from foreprop.errors import ConfigError, TrainingLoopError
from foreprop.params.interception import is_managed
from foreprop.session.composition import parallelize
from foreprop.session.session import Session

_PLAIN = (DistributedType.NO, *(t for t in DistributedType if t.name.startswith("MULTI_")))
"""One process, or one for each device that would get a DistributedDataParallel."""


class ForepropAccelerator(Accelerator):  # type: ignore[misc]  # accelerate has no types
    """`accelerate.Accelerator`, with `foreprop.parallelize` where it has DDP.

    Args:
        *arguments: accelerate's own, as are ``options``.
        foreprop: settings for `foreprop.parallelize`, over preset and environment.

    Raises `ConfigError` for FSDP, DeepSpeed, Megatron-LM, tensor parallelism, XLA and
    communication hooks of DDP.
    """

    def __init__(
        self, *arguments: Any, foreprop: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self._begin(foreprop)

    @classmethod
    def taking_over(
        cls, accelerator: Accelerator, settings: Mapping[str, Any] | None = None
    ) -> ForepropAccelerator:
        """The same object, which somebody else has made, with this class's behaviour."""
        if type(accelerator) is not Accelerator:
            raise ConfigError(
                f"the accelerator is a {type(accelerator).__name__} and not accelerate's own class:"
                " foreprop would replace what it does"
            )
        accelerator.__class__ = cls
        ours: ForepropAccelerator = accelerator
        ours._begin(settings)
        return ours

    def _begin(self, settings: Mapping[str, Any] | None) -> None:
        self._settings = dict(settings or {})
        self._sessions: list[Session] = []
        self._trained: list[torch.nn.Module] = []
        self._without_session: list[torch.optim.Optimizer] = []
        self._with_session: list[torch.optim.Optimizer] = []
        self._doubtful: list[torch.nn.Module] = []
        """Models with parameters that no session has, though they may get gradients."""
        self._preparing = False
        kind = self.distributed_type
        mesh = getattr(self, "parallelism_config", None)
        if kind not in _PLAIN or (mesh is not None and mesh.tp_enabled):
            name = kind.value if kind not in _PLAIN else "tensor parallelism"
            raise ConfigError(
                f"accelerate is configured for {name}: foreprop trains whole models, one on every"
                " rank, as accelerate does with multi_gpu or multi_cpu"
            )
        hook = getattr(getattr(self, "ddp_handler", None), "comm_hook", None)
        if hook is not None and hook.name != "NO":
            raise ConfigError(
                f"DistributedDataParallelKwargs has comm_hook {hook.value}, but gradients do not go"
                " through DDP here; wire_dtype='bfloat16' of foreprop halves the bytes"
            )

    @property
    def sessions(self) -> Sequence[Session]:
        """One for each optimizer that was prepared with its model, in this order."""
        return tuple(self._sessions)

    def prepare(self, *objects: Any, device_placement: Any = None) -> Any:
        """Prepare as accelerate does; each optimizer and its model get a session."""
        self._preparing = True
        try:
            prepared = super().prepare(*objects, device_placement=device_placement)
        finally:
            self._preparing = False
        self._open_sessions()
        return prepared

    def prepare_model(
        self,
        model: torch.nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> torch.nn.Module:
        """Prepare as accelerate does, without the DistributedDataParallel around the model."""
        prepared: torch.nn.Module = super().prepare_model(
            model, device_placement=device_placement, evaluation_mode=True
        )
        # the module that `torch.compile` was given, whose parameters have their own names
        inner = getattr(prepared, "_orig_mod", prepared)
        bare = inner if isinstance(inner, torch.nn.Module) else prepared
        if not evaluation_mode and not any(bare is known for known in self._trained):
            self._trained.append(bare)
        if not self._preparing:
            self._open_sessions()
        return prepared

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> Any:
        prepared = super().prepare_optimizer(optimizer, device_placement=device_placement)
        if not any(prepared is known for known in self._with_session):
            self._without_session.append(prepared)
        if not self._preparing:
            self._open_sessions()
        return prepared

    def _open_sessions(self) -> None:
        waiting, self._without_session = self._without_session, []
        for optimizer in waiting:
            model = self._model_of(optimizer)
            if model is None:
                self._without_session.append(optimizer)
            else:
                self._sessions.append(parallelize(model, optimizer, **self._settings))
                self._with_session.append(optimizer)
        self._doubtful = [
            model
            for model in self._trained
            if any(p.requires_grad and not is_managed(p) for p in model.parameters())
        ]

    def _model_of(self, optimizer: torch.optim.Optimizer) -> torch.nn.Module | None:
        # the one of which the optimizer has the most parameters
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        counts = [sum(id(p) in own for p in model.parameters()) for model in self._trained]
        if not counts or not max(counts):
            return None
        return self._trained[counts.index(max(counts))]

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Do as accelerate does; `TrainingLoopError` for gradients that no session averages."""
        super().backward(loss, **options)
        if self.use_distributed and self._doubtful:
            for model in self._doubtful:
                for name, parameter in model.named_parameters():
                    if not is_managed(parameter) and parameter.grad is not None:
                        raise TrainingLoopError(
                            f"backward() has made a gradient of {name}, which no session averages:"
                            " give prepare() the optimizer of its model, too"
                        )

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Clip as accelerate does; the norm before clipping, with servers the last step's.

        They clip by their own setting, which ``max_norm`` must be, or infinite.
        """
        session = next((s for s in self._sessions if asks_servers(s.config)), None)
        if session is None:
            return super().clip_grad_norm_(parameters, max_norm, norm_type=norm_type)
        clip = session.config.clip_grad_norm
        if max_norm not in (clip, math.inf):
            raise ConfigError(
                f"clip_grad_norm_() is called with max_norm={max_norm}, but servers update, with"
                f" clip_grad_norm={clip}: give ForepropAccelerator the same clip_grad_norm"
            )
        norm = session.grad_norm
        return torch.tensor(math.nan if norm is None else norm, device=self.device)

    @contextlib.contextmanager
    def join_uneven_inputs(
        self, joinables: Sequence[Any], even_batches: bool | None = None
    ) -> Iterator[None]:
        """Do nothing if all ranks have equally many batches; raise `ConfigError` otherwise."""
        if not self.even_batches or even_batches is False:
            raise ConfigError(
                "join_uneven_inputs() is for ranks with different numbers of batches, and foreprop"
                " needs equally many: leave even_batches at True, accelerate's default"
            )
        yield

    def free_memory(self, *objects: Any) -> Any:
        """Do as accelerate does, and close the sessions; the optimizers keep their state."""
        self._close_sessions(keep_state=True)
        return super().free_memory(*objects)

    def end_training(self) -> None:
        self._close_sessions(keep_state=False)
        super().end_training()

    def _close_sessions(self, *, keep_state: bool) -> None:
        sessions, self._sessions = self._sessions, []
        optimizers = self._optimizers if keep_state and sessions else []
        states = [optimizer.state_dict() for optimizer in optimizers]
        for session in sessions:
            session.close()
        for optimizer, state in zip(optimizers, states, strict=True):
            optimizer.load_state_dict(state)
        for kept in (self._trained, self._without_session, self._with_session, self._doubtful):
            kept.clear()


def config_of(settings: Mapping[str, Any]) -> Config:
    """The settings as `foreprop.parallelize` will resolve them."""
    rest = dict(settings)
    preset, config = rest.pop("preset", None), rest.pop("config", None)
    return config or Config.resolve(preset, **rest)


def asks_servers(config: Config) -> bool:
    """Whether the settings alone say that servers update, so that loops cannot read gradients."""
    asked = (config.clip_grad_norm, config.clip_grad_value, config.ema)
    return config.update == "servers" or any(value is not None for value in asked)
