"""The shortest step that any schedule can have on given links: pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from foreprop.core.codecfacts import KnownCodec
from foreprop.plan.profile import Layer

PACKET_BYTES = 1448  # that TCP with timestamps carries in a packet of an MTU of 1500 bytes
HEADERS_BYTES = 14 + 20 + 32  # of each packet: Ethernet, IPv4, and TCP with timestamps
HEADER_FACTOR = (PACKET_BYTES + HEADERS_BYTES) / PACKET_BYTES
"""How many bytes a link shaper counts for each byte that TCP carries."""
BYTES_PER_ELEM = 4


def model_bytes(layers: Sequence[Layer]) -> int:
    return BYTES_PER_ELEM * sum(sum(layer.sizes_elems) for layer in layers)


def encoded_layers(
    layers: Sequence[Layer], codecs: Sequence[KnownCodec], *, ranks: int
) -> list[Layer]:
    """Layers whose float32 elements are as many bytes, both ways, as these with ``codecs`` are."""
    codec_of = iter(codecs)

    def equivalent(size: int) -> int:
        coded = next(codec_of).coded(size, ranks=ranks)
        return (coded.push_bytes + coded.reply_bytes) // (2 * BYTES_PER_ELEM)

    made = []
    for layer in layers:
        made.append(replace(layer, sizes_elems=tuple(map(equivalent, layer.sizes_elems))))
    return made


def wire_s(size_bytes: float, *, nodes: int, rate_bits_per_s: float) -> float:
    """How long synchronising ``size_bytes`` keeps each node's link busy, without headers.

    2 (N - 1) / N of them pass each node's link in either direction, for a parameter server
    beside every worker as well as for a ring.
    """
    return 2 * (nodes - 1) / nodes * size_bytes * 8 / rate_bits_per_s


def compute_s(layers: Sequence[Layer]) -> float:
    return sum(layer.forward_s + layer.backward_s for layer in layers)


def limit_s(layers: Sequence[Layer], *, nodes: int, rate_bits_per_s: float) -> float:
    """The shortest possible step of exact synchronous training on links of this rate.

    It is the largest of the compute and, for every k, the backward pass of layers k.. + the wire
    time of layers 1..k with all headers + the forward pass of layers k..: the arrays of the first k
    layers cannot start before layer k's gradients exist, and must be back before layer k is used.
    (A layer's arrays share its times, so the last array of each layer decides.)
    """
    longest = compute_s(layers)
    rest_s = longest  # compute of layers k..
    first_bytes = 0
    for layer in layers:
        first_bytes += BYTES_PER_ELEM * sum(layer.sizes_elems)
        on_wire = HEADER_FACTOR * first_bytes
        longest = max(
            longest, rest_s + wire_s(on_wire, nodes=nodes, rate_bits_per_s=rate_bits_per_s)
        )
        rest_s -= layer.forward_s + layer.backward_s
    return longest
