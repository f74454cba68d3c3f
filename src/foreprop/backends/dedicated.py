"""Servers on machines of their own: what ``foreprop server`` runs.

Rank 0 of a session with ``dedicated_servers=k`` publishes it in the store that torchrun's workers
meet in. Every `Supervisor` that watches the store claims some of the k indices, starts a server
process for each, and leaves its address there. It ends when the store has gone and its servers
have ended, which they do with their sessions.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from typing import Annotated, Any, NamedTuple

import msgspec
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from foreprop.backends.processes import ProcessServer, ServerTask
from foreprop.config import LOGGER, Config
from foreprop.engine.rendezvous import Board, Look, decode_entry
from foreprop.engine.secret import Seal, load_key
from foreprop.engine.stream import keep_alive, listen, local_address
from foreprop.engine.trace import check_trace_folder
from foreprop.engine.world import World, open_entry
from foreprop.errors import ConfigError, ForepropError, HandshakeError, TransportError
from foreprop.version import __version__

_SESSIONS = "foreprop/dedicated/sessions"
"""The raw store's key that counts them."""
_POLL_S = 0.2
_STORE_TIMEOUT_S = 30.0
_REPORT_S = 10.0

Report = Callable[[str], None]


def dedicated_key(session: int) -> str:
    """The raw store's key that publishes a session to `foreprop server`."""
    return f"foreprop/dedicated/{session}"


_REFUSED = "refused "
"""How an entry begins that says why a dedicated server will not come."""


_Count = Annotated[int, msgspec.Meta(ge=1, le=65_535)]
_NEEDED = frozenset(
    "join_timeout_s step_timeout_s stall_report_s silence_report_s silence_timeout_s unsent_bytes"
    " push_window_bytes link_rate_bits_per_s trace_steps encryption".split()
)
"""The settings that a server takes from an announcement: numbers, and nothing that names a file."""


class PublishedSession(msgspec.Struct, frozen=True, kw_only=True):
    """What `foreprop server` must know of a session, from rank 0."""

    session_id: Annotated[str, msgspec.Meta(max_length=64, pattern=r"\A[0-9]+-[0-9A-Za-z-]+\Z")]
    """The session's id, which is in files' names."""
    world_size: _Count
    servers: _Count
    nodes: _Count
    workers_per_node: _Count
    foreprop: str
    config: dict[str, str | bool | int | float | None]


def publish_session(
    world: World, config: Config, token: str, servers: int, nodes: int, workers_per_node: int
) -> str:
    """Rank 0: have `foreprop server` serve a session; returns its id, which ends in ``token``.

    Raises `ConfigError` where there is nothing in which servers could find the workers.
    """
    if world.size == 1 and world.in_process:
        raise ConfigError(
            f"dedicated_servers is {config.dedicated_servers}, and servers find the workers"
            " through torchrun's rendezvous: start the script with torchrun"
        )
    entries = world.raw_entries
    number = entries.add(_SESSIONS, 1)
    session_id = f"{number}-{token}"
    published = PublishedSession(
        session_id=session_id,
        foreprop=__version__,
        world_size=max(world.size, config.max_workers or 0),
        servers=servers,
        nodes=nodes,
        workers_per_node=workers_per_node,
        config=asdict(config),
    )
    entries.set(dedicated_key(number), msgspec.json.encode(published))
    return session_id


def look_up_dedicated(
    server: int, world: World, config: Config, session_id: str, look: Look
) -> tuple[str, str]:
    """A dedicated server's address, and its name while nobody has started it.

    Raises `HandshakeError` if it will not come.
    """
    key = dedicated_key(int(session_id.partition("-")[0]))
    store: Any = world.raw_store
    port = getattr(store, "port", None)
    option = f" --rendezvous {world.host}:{port}" if port else ""
    count = config.dedicated_servers
    what = f"dedicated server {server} of {count}; start `foreprop server --count {count}{option}`"
    found = raw_board(world, config, key, look).lookup(f"server/{server}", what)
    if found.startswith(_REFUSED):
        raise HandshakeError(found.removeprefix(_REFUSED))
    return found, what


def raw_board(world: World, config: Config, key: str, look: Look) -> Board:
    """The board of a new session's ranks in the raw store, where `foreprop server` looks."""
    return Board(
        world,
        key,
        timeout_s=config.join_timeout_s,
        report_s=config.stall_report_s,
        look=look,
        raw=True,
    )


class _SessionPublished(NamedTuple):
    number: int


class _StoreGone(NamedTuple):
    pass


class Supervisor:
    """Gives up to ``count`` servers to every session that is published at ``host:port``.

    ``config`` is this command's own: its secret, interface, ports, and the folder of its traces.
    """

    def __init__(
        self,
        *,
        host: str,
        port: int,
        count: int,
        config: Config,
        wait_s: float,
        report: Report,
    ) -> None:
        self._host = host
        self._port = port
        self._count = count
        self._wait_s = wait_s
        self._report = report
        self._config = config
        self._seal: Seal | None = None
        if config.secret_file is not None:
            self._seal = Seal(load_key(config.secret_file), "raw", "this server")
        self._unsigned: list[int] = []
        """Sessions whose announcement does not count; the true one may still come."""
        self._address = ""
        self._servers: dict[str, ProcessServer] = {}
        self._started = 0
        self._failed: list[str] = []

    def run(self) -> bool:
        """Serve until the store has gone; False if a server failed or none was ever needed."""
        try:
            watch = self._meet()
            with watch:
                self._serve(watch)
        finally:
            for server in self._servers.values():
                server.finish(kill_after_s=0.0, report=lambda: None)
        if not self._started:
            where = f"{self._host}:{self._port}"
            self._report(f"the run at {where} ended without asking this command for a server")
        return bool(self._started) and not self._failed

    def _meet(self) -> _StoreWatch:
        self._report(f"waits for the workers' rendezvous at {self._host}:{self._port}")
        watch = _StoreWatch(self._host, self._port, self._wait_s)
        self._address = local_address(self._host, self._config.interface)
        self._report(
            f"met the workers' rendezvous at {self._host}:{self._port}; servers will listen on"
            f" {self._address}"
        )
        return watch

    def _serve(self, watch: _StoreWatch) -> None:
        open_, report_at = True, time.monotonic() + _REPORT_S
        while open_ or self._servers:
            with contextlib.suppress(queue.Empty):
                event = watch.events.get(timeout=_POLL_S)
                if isinstance(event, _SessionPublished):
                    self._join_session(watch.store, event.number)
                else:
                    open_ = False
            open_ = open_ and not watch.is_gone()
            unsigned, self._unsigned = self._unsigned if open_ else [], []
            for number in unsigned:
                self._join_session(watch.store, number)
            self._reap()
            if time.monotonic() > report_at:
                report_at = float("inf")
                if not self._started:
                    self._report("waits for a session with dedicated_servers")

    def _join_session(self, store: TCPStore, number: int) -> None:
        key = dedicated_key(number)
        try:
            entry = open_entry(self._seal, key, bytes(store.get(key)), "this server")
            if entry is None:
                self._unsigned.append(number)
                return
            published: PublishedSession = decode_entry(entry, PublishedSession, key)
            claimed = store.add(f"{key}/claimed", self._count)
            for index in range(max(0, claimed - self._count), min(claimed, published.servers)):
                name = f"{key}/server/{index}"
                made: Any = self._start_or_refuse(published, index)  # torch's annotations: str
                if self._seal is not None:
                    made = self._seal.sign(name, made)
                store.set(name, made)
        except (dist.DistError, RuntimeError, ForepropError) as error:
            self._failed.append(f"session {number}")
            self._report(f"cannot join session {number}: {error}")

    def _start_or_refuse(self, published: PublishedSession, index: int) -> str:
        """The entry for one server: where it listens, or why there is none."""
        name = f"server {index} of session {published.session_id.partition('-')[0]}"
        try:
            address = self._start(published, index, name)
        except (ForepropError, TypeError, OSError) as error:
            self._failed.append(name)
            self._report(f"{name} cannot start: {error}")
            return f"{_REFUSED}dedicated server {index} at {self._address} cannot start: {error}"
        self._started += 1
        self._report(f"{name} of {published.servers} listens on {address}")
        return address

    def _start(self, published: PublishedSession, index: int, name: str) -> str:
        if published.foreprop != __version__:
            raise ConfigError(
                f"foreprop: rank 0 has {published.foreprop!r}, this server has {__version__!r}"
            )
        settings = self._settings(published)
        Config(**settings)  # which checks them
        task = ServerTask(
            index=index,
            session_id=published.session_id,
            world_size=published.world_size,
            config=settings,
            node=published.nodes + index,
            workers_per_node=published.workers_per_node,
            shares_node=False,
        )
        listener = listen(self._address, self._config.port_range)
        address, port = listener.getsockname()[:2]
        self._servers[name] = ProcessServer(task, [listener])
        return f"{address} {port}"

    def _settings(self, published: PublishedSession) -> dict[str, Any]:
        """The script's settings that a server needs; paths, ports and addresses are this command's.

        Whoever writes to the store would otherwise choose where files are written here.
        """
        theirs = {name: value for name, value in published.config.items() if name in _NEEDED}
        own, trace = self._config, self._config.trace
        if own.encryption != (script_s := theirs.get("encryption")):
            raise ConfigError(
                f"encryption is {own.encryption!r} here, and {script_s!r} in the script: set"
                " FOREPROP_ENCRYPTION to the same for both"
            )
        if own.counted_replay is None and published.config.get("counted_replay") is not None:
            raise ConfigError(
                "the script has counted_replay: set FOREPROP_COUNTED_REPLAY to this server's logs"
            )
        if trace is not None:
            check_trace_folder(trace)
        elif published.config.get("trace") is not None:
            self._report(
                "the script asks for traces; set FOREPROP_TRACE to a folder for this server's"
            )
        return {
            **theirs,
            "interface": own.interface,
            "port_range": own.port_range,
            "secret_file": own.secret_file,
            "trace": trace,
            "counted_log": own.counted_log,
            "counted_replay": own.counted_replay,
            "plugins": own.plugins,
        }

    def _reap(self) -> None:
        for name, server in list(self._servers.items()):
            code = server.poll()
            if code is None:
                continue
            server.finish(kill_after_s=0.0, report=lambda: None)
            del self._servers[name]
            self._report(f"{name} " + ("is done" if code == 0 else f"failed (exit code {code})"))
            if code != 0:
                self._failed.append(name)


class _StoreWatch:
    """Looks at the store in a thread of its own, where a hanging network blocks nobody.

    A second, silent connection tells when the store goes: torch would print its own traces.
    """

    def __init__(self, host: str, port: int, wait_s: float) -> None:
        self.events: queue.SimpleQueue[_SessionPublished | _StoreGone] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._sentinel, self.store = _connect_to_store(host, port, wait_s)
        self._thread = threading.Thread(target=self._watch, name="foreprop-watch", daemon=True)

    def __enter__(self) -> _StoreWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(1.0)
        self._sentinel.close()

    def _watch(self) -> None:
        seen = 0
        try:
            while not self._stop.wait(_POLL_S) and not self.is_gone():
                published = self.store.add(_SESSIONS, 0)
                while seen < published and self.store.check([dedicated_key(seen + 1)]):
                    seen += 1
                    self.events.put(_SessionPublished(seen))
        except (dist.DistError, RuntimeError) as error:
            LOGGER.error("the rendezvous is gone: %s", error)
        self.events.put(_StoreGone())

    def is_gone(self) -> bool:
        """Whether the second connection has ended; any thread."""
        try:
            return not self._sentinel.recv(1)
        except BlockingIOError:
            return False
        except OSError:
            return True


def _connect_to_store(host: str, port: int, wait_s: float) -> tuple[socket.socket, TCPStore]:
    deadline = time.monotonic() + wait_s
    while True:
        try:
            sentinel = socket.create_connection((host, port), timeout=min(wait_s, 5.0))
            if sentinel.getsockname() == sentinel.getpeername():
                raise ConnectionRefusedError("nobody listens")
            sentinel.setblocking(False)
            keep_alive(sentinel, _STORE_TIMEOUT_S)
        except OSError as error:
            if time.monotonic() >= deadline:
                raise _no_rendezvous(host, port, wait_s, error) from error
            time.sleep(0.1)
            continue
        try:
            return sentinel, TCPStore(
                host,
                port,
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=_STORE_TIMEOUT_S),
            )
        except (dist.DistError, RuntimeError) as error:
            sentinel.close()
            raise _no_rendezvous(host, port, wait_s, error) from error


def _no_rendezvous(host: str, port: int, wait_s: float, error: Exception) -> TransportError:
    why = str(error).partition("\n")[0]
    return TransportError(
        f"no workers' rendezvous at {host}:{port} within {wait_s:g} s ({why}); start torchrun, or"
        " give its endpoint as --rendezvous HOST:PORT"
    )
