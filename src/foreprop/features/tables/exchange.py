"""A worker's exchange of rows with the servers: what it pushes, and what it pulls.

Row n of a table is in the shard of server n modulo their number. A push or a pull goes to a shard
in parts of bounded size. Each part of a pull is a *request* with a number of its own; the pull is
complete when all its requests are answered. The values at the start come in full, so that all ranks
begin with the same; later ones come in the wire's type.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from foreprop.core.frames import CONTROL_PRIORITY
from foreprop.core.slicing import Shard, part_rows
from foreprop.core.wire import Flag, Header, Kind
from foreprop.engine.connection import Connection, bounded
from foreprop.engine.memory import bytes_of
from foreprop.engine.tensors import DTYPES
from foreprop.engine.worker import WorkerEngine
from foreprop.errors import RemoteProtocolError
from foreprop.features.tables.parts import (
    END,
    REQUESTS,
    KeptRows,
    RowCodecs,
    RowPart,
    cut_kept,
    decode_kept,
    encode_kept,
    encode_kept_pull,
    encode_part,
    encode_pull,
    in_table,
    kept_limit_bytes,
)
from foreprop.quantities import counted


@dataclass(slots=True, eq=False)
class Pull:
    """Rows of a table that have been asked for; ``rows`` has them in the order of ``numbers``."""

    parameter: int
    step: int
    numbers: torch.Tensor  # in the table, int64, ascending
    rows: torch.Tensor
    # the servers that have not answered yet, by request
    missing: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Request:
    pull: Pull
    server: int
    places: torch.Tensor  # of its rows, in the pull
    arriving: torch.Tensor
    code: memoryview | None = None  # of the rows, if that is what comes


class RowExchange:
    """Pushes and pulls one worker's rows, and receives those that come back. Any thread.

    Parameters are those of its ``engine``, by number. Row numbers are those in the table.
    """

    kinds = frozenset({Kind.ROWS_REPLY, Kind.TABLE_REPLY})

    def __init__(self, engine: WorkerEngine) -> None:
        manifest = engine.manifest
        self.shards = engine.shards
        self._engine = engine
        self._progress = engine.progress
        self._counters = engine.progress.counters
        self._servers = manifest.knobs.servers
        self._shards_of: dict[int, list[Shard]] = {}
        for shard in self.shards:
            self._shards_of.setdefault(shard.parameter, []).append(shard)
        self._dtypes = [DTYPES[info.dtype] for info in manifest.parameters]
        self._wire_dtypes = [DTYPES[dtype] for dtype in manifest.wire_dtypes()]
        self._part_elems = manifest.knobs.slice_elems
        self.are_in_step = not (manifest.knobs.staleness or manifest.knobs.backup_workers)
        """Whether all workers are in the same step, so that rank 0 may change values later."""
        self._step_of: dict[int, int] = {}  # by parameter, of its last push
        self._lock = threading.Lock()
        self._requests: dict[int, _Request] = {}
        self._request_numbers = itertools.count()
        self._kept: dict[int, bytes] = {}  # by shard, a part of what is kept
        # what would have been sent, and received, without codecs
        self.raw_pushed_bytes = self.raw_reply_bytes = 0
        self._codecs = RowCodecs(manifest, inside_node=manifest.workers_per_push > 1)

    # Pushing.
    def push_rows(
        self, parameter: int, step: int, gradient: torch.Tensor | None, *, flags: int = 0
    ) -> None:
        """Send a sparse gradient's rows to their servers, each once, or say that there is none."""
        merged = None if gradient is None else gradient.detach().cpu().coalesce()
        self._progress.gradient_ready(parameter, step)
        self._step_of[parameter] = step
        flags |= self._engine.flags_of(step)
        sent_bytes = 0
        if merged is None:
            for shard in self._shards_of[parameter]:
                self._send(Kind.ROWS_PUSH, shard, step, b"", flags | Flag.NO_GRADIENT)
        else:
            narrow = merged.values().to(self._wire_dtypes[parameter])
            part = RowPart(merged.indices()[0], narrow)
            sent_bytes = self._send_parts(Kind.ROWS_PUSH, parameter, step, part, flags)
        with self._engine.lock:
            self._counters.pushes += 1
            self._counters.pushed_bytes += sent_bytes

    def send_row_values(self, parameter: int, step: int, table: torch.Tensor) -> None:
        """Send the whole table's values, which count from this step on; rank 0 alone does."""
        numbers = torch.arange(len(table))
        self._send_parts(Kind.ROWS_VALUE, parameter, step, RowPart(numbers, table.cpu()), 0)

    def _send_parts(self, kind: Kind, parameter: int, step: int, whole: RowPart, flags: int) -> int:
        sent_bytes = saved_bytes = 0
        for shard in self._shards_of[parameter]:
            parts = self._parts(whole.numbers, shard)
            for places in parts:
                rows = whole.rows.index_select(0, places)
                code = None
                if kind == Kind.ROWS_PUSH:
                    code = self._codecs.encoded(parameter, rows)
                    saved_bytes += rows.nbytes - len(code)
                data = encode_part(RowPart(whole.numbers[places] // self._servers, rows), code)
                more = Flag.MORE if places is not parts[-1] else 0
                self._send(kind, shard, step, data, flags | more)
                sent_bytes += len(data)
        if kind == Kind.ROWS_PUSH:
            with self._engine.lock:
                self.raw_pushed_bytes += sent_bytes + saved_bytes
        return sent_bytes

    def _parts(self, numbers: torch.Tensor, shard: Shard) -> Sequence[torch.Tensor]:
        """The places of the shard's rows among these, in parts: one, if there are none."""
        places = (numbers % self._servers == shard.server).nonzero()[:, 0]
        return torch.split(places, part_rows(shard.row_elems, self._part_elems))

    def _send(self, kind: Kind, shard: Shard, step: int, data: bytes, flags: int) -> None:
        send, priority = self._engine.send_message, self._engine.priority_of(shard.parameter)
        send(shard.server, kind, step, priority, data, slice_=shard.number, flags=flags)

    # Pulling.
    def pull_rows(
        self, parameter: int, step: int, numbers: torch.Tensor, *, flags: int = 0
    ) -> Pull:
        """Ask for rows as they are after ``step``; ``numbers`` ascend, int64.

        With ``Flag.ANEW`` a relay forgets what it has of that step.
        """
        shards, priority = self._shards_of[parameter], self._engine.priority_of(parameter)
        rows = torch.empty(len(numbers), shards[0].row_elems, dtype=self._dtypes[parameter])
        arriving_dtype = self._wire_dtypes[parameter] if step else rows.dtype
        pull = Pull(parameter, step, numbers, rows)
        asked = []
        with self._lock:  # before anything can be answered
            for shard in shards:
                for places in self._parts(numbers, shard):
                    if len(places):
                        request = next(self._request_numbers) % REQUESTS
                        arriving = torch.empty(len(places), shard.row_elems, dtype=arriving_dtype)
                        self._requests[request] = _Request(pull, shard.server, places, arriving)
                        pull.missing[request] = shard.server
                        asked.append((shard, places, request))
        send, kind = self._engine.send_message, Kind.ROWS_PULL
        for shard, places, request in asked:
            data = encode_pull(shard.number, numbers[places] // self._servers)
            send(shard.server, kind, step, priority, data, slice_=request, flags=flags)
        return pull

    def wait_for_rows(self, pull: Pull) -> torch.Tensor:
        """Block until the rows are here; raises what went wrong meanwhile."""
        self._progress.raise_if_failed()
        if pull.missing:
            self._progress.wait_for_parameter(
                pull.parameter,
                pull.step,
                lambda: not pull.missing,
                lambda: self._describe(pull),
                lambda: self._engine.requests.ask(self._awaited_shards(pull), pull.step),
            )
        return pull.rows

    def _describe(self, pull: Pull) -> str:
        name = self._engine.parameters[pull.parameter].name
        text = f"{counted(len(pull.numbers), 'row')} of {name} as of step {pull.step}"
        return "; ".join([text, *self._engine.requests.describe(self._awaited_shards(pull))])

    def _awaited_shards(self, pull: Pull) -> dict[int, int]:
        """The shards that missing rows are in, or that the norm needs, by server."""
        shards = self._shards_of[pull.parameter]
        asked = {server: shards[server].number for server in set(pull.missing.values())}
        return self._engine.requests.with_all_servers(asked)

    def settle_rows(self) -> None:
        """Block until the servers have updated all tables as of their last pushes."""
        pulls = []
        for parameter in self._shards_of:
            rows = self._engine.parameters[parameter].shape[0]
            one_of_each_server = torch.arange(min(self._servers, rows))
            step = self._step_of.get(parameter, 0)
            # anew: a relay's rows may be older than a change by hand
            pulls.append(self.pull_rows(parameter, step, one_of_each_server, flags=Flag.ANEW))
        for pull in pulls:
            self.wait_for_rows(pull)

    # All that servers keep of a remote table.
    def kept_rows(self, parameter: int) -> Iterator[KeptRows]:
        """All that servers keep of a remote table, in parts, with the table's row numbers."""
        for shard in self._shards_of[parameter]:
            following = 0
            while following != END:
                part = self._fetch_kept(shard, following)
                following = part.following
                yield in_table(part, shard, self._servers)

    def _fetch_kept(self, shard: Shard, first: int) -> KeptRows:
        number, data = shard.number, encode_kept_pull(first)
        send, kind = self._engine.send_message, Kind.TABLE_PULL
        send(shard.server, kind, 0, CONTROL_PRIORITY, data, slice_=number)
        self._progress.wait_until(
            lambda: number in self._kept,
            self._engine.config.step_timeout_s,
            lambda: f"rows of {self._engine.parameters[shard.parameter].name} from {shard.server}",
        )
        return decode_kept(memoryview(bytearray(self._kept.pop(number))), shard)

    def send_kept_rows(self, parameter: int, part: KeptRows, *, anew: bool = False) -> None:
        """Replace rows, or with ``anew`` all; rank 0 alone does, while no update is under way.

        Row numbers are the table's. Blocks until the servers have taken them.
        """
        send, kind, flags = self._engine.send_message, Kind.TABLE, Flag.ANEW if anew else 0
        for shard, own in cut_kept(part, self._shards_of[parameter], self._servers):
            data, number = encode_kept(own), shard.number
            send(shard.server, kind, 0, CONTROL_PRIORITY, data, slice_=number, flags=flags)
        self.settle_rows()

    # Receiving.
    def room(self, peer: Connection, header: Header) -> memoryview:
        """The memory where rows go; raises `RemoteProtocolError` for what nobody asked for."""
        if header.kind == Kind.TABLE_REPLY:
            place = header.slice - len(self._engine.slices)
            known = 0 <= place < len(self.shards)
            return bounded(header, kept_limit_bytes(self.shards[place]) if known else 0)
        request = self._requests.get(header.slice)
        if request is None or request.server != peer.number or request.pull.step != header.step:
            raise RemoteProtocolError(
                f"server {peer.number} sent rows for request {header.slice}, step {header.step},"
                " which is not awaited"
            )
        whole, parameter = bytes_of(request.arriving), request.pull.parameter
        size_bytes = header.payload_bytes
        if not self._codecs.is_code(parameter, size_bytes, len(whole)):
            return whole
        request.code = memoryview(bytearray(size_bytes))
        return request.code

    def on_frame(self, peer: Connection, header: Header, payload: memoryview) -> None:
        if header.kind == Kind.TABLE_REPLY:
            self._kept[header.slice] = bytes(payload)
            self._progress.notify()
            return
        with self._engine.lock:
            self._counters.replies += 1
            self._counters.reply_bytes += header.payload_bytes
            request = self._requests[header.slice]
            self.raw_reply_bytes += request.arriving.nbytes
        if request.code is not None:
            self._codecs.decode(request.code, request.arriving)
        request.pull.rows[request.places] = request.arriving.to(request.pull.rows.dtype)
        with self._lock:
            del self._requests[header.slice], request.pull.missing[header.slice]
            complete = not request.pull.missing
        if complete:
            self._progress.notify()
