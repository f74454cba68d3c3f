"""Codecs in a simulation: what each slice becomes, what is just enough, and the limit that follows.

``auto`` is `core.justenough`'s choice for p3, checked by simulation. Its arithmetic has no queues,
so if a step comes out too long, it is asked again with less time to spare.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from foreprop.config import Config
from foreprop.core.codec import choices_of
from foreprop.core.codecfacts import AUTO_CODECS, Coded, KnownCodec, allowed_by, codec_named
from foreprop.core.justenough import MOST_CORES, Carriers, Enough, checked_enough
from foreprop.core.slicing import Slice
from foreprop.errors import ConfigError
from foreprop.plan import limit
from foreprop.plan.compressing import arrays_in_order, needs_of
from foreprop.plan.deployment import ACKNOWLEDGED
from foreprop_lab.setting.codecs import codecs_by_array, patterns_text
from foreprop_lab.setting.hosts import Hosts
from foreprop_lab.simulate.presets import is_relayed
from foreprop_lab.simulate.run import simulate_system
from foreprop_lab.simulate.setting import SimulatedSetting

_P3 = "p3"
_STEPS, _UNCOUNTED_STEPS = 3, 1


@dataclass(frozen=True, slots=True)
class CodecChoice:
    """The choice of ``auto``; the step of ``enough`` is p3's simulated one."""

    enough: Enough
    compression: str
    """The choice as a value of `SimulatedSetting.compression`."""


def coded_slices(config: Config, setting: SimulatedSetting, slices: Sequence[Slice]) -> list[Coded]:
    """What codecs make of the slices, in order; raises `ConfigError` for what no session can do."""
    if config.wire_dtype is not None:
        raise ConfigError(
            f"compression is {setting.compression!r}, but wire_dtype is {config.wire_dtype!r}:"
            " unset FOREPROP_WIRE_DTYPE, and ask for compression='bf16' if that is meant"
        )
    codecs, pushers = array_codecs(setting), setting.workers
    if is_relayed(config, setting):
        pushers = setting.nodes  # each of a sum
    return [codecs[each.parameter].coded(each.elems, ranks=pushers) for each in slices]


def array_codecs(setting: SimulatedSetting) -> list[KnownCodec]:
    """The codec of each array, in forward order; ``auto`` is chosen anew."""
    chosen = with_chosen_codecs(setting, Hosts())
    return codecs_by_array(setting.profile, choices_of(chosen.compression or ""))


def with_chosen_codecs(setting: SimulatedSetting, hosts: Hosts) -> SimulatedSetting:
    """The setting with the codecs that ``auto`` chooses in its place; another one as it is."""
    allowed = allowed_by(setting.compression or "")
    if allowed is None:
        return setting
    chosen = choose_codecs(setting, hosts=hosts, allowed=allowed)
    return replace(setting, compression=chosen.compression)


def coded_limit_s(setting: SimulatedSetting) -> float:
    """The limit of any schedule of so many bytes, processors left out."""
    # of relays a node's union is one; without them there may be more bytes
    layers = limit.encoded_layers(setting.layers, array_codecs(setting), ranks=setting.nodes)
    return setting.limit_of(layers)


def choose_codecs(
    setting: SimulatedSetting,
    *,
    hosts: Hosts | None = None,
    allowed: Sequence[str] = AUTO_CODECS,
    **changes: Any,
) -> CodecChoice:
    """The codecs that are just enough for p3 in this setting; deterministic.

    For ``allowed`` see `just_enough`; ``changes`` are fields of `Config`.
    """
    hosts = hosts or Hosts()
    arrays = arrays_in_order(setting.profile)
    names = [array.name for array in arrays]

    def step_s(codecs: Sequence[KnownCodec]) -> float:
        asked = replace(setting, systems=(_P3,), compression=patterns_text(names, codecs))
        steps = simulate_system(_P3, asked, hosts, steps=_STEPS, **changes)
        return statistics.median(s for node in steps.step_s for s in node[_UNCOUNTED_STEPS:])

    enough = checked_enough(
        needs_of(setting.layers, arrays),
        carriers_of(setting, hosts),
        [codec_named(name) for name in allowed],
        compute_s=limit.compute_s(setting.layers),
        step_s=step_s,
    )
    return CodecChoice(enough, patterns_text(names, enough.codecs))


def carriers_of(setting: SimulatedSetting, hosts: Hosts) -> Carriers:
    return Carriers(
        rate_bytes_per_s=setting.rate / 8 / (limit.HEADER_FACTOR + ACKNOWLEDGED),
        nodes=setting.nodes,
        slice_elems=setting.slice_elems_of(_P3),
        round_trip_s=2 * (setting.latency_s + hosts.send_s + hosts.receive_s) + hosts.update_s,
        cores=min(setting.nodes, MOST_CORES),
    )
