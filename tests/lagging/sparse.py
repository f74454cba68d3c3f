"""Sparse tensors on the lagging device: what embeddings' gradients and tables need.

Their indices and values are dense tensors there, and so lag. What is computed of the whole tensor
waits for the device and is made on the host, as backends do that have no kernel for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree

from tests.lagging.streams import DEVICE

_C: Any = torch._C
_ATEN: Any = torch.ops.aten
_CPU = _C.DispatchKeySet(_C.DispatchKey.SparseCPU)
_KEY = "SparsePrivateUse1"

METADATA = (
    "_sparse_coo_tensor_with_dims_and_tensors",
    "_sparse_coo_tensor_with_dims",
    "sparse_dim",
    "dense_dim",
    "_nnz",
    "indices",
    "_indices",
    "values",
    "_values",
    "is_coalesced",
    "_coalesced_",
)
"""The CPU's kernels look at sizes, and at the two parts as wholes."""


def _metadata_only(op: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        return op.redispatch(_CPU, *args, **kwargs)

    return kernel


def _is_sparse(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout == torch.sparse_coo


def _to_host(value: Any) -> Any:
    if _is_sparse(value) and value.device.type == DEVICE:
        return torch.sparse_coo_tensor(
            value._indices().cpu(),
            value._values().cpu(),
            value.shape,
            is_coalesced=value.is_coalesced(),
            check_invariants=False,
        )
    if isinstance(value, torch.Tensor) and value.device.type == DEVICE:
        return value.cpu()
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _to_device(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if _is_sparse(value):
        return torch.sparse_coo_tensor(
            value._indices().to(DEVICE),
            value._values().to(DEVICE),
            value.shape,
            is_coalesced=value.is_coalesced(),
            check_invariants=False,
        )
    return value.to(DEVICE)


def _fallback(op: Any, *args: Any, **kwargs: Any) -> Any:
    """By the CPU, waiting for it. Raises `NotImplementedError` for what writes in place."""
    if op._schema.is_mutable:
        raise NotImplementedError(f"{op} of a sparse tensor on {DEVICE}")
    with _C.DisableTorchFunctionSubclass(), _C._AutoDispatchBelowAutograd():
        positional, named = pytree.tree_map(_to_host, (args, kwargs))
        return pytree.tree_map(_to_device, op(*positional, **named))


def _to_copy(value: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Any:
    """`Tensor.to`, and `cpu`."""
    with _C.DisableTorchFunctionSubclass(), _C._AutoDispatchBelowAutograd():
        host = _to_host(value).to(dtype or value.dtype)
        stays = device is None or torch.device(device).type == DEVICE
        return _to_device(host) if stays else host


torch.sparse.check_sparse_tensor_invariants.disable()  # torch's Adagrad warns until one chooses
_libraries: list[Any] = []


def install() -> None:
    """Once in a process, after the device."""
    anything: Any = torch.library.Library("_", "IMPL")
    anything.fallback(_fallback, _KEY)
    aten: Any = torch.library.Library("aten", "IMPL")
    for name in METADATA:
        aten.impl(name, _metadata_only(getattr(_ATEN, name).default), _KEY)
    aten.impl("_to_copy", _to_copy, _KEY)
    _libraries.extend([anything, aten])
