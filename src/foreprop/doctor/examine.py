"""Who measures what, and when: one examination, over any `Panel`."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from foreprop.doctor import records
from foreprop.link.traffic import Attempt, Endpoint, Flow, Trip

_Kind = TypeVar("_Kind", records.Facts, records.Reached, records.Pinged, records.Sent)
Pair = tuple[int, int]
"""From one host, to another one."""

_FEW_HOSTS = 6
"""So many are measured one pair at a time; of more, pairs that share no host go together."""
_REACH_S = 5.0
_MARGIN_S = 25.0
"""For a probe that is slow to answer: what it does is bounded by less."""
_SETTLE_SHARE = 0.25
_LEAST_SETTLE_S = 0.1
_START_SKEW_S = 0.3
"""When all send at once they do not begin at the same moment."""


class Panel(Protocol):
    """The probes. ``failures``: why a host has none, or has one no more."""

    failures: dict[int, records.Failure]

    def ask(
        self, commands: Mapping[int, records.Command], *, within_s: float
    ) -> dict[int, records.Answer]:
        """Ask some hosts, and wait; those that do not answer in time go to ``failures``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """What is to be examined. ``port``: of the rendezvous, if it is fixed."""

    names: tuple[str, ...]
    workers: tuple[int, ...]
    rendezvous: str
    look_up: tuple[str, ...]
    serve_rendezvous: bool
    port: int | None = None
    directory: str | None = None
    environments: tuple[Mapping[str, str], ...]
    seconds: float
    wait_s: float


def examine(panel: Panel, asked: Questions, say: Callable[[str], None]) -> records.Examination:
    """All measurements, within a time that ``seconds`` and ``wait_s`` bound."""
    return _Examination(panel, asked, say).run()


class _Examination:
    def __init__(self, panel: Panel, asked: Questions, say: Callable[[str], None]) -> None:
        self._panel = panel
        self._asked = asked
        self._say = say
        self._facts: dict[int, records.Facts] = {}
        self._servers: dict[int, Endpoint] = {}
        self._attempts: list[Attempt] = []

    def run(self) -> records.Examination:
        self._introduce()
        self._reach()
        trips = self._ping()
        alone = self._alone()
        together = self._together()
        return records.Examination(
            rendezvous=self._asked.rendezvous,
            hosts=[
                records.Examined(
                    name=name,
                    workers=self._asked.workers[host],
                    facts=self._facts.get(host),
                    failure=self._panel.failures.get(host),
                )
                for host, name in enumerate(self._asked.names)
            ],
            attempts=self._attempts,
            trips=trips,
            alone=alone,
            together=together,
        )

    def _introduce(self) -> None:
        asked, token = self._asked, secrets.token_hex(16)
        commands = {
            host: records.Introduce(
                host=host,
                token=token,
                names=list(asked.look_up),
                rendezvous=asked.rendezvous,
                serve_rendezvous=asked.serve_rendezvous and host == 0,
                port=asked.port,
                directory=asked.directory,
                environment=dict(asked.environments[host]),
            )
            for host in range(len(asked.names))
        }
        self._facts = self._ask(commands, records.Facts, within_s=asked.wait_s)

    def _ask(
        self, commands: Mapping[int, records.Command], kind: type[_Kind], *, within_s: float
    ) -> dict[int, _Kind]:
        """The answers of those who can still be asked; a defect counts as a failure."""
        failures = self._panel.failures
        able = {host: command for host, command in commands.items() if host not in failures}
        answers = self._panel.ask(able, within_s=within_s) if able else {}
        for host, answer in answers.items():
            if isinstance(answer, records.Defect):
                failures[host] = records.Failure(kind="defect", text=answer.text)
        return {host: answer for host, answer in answers.items() if isinstance(answer, kind)}

    def _reach(self) -> None:
        self._servers = {
            host: Endpoint(host=host, address=facts.address, port=facts.port)
            for host, facts in self._facts.items()
            if facts.address is not None and facts.port is not None
        }
        peers = list(self._servers.values())
        first = self._facts.get(0)
        if first is not None and first.rendezvous_port is not None:
            address, port = self._asked.rendezvous, first.rendezvous_port
            peers.append(Endpoint(host=0, address=address, port=port, purpose="rendezvous"))
        commands = {
            host: records.Reach(peers=[p for p in peers if p.host != host], timeout_s=_REACH_S)
            for host in self._facts
        }
        answers = self._ask(commands, records.Reached, within_s=2 * _REACH_S + _MARGIN_S)
        self._attempts += [one for answer in answers.values() for one in answer.attempts]

    def _connected(self) -> list[Pair]:
        """Whose first can connect to the second, of hosts that still answer."""
        found = self._attempts
        connected = [a for a in found if a.purpose == "server" and a.outcome == "connected"]
        return self._able(sorted((a.source, a.to) for a in connected))

    def _able(self, pairs: Sequence[Pair]) -> list[Pair]:
        """Those of which neither host has failed meanwhile."""
        return [pair for pair in pairs if not self._panel.failures.keys() & set(pair)]

    def _ping(self) -> list[Trip]:
        """One pair at a time: milliseconds each, unless messages take long."""
        seconds, pairs = self._asked.seconds, self._connected()
        one_way = [(a, b) for a, b in pairs if a < b or (b, a) not in pairs]
        trips: list[Trip] = []
        for together in plan_rounds(one_way, len(self._asked.names)):
            pings = {
                source: records.Ping(peers=[self._servers[to]], seconds=seconds)
                for source, to in self._able(together)
            }
            answers = self._ask(pings, records.Pinged, within_s=seconds + _MARGIN_S)
            trips += [trip for answer in answers.values() for trip in answer.trips]
        return trips

    def _alone(self) -> list[Flow]:
        seconds = self._asked.seconds
        settle_s = max(_LEAST_SETTLE_S, _SETTLE_SHARE * seconds)
        rounds = plan_rounds(self._connected(), len(self._asked.names))
        if rounds:
            expected_s = (len(rounds) + 1) * (seconds + settle_s)
            self._say(f"measuring {sum(map(len, rounds))} directions, about {expected_s:.0f} s")
        return [flow for pairs in rounds for flow in self._send(self._able(pairs), settle_s)]

    def _together(self) -> list[Flow]:
        """As in training: everybody sends to everybody."""
        pairs = self._connected()
        if len({host for pair in pairs for host in pair}) < 2:
            return []
        settle_s = _START_SKEW_S + max(_LEAST_SETTLE_S, _SETTLE_SHARE * self._asked.seconds)
        return self._send(pairs, settle_s)

    def _send(self, pairs: Sequence[Pair], settle_s: float) -> list[Flow]:
        seconds = self._asked.seconds
        commands = {
            source: records.Send(
                peers=[self._servers[to] for s, to in pairs if s == source],
                settle_s=settle_s,
                seconds=seconds,
            )
            for source in {source for source, _ in pairs}
        }
        answers = self._ask(commands, records.Sent, within_s=settle_s + seconds + _MARGIN_S)
        return [flow for answer in answers.values() for flow in answer.flows]


def plan_rounds(pairs: Sequence[Pair], hosts: int) -> list[list[Pair]]:
    """Pairs one by one if there are few hosts; else rounds of pairs that share no host.

    Rounds go by the circle method of round-robin tournaments, which needs the fewest.
    """
    if hosts <= _FEW_HOSTS:
        return [[pair] for pair in pairs]
    seats = hosts + hosts % 2
    slots: dict[tuple[int, bool], list[Pair]] = {}
    for source, to in pairs:
        slots.setdefault((_round_of(source, to, seats), source < to), []).append((source, to))
    return [slots[key] for key in sorted(slots)]


def _round_of(one: int, other: int, seats: int) -> int:
    """The round in which two of ``seats`` (an even number of) players meet; the last seat stays."""
    last = seats - 1
    if last in (one, other):
        return (2 * min(one, other)) % last
    return (one + other) % last
