"""Packs: small parameters that follow each other and travel as one slice.

A frame costs as much for ten elements as for thousands, so small parameters share one. A pack has
the number of its first parameter; the others have no slices of their own. Its elements are those
of its parameters, one after the other, and behind them one *mark* for each parameter: 1 where a
rank had a gradient, 0 where it had none. Servers sum and average marks like everything else, so
they need not know of packs: who gets an average sees by its mark whether any rank had a gradient.
Elements without a gradient are sent as -0.0, which added to a number changes no bit of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Sequence

Packs = tuple[tuple[int, ...], ...]

_SHARE_OF_SLICE = 4
"""A parameter of more than this part of a slice goes alone."""


def plan_packs(
    sizes_elems: Sequence[int],
    kinds: Sequence[Hashable | None],
    slice_elems: int,
    *,
    servers: int = 1,
) -> Packs:
    """Neighbours of the same kind, at most a slice together. None: a parameter that goes alone.

    Nor are packs larger than one of the ``servers``' share of the model, or others had nothing.
    """
    most_elems = slice_elems // _SHARE_OF_SLICE
    whole = sum(size + 1 for size in sizes_elems)
    slice_elems = min(slice_elems, -(-whole // servers))
    packs: list[list[int]] = []
    pack: list[int] = []
    elems = 0
    for number, (size, kind) in enumerate(zip(sizes_elems, kinds, strict=True)):
        if kind is None or not 0 < size <= most_elems:
            pack = []
            continue
        if not pack or kind != kinds[pack[0]] or elems + size + 1 > slice_elems:
            pack, elems = [], 0
            packs.append(pack)
        pack.append(number)
        elems += size + 1
    return tuple(tuple(each) for each in packs if len(each) > 1)


def packed_elems(sizes_elems: Sequence[int], packs: Packs) -> list[int]:
    """By parameter, what is sent under its number, marks too: of a pack all is the first's."""
    sizes = list(sizes_elems)
    for pack in packs:
        whole = sum(sizes[number] + 1 for number in pack)
        for number in pack:
            sizes[number] = 0
        sizes[pack[0]] = whole
    return sizes


def places_in(sizes_elems: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Where the elements of a pack's parameters begin and end in it."""
    yield from itertools.pairwise(itertools.accumulate(sizes_elems, initial=0))
