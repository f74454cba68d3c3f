"""The user's model and optimizer: they become a session's, and are given back when it ends.

`UserModel` says which of their parameters are synchronised, and as what. `adopt` replaces methods
of the optimizer, in the object, and registers hooks on the model; everything is undone at the
session's end (`Lifetime.add_undo`). While the session lasts, a backward pass may need a value that
an update has replaced; then autograd's own error gets a note.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch

from foreprop.config import Config
from foreprop.core.manifest import NO_GROUP, ParameterInfo, RowInit
from foreprop.engine.optimizer import checked_dtype, named_parameters, others_named
from foreprop.params.interception import (
    Interception,
    check_unmanaged,
    managed_ids,
    watch_entries,
    watch_scripts,
)
from foreprop.params.modelhooks import (
    OWN_ATTRIBUTES,
    BeforeForward,
    BeforeModule,
    BeforeStateDict,
    CallingHook,
    ModelBuffers,
    ModelHook,
    before_forward,
    before_loading,
    keep_copies_plain,
    keep_copy_plain,
    watch_wrappers,
)
from foreprop.params.optimizerstate import give_plain_state
from foreprop.session.training import Training

_EMBEDDINGS = (torch.nn.Embedding, torch.nn.EmbeddingBag)

Named = tuple[str, torch.nn.Parameter, int]
"""A parameter's name, itself, and the number of its group in the optimizer."""


class UserModel:
    """The model and the optimizer. Parameters go by their numbers: the optimizer's come first."""

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, config: Config
    ) -> None:
        self.model = model
        self.has_optimizer = optimizer is not None
        self.optimizer = optimizer or torch.optim.SGD(model.parameters())
        self._own = list(named_parameters(model, self.optimizer))
        self.optimized = len(self._own)  # the number of parameters that the optimizer has
        self.embeddings = None
        if self._may_have_tables(config):
            from foreprop.features.tables.embeddings import Embeddings

            self.embeddings = Embeddings(model, self._own, self.optimizer, config)
        self.named: list[Named] = []
        self.buffers = ModelBuffers(model)

    def _may_have_tables(self, config: Config) -> bool:
        # or something that would have to be one
        model = self.model
        tensors = itertools.chain(
            model.parameters(), model.buffers(), (parameter for _, parameter, _ in self._own)
        )
        has_tables = any(isinstance(module, _EMBEDDINGS) for module in model.modules())
        is_asked = config.sparse_parameters is not None
        return has_tables or is_asked or any(tensor.is_meta for tensor in tensors)

    @property
    def row_wise(self) -> Collection[str]:
        """The names of the tables that servers hold row by row from the start."""
        return () if self.embeddings is None else self.embeddings.row_wise

    @property
    def candidates(self) -> Collection[str]:
        """The names of the tables that ``architecture="auto"`` decides about."""
        return () if self.embeddings is None else self.embeddings.candidates

    @property
    def has_dense(self) -> bool:
        """Whether the optimizer has other parameters than tables held row by row."""
        return self.optimized > len(self.row_wise)

    def renew(self) -> None:
        """Take in that the model, the optimizer or what requires a gradient has changed."""
        self._own = list(named_parameters(self.model, self.optimizer))
        self.optimized = len(self._own)
        self.buffers = ModelBuffers(self.model)
        self.take()

    def new_parameters(self) -> Iterator[tuple[int, str]]:
        """The ids and names of parameters to be trained that no session has."""
        known = {id(parameter) for _, parameter, _ in self.named} | managed_ids()
        own = named_parameters(self.model, self.optimizer)
        for name, parameter, _ in itertools.chain(own, others_named(self.model, self.optimizer)):
            lazy = torch.nn.parameter.is_lazy(parameter)
            if id(parameter) not in known and parameter.requires_grad and not lazy:
                yield id(parameter), name

    def take(self) -> None:
        """Number the parameters. Raises `ConfigError` for those that cannot be synchronised."""
        if self.embeddings is not None:
            from foreprop.features.tables.embeddings import check_rest

            check_rest(self.model, self._own)
        check_unmanaged(self._own)
        others = others_named(self.model, self.optimizer)
        self.named = self._own + [entry for entry in others if id(entry[1]) not in managed_ids()]
        self._managed_ids = {id(parameter) for _, parameter, _ in self.named} | managed_ids()

    @property
    def frozen(self) -> list[torch.nn.Parameter]:
        """The model's parameters that no session has."""
        return [p for p in self.model.parameters() if id(p) not in self._managed_ids]

    def infos(self, row_wise: Collection[str], *, by_workers: bool) -> Iterator[ParameterInfo]:
        """What all ranks must agree on. ``row_wise``: names; ``by_workers``: they update."""
        tables = self.embeddings
        sparse: Collection[str] = () if tables is None else tables.sparse
        remote: Mapping[str, RowInit] = {} if tables is None else tables.remote
        for name, parameter, group in self.named:
            rows = name in row_wise
            yield ParameterInfo(
                dtype=checked_dtype(name, parameter),
                name=name,
                shape=tuple(parameter.shape),
                group=NO_GROUP if by_workers and not rows else group,
                rows=rows,
                sparse=name in sparse,
                init=remote.get(name),
                requires_grad=parameter.requires_grad,
            )

    def make_sparse(self, names: Collection[str]) -> None:
        """Have these tables' gradients be sparse, until `restore`."""
        if self.embeddings is not None:
            self.embeddings.make_sparse(names)

    def restore(self) -> None:
        """Have embeddings' gradients be as the user had them."""
        if self.embeddings is not None:
            self.embeddings.restore()


def adopt(training: Training) -> None:
    """Make model and optimizer the session's, until its end. Raises `ForepropError`."""
    add_undo = training.life.add_undo
    _adopt_optimizer(training)
    _adopt_model(training)
    if training.loss_scale is not None:
        alive = training.reference()
        add_undo(training.loss_scale.adopt(lambda: alive().grad_norm))
    add_undo(*(interception.hold() for interception in _BACKWARD))
    add_undo(watch_entries(training.composition.compiled_code_entered), *watch_scripts())
    add_undo(*training.additions.watch())
    add_undo(*keep_copies_plain(), *watch_wrappers())
    if training.stale_readers is not None:
        add_undo(training.stale_readers.watch())
    if training.user.row_wise or training.user.candidates:
        from foreprop.features.tables.lookahead import lookahead

        add_undo(lookahead.join())


def _adopt_optimizer(training: Training) -> None:
    optimizer = training.user.optimizer
    own = {name: getattr(optimizer, name) for name in OWN_ATTRIBUTES}
    before = {k: v for k, v in vars(optimizer).items() if k in OWN_ATTRIBUTES}
    _put_step(optimizer, own["step"], training.reference())
    alive = training.reference()

    def zero_grad(self: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        alive().discard_gradients(set_to_none)
        # nobody looks at what is let go of; zeros are written to gradients that may have to wait
        context = torch._C.DisableTorchFunctionSubclass if set_to_none else nullcontext
        with context():
            own["zero_grad"](set_to_none=set_to_none)

    def add_param_group(self: torch.optim.Optimizer, param_group: Any) -> None:
        additions = alive().additions
        additions.check_group()
        own["add_param_group"](param_group)
        additions.given_to_optimizer(self.param_groups[-1]["params"])

    optimizer.zero_grad = types.MethodType(zero_grad, optimizer)  # type: ignore[method-assign]
    optimizer.add_param_group = types.MethodType(add_param_group, optimizer)  # type: ignore[method-assign]

    def restore() -> None:
        for name in OWN_ATTRIBUTES:
            if name in before:
                setattr(optimizer, name, own[name])
            else:
                vars(optimizer).pop(name, None)
        give_plain_state(optimizer)

    training.life.add_undo(restore)
    if not training.by_workers:
        training.state.watch()
    _watch_state(training, before)


def _put_step(
    optimizer: torch.optim.Optimizer, own_step: Callable[..., Any], alive: Callable[[], Training]
) -> None:
    @torch.optim.Optimizer.profile_hook_step
    def served(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        # the step is made by servers, or later
        if "grad_scale" in vars(self) and not alive().by_workers:
            from foreprop.params.loss_scale import refuse_scaler

            refuse_scaler(self)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        training = alive()
        try:
            training.step()
        except BaseException as error:
            training.life.give_up(error)
            raise
        return loss

    @torch.compiler.disable(reason="foreprop makes the optimizer's step")  # type: ignore[no-untyped-call, untyped-decorator]
    def step(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        training = alive()
        training.stepped = True
        if training.by_workers and training.makes_whole_steps():
            with training.life.giving_up_on_error():
                result = training.step_whole(own_step, *args, **kwargs)
        else:
            result = served(self, *args, **kwargs)
        self._opt_called = True  # type: ignore[attr-defined]  # schedulers look at this
        return result

    if hasattr(own_step, "_wrapped_by_lr_sched"):
        step._wrapped_by_lr_sched = True
    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]


def _watch_state(training: Training, before: dict[str, Any]) -> None:
    # checkpoints and copies have the state; ``before`` has the user's own attributes
    optimizer, alive = training.user.optimizer, training.reference()

    def pull_state(*_: Any) -> None:
        alive().state.lend()

    def drop_state(*_: Any) -> None:
        alive().state.take_back()

    training.life.add_undo(keep_copy_plain(optimizer, before, pull_state, drop_state))
    handles = [
        optimizer.register_state_dict_pre_hook(CallingHook(pull_state)),
        optimizer.register_state_dict_post_hook(CallingHook(drop_state)),
        optimizer.register_load_state_dict_pre_hook(
            # the updates so far go by the old state
            CallingHook(lambda *_: alive().settle_all())
        ),
        optimizer.register_load_state_dict_post_hook(CallingHook(lambda _: alive().state.loaded())),
    ]
    training.life.add_undo(*(handle.remove for handle in handles))


def _adopt_model(training: Training) -> None:
    model: Any = training.user.model
    if training.trace is not None:
        from foreprop.params.compute_trace import ComputeTrace

        trace = ComputeTrace(model, training.trace, lambda: training.completed + 1)
        training.compute_trace = trace
        training.life.add_undo(trace.remove)
    for module in model.modules():  # a part may be loaded by itself
        training.life.add_undo(*watch_module(training, module))
    handles = []
    if training.config.whole_tables not in (None, "all"):
        handles.append(model.register_state_dict_pre_hook(ModelHook(training.saving, True)))
        handles.append(model.register_state_dict_post_hook(ModelHook(training.saving, False)))
    if training.remote is not None and training.user.embeddings is not None:
        handles += training.remote.watch(training.user.embeddings.modules_of)
    training.life.add_undo(*(handle.remove for handle in handles))
    watch_buffers(training)


def watch_module(training: Training, module: torch.nn.Module) -> list[Callable[[], None]]:
    """Register the hooks on a part of the model; the returned functions remove them."""
    handles = []
    if next(module.parameters(recurse=False), None) is not None:
        handles.append(before_loading(module, ModelHook(training.flush)))
    if training.config.wait == "modules":
        handles.append(before_forward(module, BeforeModule()))
    return [handle.remove for handle in handles]


def watch_buffers(training: Training) -> None:
    """Have evaluations and checkpoints show rank 0's buffers, if the model has any."""
    if training.user.buffers and not training.watches_buffers:
        training.watches_buffers = True
        model: Any = training.user.model
        handles = [
            before_forward(model, BeforeForward(training.synchronise_buffers)),
            model.register_state_dict_pre_hook(BeforeStateDict(training.synchronise_buffers)),
        ]
        training.life.add_undo(*(handle.remove for handle in handles))


def _with_advice(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except RuntimeError as error:
            from foreprop.params.looprules import add_advice

            add_advice(error)
            raise

    return wrapper


_BACKWARD = [Interception(torch.autograd, name, _with_advice) for name in ("backward", "grad")]
