"""Whether the shards of row-wise parameters can be sent."""

from __future__ import annotations

from collections.abc import Sequence

from foreprop.core.manifest import Manifest
from foreprop.core.shards import Shard
from foreprop.core.wire import MAX_PAYLOAD_BYTES
from foreprop.errors import ConfigError
from foreprop.path.tensors import state_limit_bytes

_MOST_ROWS = 2**31 - 1
"""Of a shard: their numbers travel as int32."""


def check_shards(manifest: Manifest, shards: Sequence[Shard]) -> None:
    """Raise `ConfigError` for what is too large for a frame, with what to do about it."""
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
