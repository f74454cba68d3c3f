"""A device for tests that is as asynchronous as a GPU, and meaner: pure Python on the CPU wheel.

It is torch's PrivateUse1 backend for Python. An operation computes its result's shape on meta
tensors, returns at once, and is done later by a stream's thread (`streams`), with the CPU's
kernel: so the bits are the CPU's. Device memory is host memory that only those threads touch.
Views share it, so writing through them is right. Freed memory is overwritten at once, after the
work of the stream that it was allocated on: whoever else still uses it, and has not told by
`record_stream`, finds NaN.

Copies from and to pinned host memory happen at device time. Others hold up the caller, as CUDA's.

Sparse tensors are those of `sparse`, and autocast casts what linear layers are given.

Limits: one device, for torch's backend in Python has no more; no random operations (use the host's
generator).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tests.lagging import sparse, streams
from tests.lagging.streams import DEVICE, LINES, Event, Line, Stream, current_stream

POISON = 0xFF
"""Of floating-point numbers this makes NaN, of indices -1."""
_C: Any = torch._C
_ATEN: Any = torch.ops.aten
_CPU = _C.DispatchKeySet(_C.DispatchKey.CPU)
_BYTES_MORE = 64


class Block:
    """Some of the device's memory."""

    def __init__(self, size_bytes: int) -> None:
        self.host = torch.full((size_bytes + _BYTES_MORE,), POISON, dtype=torch.uint8)
        self.line = current_stream().line
        self.used_on: dict[int, Line] = {}
        MEMORY.allocated(size_bytes)
        self._size_bytes = size_bytes

    def free(self) -> None:
        """Its last tensor is gone. Any thread, at any time."""
        MEMORY.blocks.pop(self.host.data_ptr(), None)
        MEMORY.allocated(-self._size_bytes)
        for other in self.used_on.values():
            self.line.put(other.mark().wait)
        self.line.put(self._overwrite)

    def _overwrite(self) -> None:
        self.host.fill_(POISON)


class Memory:
    """What is on the device, and which host memory is pinned."""

    def __init__(self) -> None:
        self.blocks: dict[int, Block] = {}
        self.pinned: dict[int, int] = {}
        """Bytes, by address."""
        self.can_pin = True
        self.held_bytes = 0
        self.most_bytes = 0
        self.most_pinned_bytes = 0

    def allocated(self, size_bytes: int) -> None:
        self.held_bytes += size_bytes
        self.most_bytes = max(self.most_bytes, self.held_bytes)


MEMORY = Memory()


def _is_here(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == DEVICE


def _allocate(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    elems = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) if all(size) else 0
    size_bytes = elems * dtype.itemsize
    block = Block(size_bytes)
    address = block.host.data_ptr()
    MEMORY.blocks[address] = block
    storage = _C._construct_storage_from_data_pointer(
        address, torch.device(DEVICE, 0), max(size_bytes, 1)
    )
    weakref.finalize(storage, block.free).atexit = False
    made: torch.Tensor = _C._acc.create_empty_tensor((0,), dtype)
    _ATEN.set_.source_Storage_storage_offset.redispatch(
        _CPU, made, storage, 0, tuple(size), tuple(stride)
    )
    return made


def twin(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes as a CPU tensor, for a stream's thread."""
    block = MEMORY.blocks[tensor.untyped_storage().data_ptr()]
    made = torch.empty(0, dtype=tensor.dtype)
    made.set_(block.host.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
    return made


def _put(job: Callable[[], None]) -> None:
    current_stream().line.put(job)


def _finish(what: str) -> None:
    LINES.waited(what)
    current_stream().line.mark().wait()


# Operations.
_DATA_DEPENDENT = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive"}


def _fallback(op: Any, *args: Any, **kwargs: Any) -> Any:
    with _C.DisableTorchFunctionSubclass(), _C._AutoDispatchBelowAutograd():
        flat, spec = pytree.tree_flatten((args, kwargs))
        for value in flat:
            if isinstance(value, torch.Tensor) and not _is_here(value) and value.dim():
                raise RuntimeError(f"{op}: expected all tensors on {DEVICE}, found {value.device}")
        if op._schema.name.removeprefix("aten::") in _DATA_DEPENDENT:
            _finish(str(op))
            positional, named = pytree.tree_unflatten([_at_device_time(v) for v in flat], spec)
            found = op(*positional, **named)
            return pytree.tree_map_only(torch.Tensor, lambda x: x.to(DEVICE), found)
        metas = [_meta(value) for value in flat]
        positional, named = pytree.tree_unflatten(metas, spec)
        shapes, shape_spec = pytree.tree_flatten(op(*positional, **named))
        given = {id(meta): value for meta, value in zip(metas, flat, strict=True)}
        results = [_result(shape, given) for shape in shapes]
        ours = [_at_device_time(value) for value in flat]
        new = {
            i: twin(result)
            for i, (shape, result) in enumerate(zip(shapes, results, strict=True))
            if isinstance(shape, torch.Tensor) and id(shape) not in given
        }

        def run() -> None:
            positional, named = pytree.tree_unflatten(ours, spec)
            found, _ = pytree.tree_flatten(op(*positional, **named))
            for i, room in new.items():
                if found[i].numel() or not room.numel():  # the CPU leaves some out
                    room.copy_(found[i])

        run.name = str(op)  # type: ignore[attr-defined]
        _put(run)
        return pytree.tree_unflatten(results, shape_spec)


def _at_device_time(value: Any) -> Any:
    if _is_here(value):
        return twin(value)
    if isinstance(value, torch.Tensor):
        return value.clone()  # one number, which a kernel is given by value
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if not _is_here(value):
            return value
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
    return torch.device("meta") if isinstance(value, torch.device) else value


def _result(shape: Any, given: dict[int, Any]) -> Any:
    if not isinstance(shape, torch.Tensor):
        return shape
    if id(shape) in given:
        if shape.size() != given[id(shape)].size():  # an ``out`` that the operation resizes
            _move_to(given[id(shape)], _allocate(shape.size(), shape.stride(), shape.dtype))
        return given[id(shape)]
    return _allocate(shape.size(), shape.stride(), shape.dtype)


def _empty(size: Any, *, dtype: Any = None, memory_format: Any = None, **_: Any) -> torch.Tensor:
    shape = torch.empty(size, dtype=dtype, memory_format=memory_format, device="meta")
    return _allocate(shape.size(), shape.stride(), shape.dtype)


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> torch.Tensor:
    return _allocate(size, stride, dtype or torch.get_default_dtype())


def _resize(tensor: torch.Tensor, size: Any, *, memory_format: Any = None) -> torch.Tensor:
    if tensor.size() != torch.Size(size):
        if tensor.numel():
            raise RuntimeError("resize_ of a tensor with values is not supported")
        shape = torch.empty(size, dtype=tensor.dtype, device="meta")
        _move_to(tensor, _allocate(shape.size(), shape.stride(), tensor.dtype))
    return tensor


def _move_to(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Its memory and shape become those of ``other``."""
    storage = other.untyped_storage()
    _ATEN.set_.source_Storage_storage_offset.redispatch(
        _CPU, tensor, storage, 0, other.size(), other.stride()
    )


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> Any:
    with _C.DisableTorchFunctionSubclass():
        _copy(source, target, non_blocking)
    return target


def _copy(source: torch.Tensor, target: torch.Tensor, non_blocking: bool) -> None:
    from_here, to_here = _is_here(source), _is_here(target)
    reading = twin(source) if from_here else source.detach()
    writing = twin(target) if to_here else target.detach()
    late = True
    if not (from_here and to_here):
        late = non_blocking and is_pinned(writing if from_here else reading)
    if not late and not from_here:
        reading = reading.clone()  # pageable memory is read by the caller

    def run() -> None:
        writing.copy_(reading)

    run.name = "copy to device" if not from_here else "copy to host"  # type: ignore[attr-defined]
    if from_here and to_here:
        run.name = "copy"  # type: ignore[attr-defined]
    _put(run)
    if not late:
        _finish("copy")


def _scalar(tensor: torch.Tensor) -> Any:
    with _C.DisableTorchFunctionSubclass():
        here = twin(tensor)
        _finish("item")
        return here.item()


def _record_stream(tensor: torch.Tensor, stream: Any) -> None:
    with _C.DisableTorchFunctionSubclass():
        block = MEMORY.blocks[tensor.untyped_storage().data_ptr()]
    if stream.stream_id != block.line.number:
        block.used_on[stream.stream_id] = LINES[stream.stream_id]


def _pin(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
    if not MEMORY.can_pin:
        raise RuntimeError(f"{DEVICE} cannot pin memory")
    made = torch.empty_like(tensor).copy_(tensor)
    storage = made.untyped_storage()
    address = storage.data_ptr()
    MEMORY.pinned[address] = storage.nbytes()
    MEMORY.most_pinned_bytes = max(MEMORY.most_pinned_bytes, sum(MEMORY.pinned.values()))
    weakref.finalize(storage, MEMORY.pinned.pop, address, None).atexit = False
    return made


def is_pinned(tensor: torch.Tensor, device: Any = None) -> bool:
    return tensor.untyped_storage().data_ptr() in MEMORY.pinned


def _metadata_only(op: Any) -> Callable[..., Any]:
    """The CPU's kernel, which looks at sizes, strides and nothing else."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return op.redispatch(_CPU, *args, **kwargs)

    return kernel


def _in_autocast(op: Any) -> Callable[..., Any]:
    """In the type that `torch.autocast` says, as the CPU's and CUDA's kernels for that do it."""
    here = _C.DispatchKeySet(_C.DispatchKey.AutocastPrivateUse1)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        wanted = torch.get_autocast_dtype(DEVICE)
        with _C._ExcludeDispatchKeyGuard(here):
            cast = [v.to(wanted) if _is_float(v) else v for v in args]
            return op(*cast, **kwargs)

    return kernel


def _is_float(value: Any) -> bool:
    return _is_here(value) and value.dtype == torch.float32


def _convolution(*args: Any) -> Any:
    return _fallback(_ATEN.convolution.default, *args)


def _whole(op: Any) -> Callable[..., Any]:
    """The CPU's kernel instead of the parts that a device without one gets."""
    return lambda *args, **kwargs: _fallback(op, *args, **kwargs)


def _convolution_backward(
    gradient: Any,
    x: Any,
    weight: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    mask: Any,
) -> Any:
    bias = [weight.shape[1] * groups if transposed else weight.shape[0]]
    return _fallback(
        _ATEN.convolution_backward.default,
        gradient,
        x,
        weight,
        bias,
        stride,
        padding,
        dilation,
        transposed,
        output_padding,
        groups,
        mask,
    )


class _Module:
    """As ``torch.cuda``: what libraries ask of a device."""

    Stream, Event = Stream, Event
    current_stream = staticmethod(current_stream)
    stream = staticmethod(streams.on_stream)
    synchronize = staticmethod(streams.synchronize)

    @staticmethod
    def default_stream(device: Any = None) -> Stream:
        return Stream(number=0)

    @staticmethod
    def is_initialized() -> bool:
        return True

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        """There are no random operations."""

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


_libraries: list[Any] = []


def _install() -> None:
    """Once in a process."""
    _setup_privateuseone_for_python_backend(DEVICE, backend_module=_Module())
    library: Any = torch.library.Library("_", "IMPL")
    library.fallback(_fallback, "PrivateUse1")
    aten: Any = torch.library.Library("aten", "IMPL")
    kernels = {
        "empty.memory_format": _empty,
        "empty_strided": _empty_strided,
        "resize_": _resize,
        "_copy_from": _copy_from,
        "_local_scalar_dense": _scalar,
        "record_stream": _record_stream,
        "convolution_overrideable": _convolution,
        "convolution_backward_overrideable": _convolution_backward,
        "native_layer_norm": _whole(_ATEN.native_layer_norm.default),
        "native_group_norm": _whole(_ATEN.native_group_norm.default),
        "as_strided": _metadata_only(_ATEN.as_strided.default),
        "view": _metadata_only(_ATEN.view.default),
        "view.dtype": _metadata_only(_ATEN.view.dtype),
        "unfold": _metadata_only(_ATEN.unfold.default),
        "_reshape_alias": _metadata_only(_ATEN._reshape_alias.default),
        "set_.source_Storage_storage_offset": _metadata_only(
            _ATEN.set_.source_Storage_storage_offset
        ),
        "set_.source_Storage": _metadata_only(_ATEN.set_.source_Storage),
        "set_.source_Tensor": _metadata_only(_ATEN.set_.source_Tensor),
    }
    for name, kernel in kernels.items():
        aten.impl(name, kernel, "PrivateUse1")
    aten.impl("_pin_memory", _pin, "CPU")
    aten.impl("is_pinned", is_pinned, "CPU")
    aten.impl("linear", _in_autocast(_ATEN.linear.default), "AutocastPrivateUse1")
    library.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    _libraries.extend([library, aten])
    sparse.install()


_install()


@contextlib.contextmanager
def lagging(seed: int = 0, manner: str = "any", **manners: str) -> Iterator[None]:
    """The device, whose streams lag as the seed says; then all is done, and no thread is left.

    ``manner``: of all streams; ``stream_N``: of the Nth.
    """
    LINES.seed = str(seed)
    LINES.manners = {int(name.removeprefix("stream_")): how for name, how in manners.items()}
    LINES.manners[-1] = manner
    LINES.host_waits.clear()
    MEMORY.most_bytes = MEMORY.held_bytes
    MEMORY.most_pinned_bytes = 0
    before = torch.autograd.is_multithreading_enabled()
    torch.autograd.set_multithreading_enabled(False)
    try:
        yield
    finally:
        torch.autograd.set_multithreading_enabled(before)
        LINES.end()
