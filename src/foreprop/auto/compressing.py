"""``compression="auto"``: just enough for what a session has measured of itself and its links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from foreprop.config import Config
from foreprop.core.codec import NONE, choices_text, pattern_of
from foreprop.core.codecfacts import AUTO_CODECS, allowed_by
from foreprop.core.manifest import ParameterInfo
from foreprop.model.planner import PlanSetting
from foreprop.simulate.compressed import choose_codecs
from foreprop.simulate.setting import SimulatedSetting
from foreprop.simulate.slicesize import as_simulated, slices_of
from foreprop.workload.wirecodecs import arrays_in_order

_MOST_NODES_EACH = 4
"""Of more, one worker stands for all, as where slices are chosen."""
_CASTS = {"bf16", "fp16"}
_MOST_SLICES, _LARGE_ELEMS = 2048, 1_000_000
"""Of more, larger ones are simulated: the others' steps wait for what is chosen."""


def choose_compression(
    setting: PlanSetting,
    config: Config,
    *,
    allowed: Sequence[str] = AUTO_CODECS,
    lossless: Mapping[str, float] = MappingProxyType({}),
) -> tuple[dict[str, str], str]:
    """Codecs by parameter, as the setting ``compression`` takes them, and a sentence about them.

    Pure and deterministic.

    Parameters that are not in it go as they are: an empty dict says that exact is fast enough, or
    that nothing is faster; or that nobody knows, of a model with tables, or of several workers on a
    node that all push. Where relays make one push of theirs, a node counts as one. ``allowed``:
    codecs in the order of loss, the first one exact; of ``lossless:0.7`` 70 % of the bytes were
    measured to be left, and of parameters in ``lossless`` the share there. Raises `ConfigError` for
    others.
    """
    if setting.tables:
        return {}, "compression: none, for a model with tables"
    if setting.workers_per_node > 1 and config.local_aggregation == "off":
        return {}, "compression: none, for several workers on a node without local_aggregation"
    slice_elems = config.cut_elems(setting.nodes)
    simulated = SimulatedSetting(
        profile=setting.profile,
        systems=("p3",),
        nodes=setting.nodes,
        scale=1,
        compute_s=setting.compute_s,
        rate_bits_per_s=setting.rate_bits_per_s,
        latency_s=setting.latency_s,
        slice_elems=slice_elems,
        symmetric=setting.nodes > _MOST_NODES_EACH,
    )
    while slices_of(simulated.layers, slice_elems) > _MOST_SLICES and slice_elems < _LARGE_ELEMS:
        slice_elems *= 2
    changes = as_simulated(config, slice_elems)
    chosen = choose_codecs(simulated, allowed=allowed, lossless=lossless, **changes)
    pairs = zip(arrays_in_order(setting.profile), chosen.enough.codecs, strict=True)
    codecs = {array.name: codec.session_name for array, codec in pairs if codec.name != NONE}
    return codecs, f"compression: {chosen.enough.sentence}"


def codecs_as_setting(
    setting: PlanSetting,
    config: Config,
    slice_elems: int | None,
    infos: Sequence[ParameterInfo],
    lossless: Mapping[str, float],
) -> tuple[str | None, str]:
    """The setting ``compression`` for ``auto``, and a sentence about it. Only for float32.

    With ``wire_dtype`` that casts what would go in 16 bits or as it is.
    """
    allowed, cast = allowed_by(str(config.compression)) or AUTO_CODECS, ""
    if isinstance(config.slice_elems, str):
        config = config.replace(slice_elems=slice_elems)
    if config.wire_dtype is not None:
        config, cast = config.replace(wire_dtype=None), f"; the rest in {config.wire_dtype}"
    codecs, sentence = choose_compression(setting, config, allowed=allowed, lossless=lossless)
    wide = {info.name for info in infos if info.dtype == "float32"}
    chosen = [(pattern_of(name), codec) for name, codec in codecs.items() if name in wide]
    if cast:
        chosen = [(name, codec) for name, codec in chosen if codec not in _CASTS]
        sentence += cast
    measured = {info.name: info.elems for info in infos if info.name in lossless}
    if measured:
        left = sum(lossless[name] * elems for name, elems in measured.items())
        sentence += f"; lossless leaves {left / sum(measured.values()):.0%} of the bytes measured"
    return choices_text(chosen) if chosen else None, sentence
