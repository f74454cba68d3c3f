"""A trial: one system's training through faults, and what was measured of it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import msgspec

from foreprop.errors import ConfigError
from foreprop_lab.setting.links import Network

P3, TORCHFT = "p3", "torchft"
SYSTEMS = (P3, TORCHFT)


KILL, REJOIN = "kill", "rejoin"


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """A fault that begins ``at_s`` after the start and lasts ``for_s``, or for ever if it is 0."""

    name: str
    at_s: float
    for_s: float
    node: int


def usual_faults(nodes: int, pause_s: float) -> list[Fault]:
    """Faults ``pause_s`` after each other; node 0 is spared, which has the rendezvous."""
    last = nodes - 1
    return [
        Fault(name="slow link", at_s=pause_s, for_s=pause_s, node=last),
        Fault(name="stop", at_s=3 * pause_s, for_s=pause_s / 3, node=last - 1),
        Fault(name="cut", at_s=4 * pause_s, for_s=pause_s / 3, node=1),
        Fault(name=KILL, at_s=5 * pause_s, for_s=0.0, node=last),
        Fault(name=REJOIN, at_s=6 * pause_s, for_s=0.0, node=last),
    ]


class Steps(msgspec.Struct, frozen=True, kw_only=True):
    """When a worker ended its steps, seconds after the start."""

    rank: int
    ends_s: list[float]


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One system's run through the faults."""

    system: str
    version: str
    workers: list[Steps]
    faults: list[Fault]
    length_s: float

    def pace(self, since_s: float, until_s: float) -> float:
        """Steps per second of all workers together."""
        ends = [end for each in self.workers for end in each.ends_s]
        return sum(since_s <= end < until_s for end in ends) / (until_s - since_s)

    def down_s(self, fault: Fault, until_s: float) -> float:
        """The longest time after the fault's beginning in which no other worker ended a step."""
        others = [each for each in self.workers if each.rank != fault.node]
        ends = sorted(end for each in others for end in each.ends_s)
        before = [end for end in ends if end < fault.at_s][-1:]
        inside = [end for end in ends if fault.at_s <= end < until_s]
        moments = [*before, *inside, until_s]
        return max(b - a for a, b in pairwise(moments))

    def back_s(self, fault: Fault) -> float | None:
        """The time from a worker's restart to the end of its first step; None if it made none.

        Only steps that counted are a worker's steps.
        """
        own = (end for each in self.workers if each.rank == fault.node for end in each.ends_s)
        return min((end - fault.at_s for end in own if end >= fault.at_s), default=None)

    def windows(self) -> list[tuple[Fault, float]]:
        """Each fault, with the time at which the next one begins."""
        begins = [fault.at_s for fault in self.faults[1:]]
        return list(zip(self.faults, [*begins, self.length_s], strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultSetting:
    """The setting; a worker that answers nothing for ``silent_s`` is taken for dead."""

    model: str = "resnet50"
    scale: int = 16
    nodes: int = 4
    rate_bits_per_s: float = 200e6
    compute_s: float = 0.5
    pause_s: float = 12.0
    silent_s: float = 8.0
    systems: tuple[str, ...] = (P3,)
    torchft_python: Path | None = None

    def __post_init__(self) -> None:
        if self.nodes < 3:
            raise ConfigError(f"--nodes is {self.nodes}; a fault needs 3 at least")
        if self.silent_s <= self.pause_s / 3:
            raise ConfigError(
                f"--silent is {self.silent_s:g} s; stops and cuts take {self.pause_s / 3:g} s, a"
                " third of --pause, and are to be outlived: more than that"
            )
        for name in self.systems or ("",):
            if name not in SYSTEMS:
                raise ConfigError(f"--systems has {name!r}; it must be one of {list(SYSTEMS)}")
        if TORCHFT in self.systems and self.torchft_python is None:
            raise ConfigError(
                "--systems has torchft, which needs --torchft-python: the Python of an environment"
                " with torchft==0.2.0"
            )

    @property
    def network(self) -> Network:
        return Network(
            nodes=self.nodes,
            rate_bits_per_s=self.rate_bits_per_s,
            buffer_scale=self.scale,
        )
