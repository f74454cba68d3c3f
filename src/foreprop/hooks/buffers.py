"""Buffers (BatchNorm's running statistics): local while training, rank 0's when it matters.

In a forward pass in evaluation mode and in ``state_dict()`` every rank shows rank 0's buffers of
the last completed step. Rank 0 leaves a copy with a server at each step; the others fetch it when
they need it, so no rank has to do anything at the same time as another.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from foreprop.cluster.world import World
from foreprop.core.manifest import BUFFERS_BLOB
from foreprop.errors import ConfigError
from foreprop.hooks.interception import WAITS_AT_ENTRY
from foreprop.hooks.modelhooks import OwnHook
from foreprop.path.tensors import bytes_of

if TYPE_CHECKING:
    from foreprop.path.managedparameter import Engine


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

    def publish(self, step: int) -> None:
        """Rank 0: these are the buffers after ``step``."""
        self._buffers.check_size()
        if tensors := self._buffers.now():
            self._engine.publish_blob(BUFFERS_BLOB, step, pack(tensors))

    def show(self, step: int) -> None:
        """Make the local buffers rank 0's after ``step``."""
        if self._rank != 0 and self._shown_step != step:
            self._buffers.check_size()
            self.fetch(step)
            self._shown_step = step

    def fetch(self, step: int) -> None:
        if tensors := self._buffers.now():
            unpack_into(tensors, self._engine.fetch_blob(BUFFERS_BLOB, step))


def pack(tensors: Sequence[torch.Tensor]) -> bytes:
    """The tensors' bytes, one after the other."""
    return b"".join(bytes(bytes_of(tensor.detach().cpu().contiguous())) for tensor in tensors)


def unpack_into(tensors: Sequence[torch.Tensor], data: memoryview) -> None:
    """The inverse of `pack`, in place."""
    offset = 0
    with torch.no_grad():
        for tensor in tensors:
            received = torch.empty(tensor.shape, dtype=tensor.dtype)
            size = received.numel() * received.element_size()
            bytes_of(received)[:] = data[offset : offset + size]
            tensor.copy_(received)
            offset += size


def packed_bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
