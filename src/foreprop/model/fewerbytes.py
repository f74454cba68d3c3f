"""What codecs would make of a step, by the refined model: what a plan offers where links are slow.

Sizes and costs are those of `core.codecfacts`; no gradient is looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import msgspec

from foreprop.core.codec import AUTO, NONE, takes
from foreprop.core.codecfacts import (
    AUTO_CODECS,
    LOSSLESS,
    LOSSLESS_SHARE,
    KnownCodec,
    codec_named,
)
from foreprop.core.justenough import MOST_CORES, Carriers, checked_enough, shares_text
from foreprop.model import served
from foreprop.model.deployment import Deployment
from foreprop.model.planner import P3, Candidate, PlanSetting, deployment_for
from foreprop.model.refined import step_s
from foreprop.workload import limit
from foreprop.workload.profile import ProfiledArray
from foreprop.workload.wirecodecs import arrays_in_order, needs_of

_DGC = "dgc"
_NOT_EXACT: Mapping[str, str] = {
    "bf16": "bf16 keeps 8 bits of each mantissa",
    "int8": "int8 rounds to 1/127 of the largest element of 128, and sends the error a step later",
    "int4": "int4 rounds to 1/7 of the largest element of 128, and sends the error a step later",
    "int2": "int2 rounds to -1, 0 or 1 of a scale of 128, and sends the error a step later",
    "terngrad": "TernGrad draws -1, 0 or 1 of a scale, right on average (int2 answers)",
    _DGC: "DGC sends the largest 0.1% of a gradient, and the rest as it adds up over the steps",
}
_TRAININGS = "short trainings of three models (docs/compression.md)"
_DGC_NEEDS = "They warmed up (dgc:0.001:STEPS). Only for torch.optim.SGD."


class Compressed(msgspec.Struct, frozen=True, kw_only=True):
    """p3 with codecs, seconds."""

    compression: str
    """As the setting."""
    candidate: Candidate
    step_s: float
    limit_s: float
    """What no schedule of these bytes can beat."""
    shares: str
    """Of the bytes by codec, in words."""
    not_exact: str
    """What is lost, in words; empty if nothing is."""
    accuracy: str
    """What that did to trained models, in sentences; of exact codecs, what bytes are counted."""
    kept_bytes: int
    """What stays with each push's sender from step to step: error feedback."""

    @property
    def code(self) -> str:
        more = f', compression="{self.compression}")'
        return self.candidate.code.removesuffix(")") + more


def compressed_steps(setting: PlanSetting, candidate: Candidate) -> Iterator[Compressed]:
    """``lossless``, ``auto`` and ``dgc`` with p3, on as many servers as ``candidate`` has.

    Of a model with tables the exact one only. Nothing for half precision, where sessions refuse
    codecs, nor for several workers on a node that all push, whose codecs share its cores.
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
    yield _compressed(setting, p3, AUTO, choose_codecs(setting, p3))
    yield _compressed(setting, p3, _DGC, _dgc(arrays))


def _dgc(arrays: Sequence[ProfiledArray]) -> list[KnownCodec]:
    return [codec_named(_DGC if takes(_DGC, array.shape) else NONE) for array in arrays]


def choose_codecs(setting: PlanSetting, candidate: Candidate) -> Sequence[KnownCodec]:
    """Just enough (`core.justenough`), checked by the refined model."""
    deployment = deployment_for(setting, candidate)
    layers, hosts = deployment.layers, deployment.hosts
    server_rate = deployment.link_bytes_per_s(server=True)
    carriers = Carriers(
        rate_bytes_per_s=deployment.link_bytes_per_s(),
        nodes=setting.nodes,
        dedicated_servers=candidate.servers,
        server_rate_bytes_per_s=server_rate if candidate.servers else None,
        slice_elems=deployment.partition().slice_elems,
        round_trip_s=2 * deployment.message_s + hosts.update_s,
        cores=min(deployment.servers, MOST_CORES),
    )
    enough = checked_enough(
        needs_of(layers, arrays_in_order(setting.profile)),
        carriers,
        [codec_named(name) for name in AUTO_CODECS],
        compute_s=setting.compute_s,
        step_s=lambda codecs: step_s(replace(deployment, codecs=codecs)),
    )
    return enough.codecs


def _compressed(
    setting: PlanSetting, candidate: Candidate, compression: str, codecs: Sequence[KnownCodec]
) -> Compressed:
    deployment = replace(deployment_for(setting, candidate), codecs=codecs)
    if deployment.tables:
        deployment = replace(deployment, row_codec=codec_named(LOSSLESS))
    sizes = [size for layer in deployment.layers for size in layer.sizes_elems]
    lossy = dict.fromkeys(codec.name for codec in codecs if not codec.facts.exact)
    return Compressed(
        compression=compression,
        candidate=candidate,
        step_s=step_s(deployment),
        limit_s=_limit_s(deployment),
        shares=shares_text(codecs, sizes),
        not_exact="; ".join(_NOT_EXACT[name] for name in lossy),
        accuracy=_accuracy(lossy),
        kept_bytes=sum(
            codec.facts.state_arrays * size * limit.BYTES_PER_ELEM
            for codec, size in zip(codecs, sizes, strict=True)
        ),
    )


def _accuracy(lossy: Iterable[str]) -> str:
    lossy = set(lossy)
    if not lossy:
        return f"Counted with {LOSSLESS_SHARE:.0%} of the bytes left; most gradients leave less."
    if lossy.issubset(AUTO_CODECS):
        return f"As good as exact in {_TRAININGS}."
    worse = f"Worse than exact in {_TRAININGS}."
    return f"{worse} {_DGC_NEEDS}" if _DGC in lossy else worse


def _limit_s(deployment: Deployment) -> float:
    """Of links to dedicated servers, and of rows, only how long the busiest link is busy."""
    if deployment.dedicated_servers or deployment.tables:
        return max(limit.compute_s(deployment.layers), *served.link_s(deployment))
    return limit.limit_s(
        limit.encoded_layers(deployment.layers, deployment.codecs, ranks=deployment.nodes),
        nodes=deployment.nodes,
        rate_bits_per_s=deployment.rate_bits_per_s,
    )
