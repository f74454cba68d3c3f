"""Where a relay is put together: the services towards its workers and towards its server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from foreprop.core.frames import CONTROL_PRIORITY
from foreprop.core.manifest import Manifest
from foreprop.core.peers import SERVER, Peers
from foreprop.core.relay_machine import RelayMachine
from foreprop.core.wire import Header, Kind
from foreprop.link.connection import Connection, FrameOwner, Service, bounded, owners_of
from foreprop.link.failure import Failure
from foreprop.numerics.finite import finite_check
from foreprop.observe.trace import Stage, names_of
from foreprop.path.calls import Goodbyes, Waits
from foreprop.path.executor import Executor, Host
from foreprop.path.slices import Slices
from foreprop.path.updates import AnnouncedNumbers
from foreprop.relays.nodesums import Sums
from foreprop.relays.passing import (
    PassedBlobs,
    PassedNorms,
    PassedRows,
    PassedStates,
    PassedStatuses,
)
from foreprop.relays.relaystore import RelayStore
from foreprop.relays.rows import RelayRows
from foreprop.relays.upward import Upward

_FROM_SERVERS = frozenset(
    {
        Kind.WELCOME,
        Kind.REPLY,
        Kind.NOTIFY,
        Kind.ROWS_REPLY,
        Kind.NORM_PART,
        Kind.NORM,
        Kind.BLOB_REPLY,
        Kind.STATE_REPLY,
        Kind.TABLE_REPLY,
        Kind.STATUS_REPLY,
    }
)
_FROM_WORKERS = frozenset(Kind) - _FROM_SERVERS | {Kind.NORM}


class Welcomes:
    """Owns the server's welcome, which is for the workers."""

    kinds = frozenset({Kind.WELCOME})

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def room(self, peer: Connection, header: Header) -> memoryview:
        return bounded(header, 0)

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        self._executor.answer_all(Kind.WELCOME, header)


class RelayWork:
    """One relay's part in a session: it sums, passes on, and hands out the answers.

    ``close_link`` ends the connection to the server, saying why if there is a reason.
    """

    def __init__(
        self,
        manifest: Manifest,
        host: Host,
        peers: Peers,
        connections: Mapping[int, Connection],
        link: Connection,
        close_link: Callable[[Failure | None], None],
    ) -> None:
        self.names = names_of(manifest)
        self.close = close_link
        self._manifest = manifest
        self._link = link
        slices = manifest.slices()
        self._machine = RelayMachine(
            slices,
            server=host.index,
            peers=peers,
            order=manifest.knobs.order,
            reply=manifest.knobs.reply,
            names=[info.name for info in manifest.parameters],
        )
        self._executor = Executor(
            self._machine,
            host,
            peers,
            {SERVER: link, **connections},
            f"foreprop-relay{host.index}-send",
        )
        self.stop = self._executor.stop
        self._settings = AnnouncedNumbers(manifest, self._executor, pass_on=self._pass_on)
        self._upward = Upward(self._executor, self._settings.at)
        shards = manifest.shards(len(slices))
        self._rows = RelayRows(manifest, shards, self._upward, host.lock, peers, host.index)
        store = RelayStore(manifest, slices, host.index)
        check = finite_check(manifest.knobs.aggregation)
        self._slices = Slices(self._machine, self._executor, store, self.names, check=check)
        about = (self._settings.at, self._slices, self.names, link)
        self._sums = Sums(self._machine, self._executor, store, *about)
        self._waits = Waits([self._rows, self._slices])
        owners = owners_of(self._services())
        self.owners: dict[int, FrameOwner] = {
            kind: owners[kind] for kind in _FROM_WORKERS & owners.keys()
        }
        self.owners_above: dict[int, FrameOwner] = {kind: owners[kind] for kind in _FROM_SERVERS}

    def _services(self) -> Iterator[Service]:
        executor, upward, manifest = self._executor, self._upward, self._manifest
        zero: Any = {"has_rank_zero": executor.peers.first_rank(0) == 0}
        yield self._slices
        yield self._sums
        yield self._settings
        yield PassedRows(self._rows)
        yield PassedStates(manifest, executor, upward, self._rows)
        yield PassedBlobs(manifest, executor, upward, **zero)
        yield PassedNorms(self._machine, executor, upward, parts=len(self.names), **zero)
        yield PassedStatuses(
            executor,
            upward,
            self._waits,
            self._link,
            self._has_pushed,
            needs_norm=manifest.knobs.aggregation.needs_norm,
        )
        yield Welcomes(executor)
        goodbyes = Goodbyes(executor)
        goodbyes.others.append(self._rows.rank_left)
        yield goodbyes

    def _pass_on(self, header: Header, payload: memoryview) -> None:
        self._upward.pass_on(header, payload)

    def _has_pushed(self, number: int, step: int) -> bool:
        return self._machine.has_pushed(number, step) or self._rows.has_pushed(number, step)

    def start(self) -> None:
        """Ask the server; when it welcomes all relays, this one welcomes its workers."""
        self._upward.send_on(Kind.MANIFEST, 0, CONTROL_PRIORITY, 0, self._manifest.encode())

    @property
    def has_left(self) -> bool:
        return self._sums.has_left

    def incomplete(self) -> Iterator[tuple[int, int, str]]:
        return self._waits.incomplete()

    def describe_awaited(self) -> str:
        """What has been passed on and not answered, or else what the workers have not pushed."""
        with self._executor.lock:
            for slice_, step in self._machine.awaited():
                return f"stage {Stage.REPLY_RECEIVED.value}, step {step}: {self.names[slice_]}"
            for _, step, text in self.incomplete():
                return f"stage {Stage.PUSH_RECEIVED.value}, step {step}: {text}"
        return "nothing"
