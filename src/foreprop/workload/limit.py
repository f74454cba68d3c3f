"""What no schedule can beat on given links: pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from foreprop.workload.profile import Layer

if TYPE_CHECKING:
    from foreprop.core.codecfacts import KnownCodec

PACKET_BYTES = 1448
"""What TCP with timestamps carries in a packet of an MTU of 1500 bytes."""
HEADERS_BYTES = 14 + 20 + 32
"""Ethernet, IPv4, and TCP with timestamps, for each packet."""
HEADER_FACTOR = (PACKET_BYTES + HEADERS_BYTES) / PACKET_BYTES
"""Bytes that a link shaper counts for each byte that TCP carries."""
BYTES_PER_ELEM = 4
_AT_ONCE_BYTES = 50_000
"""What the lab's links take from TCP as one packet; see `workload.network.Network`."""


def carried_bytes(frames: int, size_bytes: float) -> float:
    """What a node's interface counts as sent of so many frames, with as many coming back.

    Frames leave one by one (TCP_NODELAY), each as one packet if TCP can hand it down as one, which
    is cut later, by the card. Each that comes is acknowledged by a packet without data; of those
    that fill no packet every second one (RFC 5681, section 4.2).
    """
    each_bytes = size_bytes / max(1, frames)
    packets = 1.0 if each_bytes <= _AT_ONCE_BYTES else each_bytes / PACKET_BYTES
    acknowledged = 1.0 if each_bytes > PACKET_BYTES else 0.5
    return size_bytes + HEADERS_BYTES * frames * (packets + acknowledged)


def model_bytes(layers: Sequence[Layer]) -> int:
    return BYTES_PER_ELEM * sum(sum(layer.sizes_elems) for layer in layers)


def encoded_layers(
    layers: Sequence[Layer], codecs: Sequence[KnownCodec], *, ranks: int
) -> list[Layer]:
    """With so many elements of float32 as have the bytes of both ways; ``codecs`` by array."""
    codec_of = iter(codecs)

    def equivalent(size: int) -> int:
        coded = next(codec_of).coded(size, ranks=ranks)
        return (coded.push_bytes + coded.reply_bytes) // (2 * BYTES_PER_ELEM)

    made = []
    for layer in layers:
        made.append(replace(layer, sizes_elems=tuple(map(equivalent, layer.sizes_elems))))
    return made


def wire_s(size_bytes: float, *, nodes: int, rate_bits_per_s: float) -> float:
    """Time for which synchronising ``size_bytes`` occupies each node's link, headers left out.

    2 (N - 1) / N of them pass each node's link in either direction, for a parameter server
    beside every worker as well as for a ring.
    """
    return 2 * (nodes - 1) / nodes * size_bytes * 8 / rate_bits_per_s


def rate_for_balance(layers: Sequence[Layer], *, nodes: int, balance: float) -> float:
    """The link rate in bit/s at which ``wire_s / compute_s`` is ``balance``."""
    seconds = balance * compute_s(layers)
    return wire_s(model_bytes(layers), nodes=nodes, rate_bits_per_s=1.0) / seconds


def compute_s(layers: Sequence[Layer]) -> float:
    return sum(layer.forward_s + layer.backward_s for layer in layers)


def limit_s(layers: Sequence[Layer], *, nodes: int, rate_bits_per_s: float) -> float:
    """The shortest possible step of exact synchronous training on links of this rate.

    The larger of the compute and, over every k, backward pass of layers k.. + wire time of layers
    1..k with all headers + forward pass of layers k..: the first k layers' arrays cannot start
    before layer k's gradients exist, and must be back before layer k is used. (A layer's arrays
    share its times, so the last array of each layer decides.)
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
