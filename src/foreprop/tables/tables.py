"""Remote tables as a whole: their files, changes by hand, and what a ``state_dict()`` has of them.

No worker has room for such a table, so all this goes part by part. A file's parts have the rows
that a step has updated, or somebody has set; the others begin as they always do
(`tables.table`).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.utils.hooks import RemovableHandle

from foreprop.cluster.rendezvous import Board
from foreprop.cluster.world import World
from foreprop.config import Config
from foreprop.core.manifest import ParameterInfo
from foreprop.core.shards import part_rows
from foreprop.errors import ConfigError
from foreprop.hooks.modelhooks import CallingHook
from foreprop.tables.embeddings import are_listed
from foreprop.tables.folder import TableFolder
from foreprop.tables.parts import VALUES, KeptRows
from foreprop.tables.remote import RemoteTable

_PARTS_IN_A_FILE = 16
_AT_ONCE_ELEMS = 1 << 20
_MORE, _DONE, _FAILED = "more", "done", "failed: "


class RemoteTables:
    """All remote tables of one session; there may be none. Training thread."""

    def __init__(
        self,
        tables: Sequence[RemoteTable],
        optimizer: torch.optim.Optimizer,
        infos: Sequence[ParameterInfo],
        board: Board,
        *,
        world: World,
        config: Config,
    ) -> None:
        self._by_name = {table.name: table for table in tables}
        self._infos = {info.name: info for info in infos if info.init is not None}
        self._optimizer = type(optimizer).__name__
        self._world = world
        self._config = config
        self._board = board
        self._changes = 0
        self._aside = False

    def _settle(self) -> None:
        """The exchange has all tables: any table's will do."""
        next(iter(self._by_name.values())).exchange.settle_rows()

    def _check_any(self) -> None:
        if not self._by_name:
            raise ConfigError(
                "there are no remote tables: embeddings with sparse=True that were made under"
                " torch.device('meta')"
            )

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write what the servers keep: values, optimizer state, averages. Any rank by itself."""
        self._check_any()
        files = TableFolder(Path(folder))
        self._settle()
        files.save(lambda: self._write_to(files))

    def _write_to(self, folder: TableFolder) -> dict[str, Any]:
        described = {}
        for number, (name, table) in enumerate(self._by_name.items()):
            groups = _in_groups(table.exchange.kept_rows(table.number), _PARTS_IN_A_FILE)
            files = [folder.write_part(number, n, parts) for n, parts in enumerate(groups)]
            described[name] = {**self._describe(name), "files": files}
        return described

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Go on from what `save` has written. Every rank calls it alike; rank 0 reads."""
        self._check_any()
        self._change(lambda: self._read(Path(folder)))

    def set_rows(self, name: str, numbers: torch.Tensor, values: torch.Tensor) -> None:
        """Change rows by hand. Every rank calls it alike; rank 0's values count."""
        table = self._by_name.get(name)
        if table is None:
            raise ConfigError(
                f"{name} is not a remote table: change the parameter itself, under torch.no_grad()"
            )
        unique, places = torch.unique(numbers.to("cpu", torch.int64), return_inverse=True)
        table.check_numbers(unique)
        wanted = (len(numbers), table.row_elems)
        if numbers.dim() != 1 or len(unique) != len(numbers) or values.shape != wanted:
            raise ConfigError(
                f"{tuple(values.shape)} values for the rows of numbers {tuple(numbers.shape)} of"
                f" {name}: there must be {wanted}, and each number once"
            )
        rows = torch.empty(wanted, dtype=table.parameter.dtype)
        rows[places] = values.detach().to(rows)
        self._change(lambda: self._send_in_parts(table, unique, rows))

    def _send_in_parts(
        self, table: RemoteTable, numbers: torch.Tensor, rows: torch.Tensor
    ) -> Iterator[None]:
        at_once = part_rows(table.row_elems, _AT_ONCE_ELEMS)
        for start in range(0, len(numbers), at_once):
            some = slice(start, start + at_once)
            part = KeptRows(numbers[some], {VALUES: rows[some]})
            table.exchange.send_kept_rows(table.number, part)
            yield

    def _read(self, folder: Path) -> Iterator[None]:
        described = self._read_index(folder)
        nothing = KeptRows(torch.empty(0, dtype=torch.int64), {})
        for name, table in self._by_name.items():
            table.exchange.send_kept_rows(table.number, nothing, anew=True)
            for file in described[name]["files"]:
                for part in _parts_in(folder / file):
                    table.exchange.send_kept_rows(table.number, part)
                    yield

    def _read_index(self, folder: Path) -> Mapping[str, Any]:
        found = TableFolder(folder).read_index()
        differ, missing = [], []
        for name in self._by_name:
            theirs = found.get(name, {})
            for key, value in self._describe(name).items():
                if (other := theirs.get(key)) != value:
                    differ.append(f"{key} of {name} is {value!r} here and {other!r} there")
            missing += [file for file in theirs.get("files", ()) if not (folder / file).is_file()]
        if differ:
            raise ConfigError(f"the tables in {folder} do not fit: {'; '.join(differ)}")
        if missing:
            raise ConfigError(
                f"the tables in {folder} are not complete: {are_listed(missing)} missing"
            )
        return found

    def _describe(self, name: str) -> dict[str, Any]:
        info = self._infos[name]
        return {
            "shape": list(info.shape),
            "dtype": info.dtype,
            "rows begin as": msgspec.to_builtins(info.init),
            "optimizer": self._optimizer,
        }

    # Whole tables.
    @property
    def keeps_whole(self) -> bool:
        """Whether this rank gets all rows of tables, in a checkpoint."""
        return self._config.keeps_whole_tables(self._world.rank)

    def check_whole(self) -> None:
        """A checkpoint is made: raise if nobody has said who gets whole tables."""
        if self._config.whole_tables is None and not self._aside and self._infos:
            raise ConfigError(_whole_text(self._infos))

    def show(self, name: str, state: dict[str, Any], key: str) -> None:
        """A module's state dict has its table on the meta device: have it whole, if it shall be."""
        if self.keeps_whole and not self._aside:
            state[key] = self._by_name[name].whole()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Meanwhile state dicts show remote tables as they are, on the meta device."""
        before, self._aside = self._aside, True
        try:
            yield
        finally:
            self._aside = before

    def put_whole(self, values: Sequence[torch.Tensor], entry: str) -> list[torch.Tensor]:
        """By parameter: with the tables' own (`tables.parts`), if this rank gets them whole."""
        tables = {table.index: table for table in self._by_name.values()}
        return [
            value.detach()
            if number not in tables or not self.keeps_whole
            else tables[number].whole_of(entry)
            for number, value in enumerate(values)
        ]

    def watch(
        self, modules_of: Callable[[str], Sequence[torch.nn.Module]]
    ) -> Iterator[RemovableHandle]:
        """Have the modules' state dicts ask here."""
        for name in self._by_name:
            for module in modules_of(name):
                yield from _watch(module, name, weakref.ref(self))

    # Changes, on all ranks alike.
    def _change(self, work: Callable[[], Iterator[None]]) -> None:
        """Rank 0 works while the others wait, so that nobody sees half of it."""
        for table in self._by_name.values():
            table.check_stepped()
        self._changes += 1
        key = str(self._changes)
        self._board.publish(f"{key}/here/{self._world.rank}", _DONE)
        if self._world.rank == 0:
            self._lead(key, work)
        else:
            self._follow(key)
            self._settle()  # no relay has older rows
        for table in self._by_name.values():
            table.drop_rows()

    def _lead(self, key: str, work: Callable[[], Iterator[None]]) -> None:
        for rank in range(1, self._world.size):
            self._board.lookup(f"{key}/here/{rank}", f"rank {rank} to change remote tables, too")
        done = 0
        try:
            self._settle()  # the updates so far are of the old values
            for done, _ in enumerate(work(), 1):
                self._board.publish(f"{key}/{done - 1}", _MORE)
        except BaseException as error:
            self._board.publish(f"{key}/{done}", f"{_FAILED}{error}")
            raise
        self._board.publish(f"{key}/{done}", _DONE)

    def _follow(self, key: str) -> None:
        done, told = 0, _MORE
        while told == _MORE:
            told = self._board.lookup(
                f"{key}/{done}", f"part {done} of rank 0's change of remote tables"
            )
            done += 1
        if told != _DONE:
            raise ConfigError(f"rank 0 could not change its tables: {told.removeprefix(_FAILED)}")


def _in_groups(parts: Iterator[KeptRows], size: int) -> Iterator[list[Any]]:
    """As plain tuples: files are to be read without this class."""
    plain = ((part.numbers, dict(part.entries)) for part in parts)
    while group := list(itertools.islice(plain, size)):
        yield group


def _parts_in(path: Path) -> list[KeptRows]:
    try:
        parts = torch.load(path, map_location="cpu", weights_only=True)
        return [KeptRows(numbers, entries) for numbers, entries in parts]
    except Exception as error:  # whatever torch makes of a file that is not its own
        raise ConfigError(f"{path} cannot be read as a part of tables: {error}") from error


def _watch(module: Any, name: str, tables: weakref.ref[RemoteTables]) -> Iterator[RemovableHandle]:
    """What the module's state_dict() has of its table, for as long as ``tables`` are there."""

    def before_saving(*_: Any) -> None:
        if (own := tables()) is not None:
            own.check_whole()

    def saved(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        if (own := tables()) is not None:
            own.show(name, state, f"{prefix}weight")

    def before_loading(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        value = state.get(f"{prefix}weight")
        if tables() is None or value is None or value.is_meta:
            return
        raise ConfigError(
            f"load_state_dict() has values for {name}, which is on the meta device, and would"
            " ignore them: use session.load_tables(folder), or session.set_rows(name, numbers,"
            " values), and leave it out here"
        )

    yield module.register_state_dict_pre_hook(CallingHook(before_saving))
    yield module.register_state_dict_post_hook(CallingHook(saved))
    yield module.register_load_state_dict_pre_hook(CallingHook(before_loading))


def _whole_text(infos: Mapping[str, ParameterInfo]) -> str:
    rows = ", ".join(f"{name} ({info.shape[0]} rows)" for name, info in infos.items())
    return (
        f"only the servers have the rows of {rows}: say for state_dict() who is to get them whole,"
        " parallelize(..., whole_tables='all') or 'rank0', or that nobody is, 'none': then"
        " state_dict() shows them on the meta device, and session.save_tables(folder) saves them"
    )
