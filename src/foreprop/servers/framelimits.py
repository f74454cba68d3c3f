"""What is too large for a frame is refused at the start, with what to do about it."""

from __future__ import annotations

from foreprop.core.manifest import ITEMSIZE_BYTES, Manifest
from foreprop.core.wire import MAX_PAYLOAD_BYTES
from foreprop.errors import ConfigError
from foreprop.path.tensors import state_limit_bytes

_MOST_ROWS = 2**31 - 1
"""Of a shard: their numbers travel as int32."""


def check_frames(manifest: Manifest) -> None:
    """Raises `ConfigError`."""
    if max(manifest.blob_bytes) > MAX_PAYLOAD_BYTES:
        raise ConfigError(
            f"a frozen parameter (or all buffers) of {max(manifest.blob_bytes)} bytes is larger"
            f" than a frame of {MAX_PAYLOAD_BYTES}"
        )
    slices = manifest.slices()
    for shard in manifest.shards(len(slices)):
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
    for piece in slices:
        info = manifest.parameters[piece.parameter]
        size_bytes = piece.elems * ITEMSIZE_BYTES[info.dtype]
        if size_bytes > MAX_PAYLOAD_BYTES:
            raise ConfigError(
                f"parameter {info.name} would be sent in a frame of {size_bytes} bytes; a frame"
                f" holds {MAX_PAYLOAD_BYTES}: use granularity='slice'"
            )
