"""The messages by which members, servers and newcomers learn who is here, and where: as JSON.

Each ``decode_`` raises `RemoteProtocolError` for what is no such message. The field names are on
the wire.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from foreprop.core.dealing import PassProgress
from foreprop.core.manifest import MOST_PROCESSES
from foreprop.core.membershipwords import MembershipWord
from foreprop.core.newcomers import AnswerJoin
from foreprop.core.takeover import Claim, MovePlan, MoveState, Settled
from foreprop.core.wire import decoded
from foreprop.errors import RemoteProtocolError

LIMIT_BYTES = 1 << 23
CLAIMS_LIMIT_BYTES = 1 << 26
"""The most that claims of all slices take, or the answers to them."""
_Name = Annotated[str, msgspec.Meta(max_length=120)]
_Node = Annotated[int, msgspec.Meta(ge=-1, lt=2**16)]
_Number = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
_Key = Annotated[str, msgspec.Meta(pattern="^[0-9]{1,9}$")]
"""The number of a rank or server, as text: JSON has no other keys."""


class ServerPlace(msgspec.Struct, frozen=True, array_like=True):
    """Where one server is, and how it is greeted."""

    host: _Name
    port: Annotated[int, msgspec.Meta(gt=0, lt=2**16)]
    session: _Name
    """The id by which it is greeted."""
    node: _Node = -1
    """The node whose server process it is in; -1: it has its own, as dedicated servers do."""
    is_lost: bool = False
    """Whether others have its slices (`core.takeover`)."""

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class ServerDirectory(msgspec.Struct, frozen=True):
    """Where a session's servers are: members send it to all servers, and these to newcomers.

    ``places`` are by server; ``free`` are the ranks that a newcomer may have, as the server knows.

    ``compression`` is the setting as ``"auto"`` has chosen it, and ``chooses`` says that it has
    not. For that a session may begin anew: ``begun_as`` is the id that it began with, and
    ``steps_before`` are the steps that it had made before the present one.
    """

    session: _Name
    places: Annotated[tuple[ServerPlace, ...], msgspec.Meta(max_length=MOST_PROCESSES)]
    free: tuple[_Node, ...] = ()
    workers_per_node: Annotated[int, msgspec.Meta(gt=0, lt=2**16)] = 1
    compression: Annotated[str, msgspec.Meta(max_length=LIMIT_BYTES)] = ""
    chooses: bool = False
    begun_as: _Name = ""
    steps_before: Annotated[int, msgspec.Meta(ge=0, lt=2**32)] = 0

    def encode(self) -> bytes:
        return msgspec.json.encode(self)


class Arrival(msgspec.Struct, frozen=True, array_like=True):
    """One server's notice that a rank has joined, and counts from ``step`` on.

    ``members`` are all that are here then. A newcomer also gets the priorities with which the
    server's slices were pushed last.
    """

    rank: int
    step: int
    members: tuple[int, ...]
    priorities: tuple[tuple[int, int], ...] = ()


class Departure(msgspec.Struct, frozen=True, array_like=True):
    """One server's notice that a rank has left within ``step``.

    In that step ``counted`` of the server's ``slices`` count the rank.
    """

    rank: int
    step: int
    counted: int
    slices: int
    reason: str


class PassPosition(msgspec.Struct, frozen=True, array_like=True):
    """The position of one loader; loaders are numbered as `foreprop.shard` was called.

    ``epoch`` is that of the pass under way, of which ``progress`` tells, or else of the next one.
    """

    loader: _Number
    epoch: _Number
    progress: PassProgress | None


class Positions(msgspec.Struct, frozen=True, array_like=True):
    """What a newcomer has to know to go on with the others' passes.

    All members send it when they have ended the step before the newcomer's first one, each to all
    servers; a server passes the first one on. So any one of them may be lost meanwhile.
    """

    loaders: tuple[PassPosition, ...]
    said: dict[_Key, dict[_Key, list[MembershipWord]]]
    """What servers have said of all ranks so far, by rank and server."""
    moves: MoveState | None = None
    """The moves of slices so far, if they may move."""

    def words(self) -> dict[int, dict[int, list[MembershipWord]]]:
        return {
            int(rank): {int(server): words for server, words in by_server.items()}
            for rank, by_server in self.said.items()
        }


_DIRECTORY = msgspec.json.Decoder(ServerDirectory)
_ARRIVAL = msgspec.json.Decoder(Arrival)
_DEPARTURE = msgspec.json.Decoder(Departure)
_JOIN = msgspec.json.Decoder(AnswerJoin)
_POSITIONS = msgspec.json.Decoder(Positions)
_CLAIMS = msgspec.json.Decoder(list[Claim])
_SETTLED = msgspec.json.Decoder(list[Settled])
_PLAN = msgspec.json.Decoder(MovePlan)


def decode_directory(payload: bytes | memoryview) -> ServerDirectory:
    return decoded(_DIRECTORY, payload, "where servers are")


def decode_arrival(payload: memoryview) -> Arrival:
    return decoded(_ARRIVAL, payload, "word of who has joined")


def decode_departure(payload: memoryview) -> Departure:
    return decoded(_DEPARTURE, payload, "word of who has left")


def decode_answer(payload: memoryview) -> AnswerJoin:
    return decoded(_JOIN, payload, "an answer to who wants to join")


def decode_claims(payload: memoryview) -> list[Claim]:
    return decoded(_CLAIMS, payload, "claims")


def decode_settled(payload: memoryview) -> list[Settled]:
    return decoded(_SETTLED, payload, "what was settled")


def decode_plan(payload: memoryview, slices: int) -> MovePlan:
    plan: MovePlan = decoded(_PLAN, payload, "a plan of moves")
    if plan.moves and len(plan.moves) != slices:
        raise RemoteProtocolError(f"a plan of {len(plan.moves)} moves, of {slices} slices")
    return plan


def decode_positions(payload: memoryview, workers: int) -> Positions:
    positions = decoded(_POSITIONS, payload, "where loaders are")
    ranks = set(positions.words())
    for loader in positions.loaders:
        if loader.progress is not None:
            _check_progress(loader.progress)
            ranks |= {change.rank for change in loader.progress.applied}
            for deal in loader.progress.deals:
                ranks |= {*deal.members, *deal.joined, *(rank for rank, _ in deal.owed)}
    if not all(0 <= rank < workers for rank in ranks):
        raise RemoteProtocolError(f"not where loaders are: rank {max(ranks)} of {workers}")
    return positions


def _check_progress(progress: PassProgress) -> None:
    batches = [deal.batch for deal in progress.deals]
    if (
        not 0 <= progress.given <= progress.drawn
        or batches[:1] != [0]
        or batches != sorted(batches)
        or not all(deal.members for deal in progress.deals)
    ):
        raise RemoteProtocolError(f"not where a loader is: {progress}"[:200])
