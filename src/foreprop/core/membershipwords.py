"""One rank's view of the members, put together from servers' words: the same on all ranks.

Theory of operation. Each server says of a rank, in turn, that it has left and that it has joined.
A change *holds* when all servers that are asked have said it. One that only some say never holds: a
newcomer was lost while it came. A server's words come in order; those of several servers mix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from foreprop.core.dealing import CERTAIN_STEPS, MemberChange


class MembershipWord(NamedTuple):
    """A rank joins at ``step``, or has left: then it is the last step the server has a push of."""

    joins: bool
    step: int


class MembershipWords:
    """The changes of the members that hold, and the words that do not make one yet.

    Only ``holders`` are asked, the servers with slices: others wait for nobody, so their words may
    come at any time. There is a server beside so many ``workers_per_node``, and it goes with them;
    None: servers are dedicated. The ``absent`` ranks are not here at the start, and may come. Not
    thread-safe.
    """

    def __init__(
        self,
        holders: frozenset[int],
        *,
        workers_per_node: int | None,
        absent: frozenset[int] = frozenset(),
    ) -> None:
        self.said: dict[int, dict[int, list[MembershipWord]]] = {}  # by rank and server
        self.waits = False  # a newcomer waits for the words that came before it (`begin_with`)
        self._holders = holders
        self._workers_per_node = workers_per_node
        self._lost: frozenset[int] = frozenset()
        self._absent = absent
        self._forget()

    def _forget(self) -> None:
        self.changes: list[MemberChange] = []
        self.gone: set[int] = set(self._absent)  # the ranks that are not here
        self._ever_gone: set[int] = set()
        """Ranks whose servers stay away, also when other workers come in their places."""
        self._used: dict[tuple[int, int], int] = {}  # how many words, by rank and server
        self._since: dict[int, int] = {}  # the first step of each rank that has joined

    def hear(self, rank: int, server: int, word: MembershipWord) -> list[MemberChange]:
        """Note a word; returns the changes that hold from now on."""
        self.said.setdefault(rank, {}).setdefault(server, []).append(word)
        return [] if self.waits else self._advance()

    def lose(self, server: int) -> list[MemberChange]:
        """Note that a dedicated server is lost; returns the changes that hold without its words."""
        self._lost |= {server}
        return [] if self.waits else self._advance()

    def begin_with(self, said: Mapping[int, Mapping[int, Sequence[MembershipWord]]]) -> None:
        """Take, as a newcomer, all words that a member has; some may have come here, too."""
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
        before = len(self.changes)
        # one by one: after a change fewer servers may be asked, so that another one holds
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
            if rank in self.gone:
                if (change := self._maybe_joins(rank)) is not None:
                    yield change
            elif (heads := self._heads(rank)) and self._asked(rank) <= heads.keys():
                yield MemberChange(rank, self._left_within(rank))

    def _maybe_joins(self, rank: int) -> MemberChange | None:
        while heads := self._heads(rank):
            last = max((word.step for word in heads.values() if word.joins), default=0)
            stale = [s for s, word in heads.items() if not word.joins or word.step < last]
            if not stale:
                complete = self._asked(rank) <= heads.keys()
                return MemberChange(rank, last, joins=True) if complete else None
            for server in stale:  # about a time before, or about a newcomer that was lost
                self._use(rank, server)
        return None

    def _heads(self, rank: int) -> dict[int, MembershipWord]:
        """The first unused word of each server about this rank."""
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
        """The step within which a rank has left, as far as is known; its first if it made none."""
        heads, asked = self._heads(rank), self._asked(rank)
        steps = [word.step for server, word in heads.items() if server in asked or not asked]
        return max(*steps, self._since.get(rank, 0), 0)

    # Changes that do not hold yet.
    def partly(self, done: int) -> list[int]:
        """The ranks of which only some servers have said what matters after so many steps."""
        return [] if self.waits else [rank for rank in self.said if self._is_partly(rank, done)]

    def _is_partly(self, rank: int, done: int) -> bool:
        heads = self._heads(rank)
        if not self._asked(rank) & heads.keys():
            return False
        if rank not in self.gone:
            return self._left_within(rank) + CERTAIN_STEPS <= done
        # if it has left again, no other server will say that it joins
        again = any(
            self._used.get((rank, server), 0) + 1 < len(self.said[rank][server]) for server in heads
        )
        return not again and max(word.step for word in heads.values()) <= done

    def joining(self) -> set[tuple[int, int]]:
        """The rank and step of everybody who has ever joined, as far as any server has said."""
        return {
            (rank, word.step)
            for rank, by_server in self.said.items()
            for words in by_server.values()
            for word in words
            if word.joins
        }
