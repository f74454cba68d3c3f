"""How a program's run with foreprop differs from its run with DDP."""

from __future__ import annotations

from dataclasses import dataclass

from tests.programs.launch import Outcome

EQUAL, CLOSE, DIFFERENT, REFUSED, NOT_RUN = "bits equal", "close", "DIFFERENT", "error", "not run"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """``difference`` and ``yardstick`` are relative: what foreprop changes, and what DDP with other
    buckets, whose sums are added up in another order, changes. ``None``: not known."""

    program: str
    world: int
    lines: int
    verdict: str
    note: str = ""
    difference: float | None = None
    yardstick: float | None = None
    loss_difference: float | None = None
    step_s: float | None = None
    ddp_step_s: float | None = None


def relative_difference(found: Outcome, wanted: Outcome) -> float:
    """The largest difference of two elements of a parameter, by its largest element, of all."""
    if found.parameters.keys() != wanted.parameters.keys():
        return float("inf")
    largest = 0.0
    for name, tensor in wanted.parameters.items():
        size = tensor.abs().max().item() if tensor.numel() else 0.0
        distance = (found.parameters[name] - tensor).abs().max().item() if tensor.numel() else 0.0
        if not distance <= largest * size:  # also if it is not a number
            largest = distance / size if size else float("inf")
    return largest


def loss_difference(found: Outcome, wanted: Outcome) -> float:
    """The largest relative difference of two losses, of all ranks and steps."""
    pairs = [
        (one, other)
        for ours, theirs in zip(found.losses, wanted.losses, strict=True)
        for one, other in zip(ours, theirs, strict=False)
    ]
    if [len(ours) for ours in found.losses] != [len(theirs) for theirs in wanted.losses]:
        return float("inf")
    return max((abs(a - b) / max(abs(b), 1e-12) for a, b in pairs), default=0.0)


_OF_YARDSTICK = 10.0
"""Two sums in other orders differ by more than two others; by as much, it is chance."""


def verdict(
    found: Outcome,
    wanted: Outcome,
    tolerance: float,
    *,
    exact: bool,
    yardstick: float | None = None,
) -> tuple[str, str]:
    """In one word, and what is to be said about it.

    ``yardstick``: what DDP differs by from itself, where that is more than ``tolerance``.
    """
    if wanted.error:
        return NOT_RUN, f"DDP itself: {wanted.error}"
    if found.error:
        return REFUSED, found.error
    if len(set(found.digests)) > 1 and len(set(wanted.digests)) == 1:
        return DIFFERENT, "the ranks' parameters are not the same"
    difference = relative_difference(found, wanted)
    if difference == 0 and loss_difference(found, wanted) == 0:
        return EQUAL, ""
    if exact:
        return DIFFERENT, "should have DDP's bits"
    if difference <= max(tolerance, _OF_YARDSTICK * (yardstick or 0.0)):
        return CLOSE, ""
    return DIFFERENT, f"more than {tolerance:g}"
