"""A server that moves bytes and does not compute: it answers every push with the same values."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from unittest import mock

import msgspec
from torch.distributed import Store  # type: ignore[attr-defined]

from foreprop.backends.composed import ServerComposer
from foreprop.backends.dedicated import dedicated_key
from foreprop.config import Config
from foreprop.core.manifest import Hyperparameters
from foreprop.engine import stream
from foreprop.engine.server import Server
from foreprop.engine.slicestore import SliceStore
from foreprop.engine.stream import listen

_ANNOUNCED_S = timedelta(seconds=60)
_JOIN_S = 30.0


class StillStore(SliceStore):
    """A store that takes and gives slices as ever; only the optimizer is missing."""

    def update(
        self,
        slice_: int,
        ranks: Sequence[int],
        groups: Sequence[Hyperparameters],
        coefficient: float = 1.0,
        *,
        scale: float = 1.0,
        step: int = 0,
        counted: Sequence[int] | None = None,
    ) -> None:
        self._drop_gradients(self._slices[slice_], ranks)


class StillServer:
    """A server, in its own process, for the first session that asks ``store`` for a dedicated one.

    Unless it is ``checked`` its frames carry no checksums.
    """

    def __init__(self, store: Store, config: Config, *, checked: bool = True) -> None:
        self._store = store
        self._checked = checked
        self._config = config
        self._process: multiprocessing.process.BaseProcess | None = None
        self._thread = threading.Thread(target=self._meet, name="still-server", daemon=True)
        self._thread.start()

    def _meet(self) -> None:
        key = dedicated_key(1)
        self._store.wait([key], _ANNOUNCED_S)
        announcement = msgspec.json.decode(self._store.get(key))
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve,
            args=(announcement["session_id"], self._config, theirs.send, self._checked),
        )
        self._process.start()
        theirs.close()
        self._store.set(f"{key}/server/0", ours.recv())
        ours.close()

    @property
    def pid(self) -> int:
        self._thread.join()
        return (self._process.pid or 0) if self._process is not None else 0

    def join(self) -> None:
        self._thread.join()
        if self._process is not None:
            self._process.join(_JOIN_S)


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Make streams that carry frames without checksums, to measure what those cost."""
    with mock.patch.object(stream, "load_checksum", return_value=None):
        yield


def _serve(session_id: str, config: Config, announce: Callable[[str], None], checked: bool) -> None:
    listener: socket.socket = listen("127.0.0.1")
    announce(f"127.0.0.1 {listener.getsockname()[1]}")
    gc.freeze()  # as a real server does
    composer = ServerComposer(StillStore)
    with contextlib.nullcontext() if checked else unchecked():
        Server(index=0, session_id=session_id, config=config, composer=composer).run(listener)
