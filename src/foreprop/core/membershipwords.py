"""What servers say of who has left and who has come, put together to changes alike on all ranks.

Theory of operation. Each server says of a rank, in turn, that it has left and that it has joined.
A change holds when all servers have said it that are asked. One that only some say is no change: a
newcomer that was lost while it came. A server's words come in order; those of several servers mix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from foreprop.core.dealing import CERTAIN_STEPS, MemberChange


class MembershipWord(NamedTuple):
    """A rank has left, ``step`` is the last that the server has a push of, or joins at that."""

    joins: bool
    step: int


class MembershipWords:
    """One rank's view. Not thread-safe.

    ``holders``: the servers with slices; one without waits for nobody, and says it when it likes.
    ``workers_per_node``: servers are beside so many workers, and go with them; None: they are
    dedicated. ``absent``: ranks that are not here at the start, and may come.
    """

    def __init__(
        self,
        holders: frozenset[int],
        *,
        workers_per_node: int | None,
        absent: frozenset[int] = frozenset(),
    ) -> None:
        self.said: dict[int, dict[int, list[MembershipWord]]] = {}
        """By rank and server: all of them."""
        self.waits = False
        """A newcomer has not been told what was said before it came."""
        self._holders = holders
        self._workers_per_node = workers_per_node
        self._lost: frozenset[int] = frozenset()
        self._absent = absent
        self._forget()

    def _forget(self) -> None:
        self.changes: list[MemberChange] = []
        self.gone: set[int] = set(self._absent)
        """Who is not here."""
        self._ever_gone: set[int] = set()
        """Their servers stay away, also when another worker has come."""
        self._used: dict[tuple[int, int], int] = {}
        """By rank and server: so many of its words."""
        self._since: dict[int, int] = {}
        """The first steps of those that have joined."""

    def hear(self, rank: int, server: int, word: MembershipWord) -> list[MemberChange]:
        """Returns the changes that hold from now on."""
        self.said.setdefault(rank, {}).setdefault(server, []).append(word)
        return [] if self.waits else self._advance()

    def lose(self, server: int) -> list[MemberChange]:
        """A dedicated one is gone, and says nothing more. Returns what holds without it."""
        self._lost |= {server}
        return [] if self.waits else self._advance()

    def begin_with(self, said: Mapping[int, Mapping[int, Sequence[MembershipWord]]]) -> None:
        """A newcomer: what a member has heard, of which some has come here, too."""
        here, self.said = self.said, {}
        for words in (said, here):
            for rank, by_server in words.items():
                for server, its in by_server.items():
                    known = self.said.setdefault(rank, {}).setdefault(server, [])
                    known += [word for word in its if word not in known]
        self.waits = False
        self._forget()
        self._advance()

    def _advance(self) -> list[MemberChange]:
        """One change may let another one hold, for fewer servers are asked."""
        before = len(self.changes)
        while (change := next(self._holding(), None)) is not None:
            self.changes.append(change)
            if change.joins:
                self.gone.discard(change.rank)
                self._since[change.rank] = change.step
            else:
                self.gone.add(change.rank)
                self._ever_gone.add(change.rank)
            for server in self._heads(change.rank):
                self._use(change.rank, server)
        return self.changes[before:]

    def _holding(self) -> Iterator[MemberChange]:
        for rank in self.said:
            change = self._maybe_joins(rank) if rank in self.gone else self._maybe_leaves(rank)
            if change is not None:
                yield change

    def _maybe_leaves(self, rank: int) -> MemberChange | None:
        heads = self._heads(rank)
        if not heads or not self._asked(rank) <= heads.keys():
            return None
        return MemberChange(rank, self._left_within(rank))

    def _maybe_joins(self, rank: int) -> MemberChange | None:
        while heads := self._heads(rank):
            last = max((word.step for word in heads.values() if word.joins), default=0)
            stale = [s for s, word in heads.items() if not word.joins or word.step < last]
            if not stale:
                complete = self._asked(rank) <= heads.keys()
                return MemberChange(rank, last, joins=True) if complete else None
            for server in stale:  # of one who has left before, or has never quite come
                self._use(rank, server)
        return None

    def _heads(self, rank: int) -> dict[int, MembershipWord]:
        """By server: the first word of this rank that has not been used."""
        used = self._used
        return {
            server: words[used.get((rank, server), 0)]
            for server, words in self.said[rank].items()
            if used.get((rank, server), 0) < len(words)
        }

    def _use(self, rank: int, server: int) -> None:
        self._used[rank, server] = self._used.get((rank, server), 0) + 1

    def _asked(self, rank: int) -> frozenset[int]:
        if self._workers_per_node is None:
            return self._holders - self._lost
        gone = {each // self._workers_per_node for each in (*self._ever_gone, rank)}
        return self._holders - gone

    def _left_within(self, rank: int) -> int:
        """As far as is known. A newcomer that has made no step has left within its first one."""
        heads, asked = self._heads(rank), self._asked(rank)
        steps = [word.step for server, word in heads.items() if server in asked or not asked]
        return max(*steps, self._since.get(rank, 0), 0)

    # What is not complete.
    def partly(self, done: int) -> list[int]:
        """The ranks of which only some have said what matters when so many steps are done."""
        return [] if self.waits else [rank for rank in self.said if self._is_partly(rank, done)]

    def _is_partly(self, rank: int, done: int) -> bool:
        heads = self._heads(rank)
        if not self._asked(rank) & heads.keys():
            return False
        if rank not in self.gone:
            return self._left_within(rank) + CERTAIN_STEPS <= done
        # one who has left again will be told of by nobody else
        again = any(
            self._used.get((rank, server), 0) + 1 < len(self.said[rank][server]) for server in heads
        )
        return not again and max(word.step for word in heads.values()) <= done

    def joining(self) -> set[tuple[int, int]]:
        """All who have ever joined, as far as any server has said, and at which step."""
        return {
            (rank, word.step)
            for rank, by_server in self.said.items()
            for words in by_server.values()
            for word in words
            if word.joins
        }
