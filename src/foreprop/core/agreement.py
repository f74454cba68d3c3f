"""How two processes find out whether they agree: a manifest is decoded, checked and compared.

The checks are what servers rely on: shapes, groups and counts that make sense, and only those
combinations of settings that there are. Both decoders raise `RemoteProtocolError` for other bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from foreprop.core.manifest import (
    ITEMSIZE_BYTES,
    MOST_PROCESSES,
    NO_GROUP,
    SCALE,
    Manifest,
    RingManifest,
)
from foreprop.core.wire import decoded
from foreprop.errors import RemoteProtocolError

T = TypeVar("T", bound=msgspec.Struct)

# made here: threads that use a type for the first time at once find it half-built (a crash)
_DECODER = msgspec.json.Decoder(Manifest)
_RING_DECODER = msgspec.json.Decoder(RingManifest)


def decode_ring_manifest(data: bytes | memoryview) -> RingManifest:
    return decoded(_RING_DECODER, data, "a manifest")


def decode_manifest(data: bytes | memoryview) -> Manifest:
    manifest = decoded(_DECODER, data, "a manifest")
    for info in manifest.parameters:
        if info.dtype not in ITEMSIZE_BYTES or any(extent < 0 for extent in info.shape):
            raise RemoteProtocolError(f"parameter {info.name!r}: {info.dtype} {info.shape}")
        if info.rows and len(info.shape) != 2:
            raise RemoteProtocolError(f"parameter {info.name!r} has no rows: {info.shape}")
        if info.init is not None and not (info.rows and 0 <= info.init.key < 2**64):
            raise RemoteProtocolError(f"parameter {info.name!r} has no rows to make: {info.init}")
        least = 0 if info.rows else NO_GROUP
        if not least <= info.group < len(manifest.optimizer.groups):
            raise RemoteProtocolError(f"parameter {info.name!r} is in no group: {info.group}")
    if manifest.most_workers > MOST_PROCESSES or manifest.knobs.servers > MOST_PROCESSES:
        raise RemoteProtocolError(
            f"not a manifest: world_size {manifest.world_size}, servers {manifest.knobs.servers},"
            f" max_workers {manifest.knobs.max_workers}; at most {MOST_PROCESSES}"
        )
    knobs = manifest.knobs
    workers = (manifest.world_size, manifest.workers_per_push)
    counts = (*workers, knobs.servers, knobs.slice_elems, knobs.big_array_elems)
    if min(counts) < 1 or min(manifest.blob_bytes, default=0) < 0:
        raise RemoteProtocolError(
            f"not a manifest: world_size {manifest.world_size}, blob_bytes {manifest.blob_bytes},"
            f" {knobs}"
        )
    _check_packs(manifest)
    _check_staleness(manifest)
    _check_membership(manifest)
    return manifest


def _check_packs(manifest: Manifest) -> None:
    infos, packs = manifest.parameters, manifest.knobs.packs
    numbers = [number for pack in packs for number in pack]
    known = len(set(numbers)) == len(numbers) and all(0 <= n < len(infos) for n in numbers)
    alike = known and all(
        len({infos[n].dtype for n in pack}) == 1 and not any(infos[n].rows for n in pack)
        for pack in packs
    )
    if not alike:
        raise RemoteProtocolError(f"not a manifest: packs {packs} of {len(infos)} parameters")


def _check_staleness(manifest: Manifest) -> None:
    knobs = manifest.knobs
    staleness, strength = knobs.staleness, knobs.delay_compensation
    clips = manifest.serves and knobs.aggregation.clip_grad_norm is not None
    together = manifest.workers_per_push > 1 or clips
    bounded = staleness == "async" or staleness >= 0
    if not (bounded and 0 <= strength < math.inf) or (staleness and together):
        raise RemoteProtocolError(
            f"not a manifest: staleness {staleness!r}, delay_compensation {strength},"
            f" workers_per_push {manifest.workers_per_push}, {knobs}"
        )


def _check_membership(manifest: Manifest) -> None:
    knobs, backups = manifest.knobs, manifest.knobs.backup_workers
    kinds = (knobs.elastic, backups > 0, knobs.counted_replay)
    if knobs.max_workers and (not knobs.elastic or knobs.max_workers < manifest.world_size):
        raise RemoteProtocolError(
            f"not a manifest: max_workers {knobs.max_workers} of {manifest.world_size}, {knobs}"
        )
    if not any(kinds) and not backups:
        return
    unfit = manifest.workers_per_push > 1 or knobs.staleness or knobs.reply != "broadcast"
    unfit = unfit or (knobs.elastic and (knobs.counted_replay or (backups and not manifest.serves)))
    if unfit or not 0 <= backups < manifest.world_size:
        raise RemoteProtocolError(
            f"not a manifest: elastic {knobs.elastic}, backup_workers {backups} of"
            f" {manifest.world_size}, workers_per_push {manifest.workers_per_push}, {knobs}"
        )


def describe_mismatch(ours: T, theirs: T, *, us: str, them: str) -> str | None:
    """The first five fields that differ, with both sides' values; None if both sides agree."""
    differences = _differences("", msgspec.to_builtins(ours), msgspec.to_builtins(theirs))
    lines = [
        f"{field}: {us} has {mine!r}, {them} has {other!r}" for field, mine, other in differences
    ]
    if not lines:
        return None
    more = f" (and {len(lines) - 5} more)" if len(lines) > 5 else ""
    return "; ".join(lines[:5]) + more


_ABSENT = "nothing"
REQUIRES_GRAD = "requires_grad"
_INITIAL = "as at the start"


def _differences(path: str, mine: Any, other: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(mine, dict) and isinstance(other, dict):
        for key in dict.fromkeys((*mine, *other)):
            label = f"{path}.{key}" if path else str(key)
            yield from _differences(label, mine.get(key, _ABSENT), other.get(key, _ABSENT))
    elif path == "parameters" and len(mine) != len(other):
        yield "number of parameters", len(mine), len(other)
    elif _are_structs(mine) and _are_structs(other) and len(mine) == len(other):
        for i, (a, b) in enumerate(zip(mine, other, strict=True)):
            name = f" ({a['name']})" if path == "parameters" else ""
            yield from _differences(f"{path}[{i}]{name}", a, b)
    elif mine != other and not (mine != mine and other != other):  # NaN agrees with NaN
        yield path, mine, other


def _are_structs(value: Any) -> bool:
    return (
        isinstance(value, (list, tuple))
        and bool(value)
        and all(isinstance(item, dict) for item in value)
    )


def describe_groups(
    step: int,
    ranks: tuple[int, int],
    ours: Sequence[Mapping[str, Any]],
    theirs: Sequence[Mapping[str, Any]],
) -> str:
    """How the optimizer's settings of two ranks differ; ``ours`` are those of the first rank."""
    first, rank = ranks
    for number, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        for name in dict.fromkeys((*a, *b)):
            mine, other = a.get(name, _INITIAL), b.get(name, _INITIAL)
            if mine != other:
                no_groups = name == SCALE or name.startswith(REQUIRES_GRAD)
                whose = "" if no_groups else f" of parameter group {number}"
                return (
                    f"step {step}: {name}{whose} is {mine} on rank {first} and {other} on rank"
                    f" {rank}: every rank must set the same value"
                )
    return f"step {step}: ranks {first} and {rank} have different parameter groups"
