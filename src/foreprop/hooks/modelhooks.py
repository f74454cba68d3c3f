"""Our hooks on the user's model and optimizer, which no copy has, and the buffers that they show.

Whoever copies, pickles or converts one is led past them: `hooks.copies`, loaded when that happens.
"""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils.hooks import RemovableHandle

from foreprop.core.manifest import BUFFERS_BLOB
from foreprop.errors import ConfigError
from foreprop.hooks.interception import WAITS_AT_ENTRY, Interception, entered
from foreprop.path.memory import bytes_of
from foreprop.path.waiting import used, used_outside_torch, waits_for

if TYPE_CHECKING:
    from foreprop.cluster.world import World
    from foreprop.path.managedparameter import Engine


class OwnHook:
    """A hook of ours. Where somebody copies it himself, his copy is one that does nothing."""

    def before_copy(self) -> None:
        """The module that has the hook is about to be pickled or copied."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return nullcontext().__exit__

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return getattr, (nullcontext(), "__exit__")  # which any Python can load


class CallingHook(OwnHook):
    """Calls a function with whatever it is called with."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)


class BeforeModule(OwnHook):
    """``wait="modules"``: waits for the parameters that the module owns itself."""

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():  # then this has been done at the entry
            used([p for p in module._parameters.values() if p is not None], lambda: None)


def before_loading(module: Any, hook: OwnHook) -> RemovableHandle:
    """Like ``module.register_load_state_dict_pre_hook``, also on script modules."""
    register: Any = torch.nn.Module._register_load_state_dict_pre_hook
    handle: RemovableHandle = register(module, hook, with_module=True)
    return handle


def before_forward(module: Any, hook: OwnHook) -> RemovableHandle:
    """Like ``module.register_forward_pre_hook``, also on script modules."""
    register: Any = torch.nn.Module.register_forward_pre_hook
    handle: RemovableHandle = register(module, hook)
    return handle


# Copies and conversions.
def _reducing(reduce_ex: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(reduce_ex)
    def wrapper(self: torch.nn.Module, protocol: Any) -> Any:
        from foreprop.hooks.copies import reduce_module

        return reduce_module(reduce_ex, self, protocol)

    return wrapper


def _converting(convert: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(convert)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        from foreprop.hooks.copies import convert_modules

        entered(everything=True)
        return convert_modules(convert, args, kwargs)

    return wrapper


def _making_parameter(new: Callable[..., Any]) -> Any:
    """``nn.Parameter(layer.weight)``: torch asks of which class the tensor is, and so must wait."""

    @functools.wraps(new)
    def wrapper(cls: type, data: Any = None, requires_grad: bool = True) -> Any:
        if waits_for(data) is None:
            return new(cls, data, requires_grad)
        return used_outside_torch(data, lambda plain: new(cls, plain, requires_grad))

    return staticmethod(wrapper)


_COPIES = Interception(torch.nn.Module, "__reduce_ex__", _reducing)
_PARAMETERS = Interception(torch.nn.Parameter, "__new__", _making_parameter)
_CONVERSIONS: dict[tuple[str, str], Interception] = {}
_CONVERTERS = (
    ("torch.jit._script", "_script_impl"),
    ("torch.jit._trace", "_trace_impl"),
    ("torch.jit._trace", "trace_module"),
    ("torch.jit", "trace_module"),
    ("torch.export", "export"),
    ("torch.export._trace", "_export"),  # for who has imported `export` by name
)


def keep_copies_plain() -> list[Callable[[], None]]:
    """From now on; the returned functions end it."""
    releases = [_COPIES.hold(), _PARAMETERS.hold()]
    for module, name in _CONVERTERS:
        owner = sys.modules.get(module)
        if owner is not None and hasattr(owner, name):
            key = (module, name)
            known = _CONVERSIONS.setdefault(key, Interception(owner, name, _converting))
            releases.append(known.hold())
    return releases


OWN_ATTRIBUTES = ("step", "zero_grad", "add_param_group")
"""What a session puts into the optimizer's own attributes."""


def keep_copy_plain(
    optimizer: torch.optim.Optimizer,
    before: dict[str, Any],
    pull_state: Callable[[], None],
    drop_state: Callable[[], None],
) -> Callable[[], None]:
    """Of the optimizer, from now on; the returned function ends it.

    ``before``: of the attributes that are the session's meanwhile, those that the user had. The
    state is where ``pull_state`` puts it, until ``drop_state``.
    """

    def reduce_ex(self: torch.optim.Optimizer, protocol: Any) -> Any:
        from foreprop.hooks.copies import reduce_optimizer

        pull_state()
        try:
            return reduce_optimizer(self, protocol, before, (*OWN_ATTRIBUTES, "__reduce_ex__"))
        finally:
            drop_state()

    attributes = vars(optimizer)
    attributes["__reduce_ex__"] = types.MethodType(reduce_ex, optimizer)
    return lambda: attributes.pop("__reduce_ex__", None)


# Buffers (BatchNorm's running statistics): local while training, rank 0's when it matters.
#
# In a forward pass in evaluation mode and in ``state_dict()`` every rank shows rank 0's buffers of
# the last completed step. Rank 0 leaves a copy with a server at each step; the others fetch it when
# they need it, so no rank has to do anything at the same time as another.
class BufferSource(Protocol):
    def synchronise_buffers(self) -> None:
        """Make the local buffers rank 0's of the last completed step."""

    def flush(self) -> None:
        """Wait for all pending parameters."""

    def saving(self, begins: bool) -> None:
        """The model's ``state_dict()`` begins, or ends."""

    def forward_started(self) -> None:
        """The model's forward pass begins."""


class ModelHook(OwnHook):
    """A hook that does nothing when its source is gone."""

    def __init__(self, source: BufferSource | None = None) -> None:
        self._source = weakref.ref(source) if source is not None else None

    def _get(self) -> BufferSource | None:
        return self._source() if self._source is not None else None


class BeforeForward(ModelHook):
    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        if not module.training and not _in_compiled_code():
            _synchronise(self)


class FirstForward(ModelHook):
    """Tells the source that a forward pass that will be differentiated has begun."""

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        if torch.is_grad_enabled() and not _in_compiled_code():
            _note_started(self)


class BeforeStateDict(ModelHook):
    def __call__(self, module: torch.nn.Module, prefix: str, keep_vars: bool) -> None:
        _synchronise(self)

    def before_copy(self) -> None:
        _synchronise(self)


class StateDictBegins(ModelHook):
    def __call__(self, module: torch.nn.Module, prefix: str, keep_vars: bool) -> None:
        source = self._get()
        if source is not None:
            source.saving(True)


class StateDictEnds(ModelHook):
    def __call__(self, module: torch.nn.Module, *_: Any) -> None:
        source = self._get()
        if source is not None:
            source.saving(False)


class BeforeLoadStateDict(ModelHook):
    def __call__(self, module: torch.nn.Module, *args: Any) -> None:
        source = self._get()
        if source is not None:
            source.flush()


def _in_compiled_code() -> bool:
    """Then all this has been done at its entry, see `hooks.interception`."""
    return WAITS_AT_ENTRY and torch.compiler.is_compiling()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _synchronise(hook: ModelHook) -> None:
    source = hook._get()
    if source is not None:
        source.synchronise_buffers()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _note_started(hook: ModelHook) -> None:
    source = hook._get()
    if source is not None:
        source.forward_started()


class ModelBuffers:
    """A model's buffers, by place: a module may put another tensor there at any time."""

    def __init__(self, model: torch.nn.Module) -> None:
        seen: set[int] = set()
        self._places: list[tuple[torch.nn.Module, str]] = []
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
                if buffer.numel() and id(buffer) not in seen:
                    seen.add(id(buffer))
                    self._places.append((module, name))
        self.size_bytes = packed_bytes(self.now())

    def __len__(self) -> int:
        return len(self._places)

    def now(self) -> list[torch.Tensor]:
        """The tensors that are there now."""
        return [module._buffers[name] for module, name in self._places]  # type: ignore[misc]

    def check_size(self) -> None:
        size_bytes = packed_bytes(self.now())
        if size_bytes != self.size_bytes:
            raise ConfigError(
                f"the model's buffers had {self.size_bytes} bytes at parallelize() and have"
                f" {size_bytes} now; their shapes and types must stay"
            )


class SharedBuffers:
    """Rank 0's buffers of each step: left with a server, and fetched by who shows them."""

    def __init__(self, buffers: ModelBuffers, engine: Engine, world: World) -> None:
        self._buffers = buffers
        self._engine = engine
        self._rank = world.rank
        self.publishes = world.rank == 0 and world.size > 1
        self._shown_step = 0
        self._are_own = False
        self._have_come = False

    def keep_own(self) -> None:
        """Every rank's are its own: rank 0's are not shown."""
        self._are_own = True

    def have_come(self) -> None:
        """A newcomer's come with the values."""
        self._have_come = True

    def forget_shown(self) -> None:
        """They have been loaded: an evaluation shows rank 0's all the same."""
        self._shown_step = -1

    def publish(self, step: int) -> None:
        """Rank 0: these are the buffers after ``step``."""
        self._buffers.check_size()
        if tensors := self._buffers.now():
            self._engine.publish_blob(BUFFERS_BLOB, step, pack(tensors))

    def show(self, step: int) -> None:
        """Make the local buffers rank 0's after ``step``."""
        if self._rank != 0 and self._shown_step != step and not self._are_own:
            self._buffers.check_size()
            self.fetch(step)
            self._shown_step = step

    def fetch(self, step: int) -> None:
        if not self._have_come and (tensors := self._buffers.now()):
            unpack_into(tensors, self._engine.fetch_blob(BUFFERS_BLOB, step))


def pack(tensors: Sequence[torch.Tensor]) -> bytes:
    """The tensors' bytes, one after the other."""
    return b"".join(bytes(bytes_of(tensor.detach().cpu().contiguous())) for tensor in tensors)


def unpack_into(tensors: Sequence[torch.Tensor], data: memoryview) -> None:
    """The inverse of `pack`, in place.

    A graph that waits for its backward pass may have kept a running average, though it does not
    read that: an evaluation between the two passes is no error.
    """
    offset = 0
    autograd: Any = torch.autograd
    with torch.no_grad(), autograd._unsafe_preserve_version_counter(tuple(tensors)):
        for tensor in tensors:
            received = torch.empty(tensor.shape, dtype=tensor.dtype)
            size = received.numel() * received.element_size()
            bytes_of(received)[:] = data[offset : offset + size]
            tensor.copy_(received)
            offset += size


def packed_bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
