"""The state of an optimizer, or an average, as it travels: without pickle."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import msgspec
import torch

from foreprop.core.manifest import Manifest
from foreprop.core.slicing import Shard
from foreprop.core.wire import MAX_PAYLOAD_BYTES
from foreprop.engine.memory import bytes_of, dtype_name
from foreprop.errors import ConfigError, RemoteProtocolError

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
AVERAGE = "ema"
"""The name of the one entry of a slice's moving average."""
GRADIENT = "gradient"
"""The name of the one entry of a slice's aggregated gradient."""
MASTER = "master"
"""The name of the one entry of a slice's values in full."""
IMAGE = "image"
"""The name of what workers have, where a lossy codec makes it other than the values."""
_STATE_ENTRIES_LIMIT = 16
_STATE_HEAD_LIMIT_BYTES = 65_536
_LENGTH = struct.Struct("!I")
_MOST_ROWS = 2**31 - 1
"""The most rows of a shard: their numbers travel as int32."""


def is_array(value: Any) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.dim() > 0


class _StateEntry(msgspec.Struct, frozen=True):
    """One entry of an optimizer's state: a tensor of ``elems`` elements, or a plain number."""

    key: str
    dtype: str = ""
    elems: int = 0
    number: int | float | bool | None = None
    scalar: bool = False


_ENTRIES = msgspec.json.Decoder(tuple[_StateEntry, ...])
_STATE_DTYPES = {**DTYPES, "int64": torch.int64, "int32": torch.int32, "bool": torch.bool}


def state_limit_bytes(elems: int) -> int:
    """More than any element-wise optimizer's state of a slice can need."""
    return _STATE_ENTRIES_LIMIT * 8 * max(elems, 1) + _STATE_HEAD_LIMIT_BYTES


def check_shards(manifest: Manifest, shards: Sequence[Shard]) -> None:
    """Raise `ConfigError` for shards of tables that are too large for a frame."""
    for shard in shards:
        if shard.rows > _MOST_ROWS:
            raise ConfigError(
                f"parameter {manifest.parameters[shard.parameter].name} has {shard.rows} rows on"
                f" each server; at most {_MOST_ROWS}: use more servers (servers_per_node,"
                " dedicated_servers)"
            )
        if shard.remote:
            continue
        limit_bytes = state_limit_bytes(shard.rows * shard.row_elems)
        if limit_bytes > MAX_PAYLOAD_BYTES:
            raise ConfigError(
                f"parameter {manifest.parameters[shard.parameter].name} has {shard.rows} rows on"
                f" each server, whose optimizer state may take {limit_bytes} bytes; a frame holds"
                f" {MAX_PAYLOAD_BYTES}: use more servers (servers_per_node, dedicated_servers)"
            )


def encode_state(state: Mapping[str, Any]) -> bytes:
    """Encode flat tensors and plain numbers by name, without pickle."""
    entries, payloads = [], []
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            flat = value.detach().reshape(-1).contiguous().cpu()
            dtype = dtype_name(flat.dtype)
            entries.append(_StateEntry(key, dtype, flat.numel(), None, value.dim() == 0))
            payloads.append(bytes(bytes_of(flat)))
        else:
            entries.append(_StateEntry(key, number=value))
    head = msgspec.json.encode(entries)
    return b"".join([_LENGTH.pack(len(head)), head, *payloads])


def decode_state(data: memoryview, *, elems: int) -> dict[str, Any]:
    """Decode what `encode_state` has made; tensors must have ``elems`` elements or be scalars."""
    try:
        (head_bytes,) = _LENGTH.unpack_from(data)
        entries = _ENTRIES.decode(data[_LENGTH.size : _LENGTH.size + head_bytes])
    except (struct.error, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"not an optimizer state: {error}") from error
    if len(entries) > _STATE_ENTRIES_LIMIT:
        raise RemoteProtocolError(
            f"an optimizer state of {len(entries)} entries; at most {_STATE_ENTRIES_LIMIT}"
        )
    rest = data[_LENGTH.size + head_bytes :]
    state: dict[str, Any] = {}
    for entry in entries:
        if not entry.dtype:
            state[entry.key] = entry.number
            continue
        wanted = 1 if entry.scalar else elems
        dtype = _STATE_DTYPES.get(entry.dtype)
        if dtype is None or entry.elems != wanted or len(rest) < wanted * dtype.itemsize:
            raise RemoteProtocolError(
                f"optimizer state {entry.key!r} has {entry.elems} elements of {entry.dtype},"
                f" not {wanted}"
            )
        tensor = torch.empty(wanted, dtype=dtype)
        bytes_of(tensor)[:] = rest[: wanted * dtype.itemsize]
        rest = rest[wanted * dtype.itemsize :]
        state[entry.key] = tensor.reshape(()) if entry.scalar else tensor
    if rest:
        raise RemoteProtocolError(f"{len(rest)} bytes too many after an optimizer state")
    return state
