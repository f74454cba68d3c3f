"""What codecs would make of a step, by the refined model; and the codecs of ``compression="auto"``.

`foreprop plan` offers codecs where links are slow; a session chooses them by what it has measured
of itself and its links. Both choose just enough (`core.justenough`), with the sizes and costs of
`core.codecfacts`; nobody looks at gradients. All choices are deterministic.

``lossless`` has by array's name the share of its bytes that the lossless codec was measured to
keep. ``allowed`` are codecs in the order of loss, of which the first is exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import msgspec

from foreprop.config import Config
from foreprop.core.codec import AUTO, NONE, choices_text, pattern_of, takes
from foreprop.core.codecfacts import (
    AUTO_CODECS,
    LOSSLESS,
    LOSSLESS_SHARE,
    KnownCodec,
    allowed_by,
    codec_named,
)
from foreprop.core.justenough import MOST_CORES, Carriers, Enough, Need, checked_enough, shares_text
from foreprop.core.manifest import ParameterInfo
from foreprop.plan import limit, parameterserver
from foreprop.plan.deployment import Deployment
from foreprop.plan.planner import P3, Candidate, PlanSetting, deployment_for, deployment_of
from foreprop.plan.profile import Layer, Profile, ProfiledArray
from foreprop.plan.refined import slices_of, step_s

_LARGE_ELEMS = 1_000_000  # more than any bias or norm has; and the most of a slice that is modelled


def is_flat(array: ProfiledArray) -> bool:
    """Whether an array is a bias or a norm's, and not all of a network's weights in one vector."""
    return len(array.shape) < 2 and math.prod(array.shape) < _LARGE_ELEMS


def arrays_in_order(profile: Profile) -> list[ProfiledArray]:
    return [array for arrays in profile.arrays_by_layer() for array in arrays]


def needs_of(
    layers: Sequence[Layer],
    arrays: Sequence[ProfiledArray],
    lossless: Mapping[str, float] = MappingProxyType({}),
) -> list[Need]:
    """When each of the layers' arrays is ready and needed; biases and norms stay exact."""
    backward_s = sum(layer.backward_s for layer in layers)
    forward_s, ready_s = 0.0, backward_s
    known = iter([(is_flat(array), lossless.get(array.name)) for array in arrays])
    needs = []
    for layer in layers:
        needed_s = backward_s + forward_s
        needs += [Need(size, ready_s, needed_s, *next(known)) for size in layer.sizes_elems]
        forward_s += layer.forward_s
        ready_s -= layer.backward_s
    return needs


_TOLERANCE = 0.015
"""How much longer than the compute a modelled step may be before anything is less exact. The model
is up to 0.02 too fast where links are nearly full."""
_MOST_SLICES = 2048
"""The most slices that are modelled, of a larger size if need be: steps wait for the choice."""
_DGC = "dgc"
_NOT_EXACT: Mapping[str, str] = {
    "bf16": "bf16 keeps 8 bits of each mantissa",
    "int8": "int8 rounds to 1/127 of the largest element of 128, and sends the error a step later",
    "int4": "int4 rounds to 1/7 of the largest element of 128, and sends the error a step later",
    "int2": "int2 rounds to -1, 0 or 1 of a scale of 128, and sends the error a step later",
    _DGC: "DGC sends the largest 0.1% of a gradient, and the rest as it adds up over the steps",
}
_TRAININGS = "short trainings of three models (docs/compression.md)"
_DGC_NEEDS = "They warmed up (dgc:0.001:STEPS). Only for torch.optim.SGD."


class Compressed(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate with codecs, and its step.

    Sentences say what ``shares`` of the bytes each codec has, what is ``not_exact`` (empty if all
    is), and what that did to the ``accuracy`` of trained models, or which bytes are counted.
    """

    compression: str
    candidate: Candidate
    step_s: float
    limit_s: float
    """What no schedule of these bytes can beat."""
    shares: str
    not_exact: str
    accuracy: str
    kept_bytes: int
    """What each sender of pushes keeps from step to step: error feedback."""

    @property
    def code(self) -> str:
        more = f', compression="{self.compression}")'
        return self.candidate.code.removesuffix(")") + more


def compressed_steps(setting: PlanSetting, candidate: Candidate) -> Iterator[Compressed]:
    """``lossless``, ``auto`` and ``dgc`` with p3, on as many servers as ``candidate`` has.

    A model with tables has ``lossless`` only. There is nothing for half precision, where sessions
    refuse codecs, nor for several workers on a node that all push: their codecs share its cores.
    """
    is_half = setting.bytes_per_elem != limit.BYTES_PER_ELEM
    each_pushes = setting.workers_per_node > 1 and not setting.local_aggregation
    if each_pushes or is_half:
        return
    if not candidate.servers and 0 not in setting.servers:
        return
    p3 = Candidate("ps", P3, candidate.servers) if candidate.servers else Candidate("p2p", P3)
    arrays = arrays_in_order(setting.profile)
    exact = codec_named(LOSSLESS)
    if setting.tables:
        dense = [exact for array in arrays if not setting.is_table(array)]
        yield _compressed(setting, p3, LOSSLESS, dense)
        return
    yield _compressed(setting, p3, LOSSLESS, [exact] * len(arrays))
    chosen = choose_codecs(setting, deployment_for(setting, p3))
    yield _compressed(setting, p3, AUTO, chosen.codecs)
    sparse = [codec_named(_DGC if takes(_DGC, array.shape) else NONE) for array in arrays]
    yield _compressed(setting, p3, _DGC, sparse)


def choose_codecs(
    setting: PlanSetting,
    deployment: Deployment,
    *,
    allowed: Sequence[str] = AUTO_CODECS,
    lossless: Mapping[str, float] = MappingProxyType({}),
) -> Enough:
    """Just enough (`core.justenough`), checked by the refined model."""
    layers, hosts = deployment.layers, deployment.hosts
    server_rate = deployment.link_bytes_per_s(server=True)
    slice_elems = deployment.partition().slice_elems
    while slices_of(layers, slice_elems) > _MOST_SLICES and slice_elems < _LARGE_ELEMS:
        slice_elems *= 2
    deployment = replace(deployment, slice_elems=slice_elems)
    carriers = Carriers(
        rate_bytes_per_s=deployment.link_bytes_per_s(),
        nodes=setting.nodes,
        dedicated_servers=deployment.dedicated_servers,
        server_rate_bytes_per_s=server_rate if deployment.dedicated_servers else None,
        slice_elems=slice_elems,
        round_trip_s=2 * deployment.message_s + hosts.update_s,
        cores=min(deployment.servers, MOST_CORES),
    )
    return checked_enough(
        needs_of(layers, arrays_in_order(setting.profile), lossless),
        carriers,
        [codec_named(name)._replace(raw_answers=setting.raw_answers) for name in allowed],
        compute_s=setting.compute_s,
        step_s=lambda codecs: step_s(replace(deployment, codecs=codecs)),
        tolerance=_TOLERANCE,
    )


def _compressed(
    setting: PlanSetting, candidate: Candidate, compression: str, codecs: Sequence[KnownCodec]
) -> Compressed:
    deployment = replace(deployment_for(setting, candidate), codecs=codecs)
    if deployment.tables:
        deployment = replace(deployment, row_codec=codec_named(LOSSLESS))
    sizes = [size for layer in deployment.layers for size in layer.sizes_elems]
    lossy = dict.fromkeys(codec.name for codec in codecs if not codec.facts.exact)
    accuracy = f"Worse than exact in {_TRAININGS}."
    if not lossy:
        left = f"{LOSSLESS_SHARE:.0%} of the bytes left"
        accuracy = f"Counted with {left}; most gradients leave less."
    elif lossy.keys() <= set(AUTO_CODECS):
        accuracy = f"As good as exact in {_TRAININGS}."
    elif _DGC in lossy:
        accuracy += f" {_DGC_NEEDS}"
    return Compressed(
        compression=compression,
        candidate=candidate,
        step_s=step_s(deployment),
        limit_s=_limit_s(deployment),
        shares=shares_text(codecs, sizes),
        not_exact="; ".join(_NOT_EXACT[name] for name in lossy),
        accuracy=accuracy,
        kept_bytes=sum(
            codec.facts.state_arrays * size * limit.BYTES_PER_ELEM
            for codec, size in zip(codecs, sizes, strict=True)
        ),
    )


def _limit_s(deployment: Deployment) -> float:
    # with dedicated servers, or rows, there is no formula but how long the busiest link is busy
    if deployment.dedicated_servers or deployment.tables:
        return max(limit.compute_s(deployment.layers), *parameterserver.link_s(deployment))
    return limit.limit_s(
        limit.encoded_layers(deployment.layers, deployment.codecs, ranks=deployment.nodes),
        nodes=deployment.nodes,
        rate_bits_per_s=deployment.rate_bits_per_s,
    )


_CASTS = {"bf16", "fp16"}


def choose_compression(
    setting: PlanSetting,
    config: Config,
    *,
    allowed: Sequence[str] = AUTO_CODECS,
    lossless: Mapping[str, float] = MappingProxyType({}),
) -> tuple[dict[str, str], str]:
    """Codecs by parameter, as the setting ``compression`` takes them, and a sentence about them.

    Other parameters go as they are. An empty dict says that exact is fast enough, or that nothing
    is faster; or that nobody knows, with tables or with several workers on a node that all push. A
    node whose relays push once counts as one. Raises `ConfigError` for unknown codecs.
    """
    if setting.tables:
        return {}, "compression: none, for a model with tables"
    if setting.workers_per_node > 1 and not config.may_aggregate:
        return {}, "compression: none, for several workers on a node that all push"
    deployment = deployment_of(setting, Candidate("p2p", P3), config)
    chosen = choose_codecs(setting, deployment, allowed=allowed, lossless=lossless)
    pairs = zip(arrays_in_order(setting.profile), chosen.codecs, strict=True)
    codecs = {array.name: codec.session_name for array, codec in pairs if codec.name != NONE}
    return codecs, f"compression: {chosen.sentence}"


def codecs_as_setting(
    setting: PlanSetting,
    config: Config,
    infos: Sequence[ParameterInfo],
    lossless: Mapping[str, float],
) -> tuple[str | None, str]:
    """The setting ``compression`` for ``auto``, and a sentence about it; only for float32."""
    allowed, cast = allowed_by(str(config.compression)) or AUTO_CODECS, ""
    if config.wire_dtype is not None:  # it casts what would go in 16 bits or as it is
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
