"""Remote tables as a whole: their files, changes by hand, and what a ``state_dict()`` has of them.

No worker has memory for such a table, so all this goes part by part. A file's parts have the rows
that a step has updated, or somebody has set; the others are made again (`tables.rowtable`).

A change is made on all ranks alike: rank 0 sends it while the others wait, so that nobody sees half
of it.

At every moment the last complete tables of a folder can be loaded. Parts get names that no earlier
save has used, and are on the disk before the index names them. The index is replaced last, in one
step; only then what it no longer names is removed. So a process that is killed, or finds the disk
full, at whatever moment, leaves the tables that were there before.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import secrets
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec
import torch
from torch.utils.hooks import RemovableHandle

from foreprop.config import Config
from foreprop.core.manifest import ParameterInfo, RowInit
from foreprop.core.slicing import part_rows
from foreprop.durable import sync_folder, write_file
from foreprop.engine.rendezvous import Board
from foreprop.engine.sums import start_average
from foreprop.engine.world import World
from foreprop.errors import ConfigError, ForepropError, StorageError
from foreprop.features.tables.embeddings import are_listed
from foreprop.features.tables.parts import VALUES, KeptRows
from foreprop.features.tables.rowparameter import RemoteRows
from foreprop.features.tables.rowtable import make_rows
from foreprop.params.modelhooks import CallingHook

INDEX = "tables.json"
_PART = re.compile(r"table-\d+-\d+(-[0-9a-f]{8})?\.pt")
_UNFINISHED = re.compile(re.escape(INDEX) + r"-[0-9a-f]{8}\.part")
_PARTS_IN_A_FILE = 16
_AT_ONCE_ELEMS = 1 << 20
_MADE_AT_ONCE_ELEMS = 1 << 22
_MORE, _DONE, _FAILED = "more", "done", "failed: "


class RemoteTables:
    """All remote tables of one session; there may be none. Training thread."""

    def __init__(
        self,
        tables: Sequence[RemoteRows],
        optimizer: torch.optim.Optimizer,
        infos: Sequence[ParameterInfo],
        board: Board,
        *,
        world: World,
        config: Config,
    ) -> None:
        self._by_name = {table.owner.name: table for table in tables}
        self._infos = {info.name: info for info in infos if info.init is not None}
        self._optimizer = type(optimizer).__name__
        self._world = world
        self._config = config
        self._board = board
        self._changes = 0
        self._aside = False

    def _settle(self) -> None:
        next(iter(self._by_name.values())).exchange.settle_rows()  # all tables have the same

    def _check_any(self) -> None:
        if not self._by_name:
            raise ConfigError(
                "there are no remote tables: embeddings with sparse=True that were made under"
                " torch.device('meta')"
            )

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write what the servers keep: values, optimizer state, averages. Any rank by itself."""
        self._check_any()
        target = TableFolder(Path(folder))
        self._settle()
        target.save(lambda: self._write_to(target))

    def _write_to(self, folder: TableFolder) -> dict[str, Any]:
        described = {}
        for number, (name, table) in enumerate(self._by_name.items()):
            kept = table.exchange.kept_rows(table.number)
            plain = ((part.numbers, dict(part.entries)) for part in kept)  # to read without us
            files: list[str] = []
            while parts := list(itertools.islice(plain, _PARTS_IN_A_FILE)):
                files.append(folder.write_part(number, len(files), parts))
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
        rows = torch.empty(wanted, dtype=table.owner.parameter.dtype)
        rows[places] = values.detach().to(rows)
        self._change(lambda: self._send_in_parts(table, unique, rows))

    def _send_in_parts(
        self, table: RemoteRows, numbers: torch.Tensor, rows: torch.Tensor
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
            for path in (folder / file for file in described[name]["files"]):
                try:
                    parts = torch.load(path, map_location="cpu", weights_only=True)
                    kept = [KeptRows(numbers, entries) for numbers, entries in parts]
                except Exception as error:  # whatever torch makes of a file that is not its own
                    raise ConfigError(
                        f"{path} cannot be read as a part of tables: {error}"
                    ) from error
                for part in kept:
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
        return self._config.keeps_whole_tables(self._world.rank)

    def check_whole(self) -> None:
        """Raise, before a checkpoint, if the user has not said which ranks get whole tables."""
        if self._config.whole_tables is None and not self._aside and self._infos:
            raise ConfigError(_whole_text(self._infos))

    def show(self, name: str, state: dict[str, Any], key: str) -> None:
        """Put a whole table into a module's state dict, if this rank is to have it there."""
        if self.keeps_whole and not self._aside:
            table = self._by_name[name]
            state[key] = _whole(table, lambda n: table.exchange.wait_for_rows(table.pull(n)))

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Have state dicts meanwhile show remote tables as they are, on the meta device."""
        before, self._aside = self._aside, True
        try:
            yield
        finally:
            self._aside = before

    def put_whole(self, values: Sequence[torch.Tensor], entry: str) -> list[torch.Tensor]:
        """Each parameter's values, with whole tables' entries if this rank is to have them.

        ``entry`` is a name of `tables.parts`.
        """
        tables = {table.owner.index: table for table in self._by_name.values()}
        return [
            value.detach()
            if number not in tables or not self.keeps_whole
            else _whole_of(tables[number], entry)
            for number, value in enumerate(values)
        ]

    def watch(
        self, modules_of: Callable[[str], Sequence[torch.nn.Module]]
    ) -> Iterator[RemovableHandle]:
        """Have the modules' state dicts ask here, for as long as this object is there."""
        for name in self._by_name:
            for module in modules_of(name):
                yield from _watch(module, name, weakref.ref(self))

    # Changes, on all ranks alike.
    def _change(self, work: Callable[[], Iterator[None]]) -> None:
        for table in self._by_name.values():
            table.gradient.check_stepped()
        self._changes += 1
        key = str(self._changes)
        self._settle()  # the updates so far are of the old values
        board, done = self._board, 0
        board.publish(f"{key}/here/{self._world.rank}", _DONE)
        if self._world.rank == 0:
            for rank in range(1, self._world.size):
                board.lookup(f"{key}/here/{rank}", f"rank {rank} to change remote tables, too")
            try:
                for done, _ in enumerate(work(), 1):
                    board.publish(f"{key}/{done - 1}", _MORE)
            except BaseException as error:
                board.publish(f"{key}/{done}", f"{_FAILED}{error}")
                raise
            board.publish(f"{key}/{done}", _DONE)
        else:
            text = _MORE
            while text == _MORE:
                what = f"part {done} of rank 0's change of remote tables"
                text = board.lookup(f"{key}/{done}", what)
                done += 1
            if text != _DONE:
                why = text.removeprefix(_FAILED)
                raise ConfigError(f"rank 0 could not change its tables: {why}")
            self._settle()  # no relay has older rows
        for table in self._by_name.values():
            table.drop_rows()


class TableFolder:
    """One save into a folder, or one load from it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._token = secrets.token_hex(4)
        self._written: list[str] = []
        self._replaced = False

    # Writing.
    def save(self, write_parts: Callable[[], Mapping[str, Any]]) -> None:
        """Save what ``write_parts`` writes by `write_part`; it returns the tables' index entries.

        Raises `StorageError` if the folder cannot be written; what was in it can still be loaded.
        """
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            self._remove_all_but(self._named_by_index())
            described = write_parts()
            self._replace_index(json.dumps({"tables": described}, indent=1).encode())
            sync_folder(self._path)
        except (ForepropError, OSError, RuntimeError) as error:  # torch's are the last
            if not self._replaced:
                self._remove(self._written)  # make room
            if isinstance(error, ForepropError):
                raise
            raise StorageError(
                f"cannot save tables in {self._path}: {error}; what was saved there before can"
                " still be loaded"
            ) from error
        self._remove_all_but(self._written)

    def write_part(self, table: int, number: int, parts: object) -> str:
        name = f"table-{table}-{number}-{self._token}.pt"
        self._write(name, lambda file: torch.save(parts, file))
        return name

    def _replace_index(self, data: bytes) -> None:
        """Replace the index so that a reader sees all of it or none, also after a power cut."""
        unfinished = f"{INDEX}-{self._token}.part"
        self._write(unfinished, lambda file: file.write(data))
        sync_folder(self._path)  # the parts' names are there before the index that has them
        os.replace(self._path / unfinished, self._path / INDEX)
        self._replaced = True

    def _write(self, name: str, write: Callable[[BinaryIO], object]) -> None:
        self._written.append(name)
        write_file(self._path / name, write, "xb")

    def _remove_all_but(self, keep: Iterable[str] | None) -> None:
        """Remove files of other saves; with None nobody knows which are needed, and all stay."""
        if keep is None:
            return
        names = {path.name for path in self._path.iterdir()}
        ours = {name for name in names if _PART.fullmatch(name) or _UNFINISHED.fullmatch(name)}
        self._remove(ours.difference(keep))

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            with contextlib.suppress(OSError):  # it is only in the way
                os.unlink(self._path / name)

    # Reading.
    def _named_by_index(self) -> list[str] | None:
        """The names of the files in the index; None if there is one that cannot be read."""
        if not (self._path / INDEX).exists():
            return []
        try:
            tables = self.read_index()
            return [name for table in tables.values() for name in table["files"]]
        except ConfigError:
            return None

    def read_index(self) -> Mapping[str, Mapping[str, Any]]:
        """What was saved of each table, and its files' names; raises `ConfigError`."""
        try:
            found = json.loads((self._path / INDEX).read_text())["tables"]
            for name in (name for table in found.values() for name in table["files"]):
                if not _PART.fullmatch(name):  # an index may come from anywhere
                    raise ValueError(
                        f"{name!r} is not the name of a part, as table-0-0-0123abcd.pt"
                    )
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f"{self._path} has no complete tables, as session.save_tables() writes them:"
                f" {error!r}"
            ) from error
        tables: Mapping[str, Mapping[str, Any]] = found
        return tables


def _whole(table: RemoteRows, rows_of: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The whole table, from rows that ``rows_of`` makes, not too many at once."""
    whole = torch.empty(table.row_count, table.row_elems, dtype=table.owner.parameter.dtype)
    at_once = part_rows(table.row_elems, _MADE_AT_ONCE_ELEMS)
    for start in range(0, table.row_count, at_once):
        stop = min(start + at_once, table.row_count)
        whole[start:stop] = rows_of(torch.arange(start, stop))
    return whole


def _whole_of(table: RemoteRows, entry: str) -> torch.Tensor:
    """All rows' entries of a name: averages, or values in full."""
    owner, elems = table.owner, table.row_elems
    init, dtype = cast("RowInit", owner.session.infos[owner.index].init), owner.parameter.dtype
    whole = _whole(table, lambda numbers: make_rows(init, numbers, elems, dtype))
    if entry != VALUES:
        whole = start_average(whole)
    table.exchange.settle_rows()
    for part in table.exchange.kept_rows(table.number):
        whole[part.numbers] = part.entries.get(entry, part.entries[VALUES]).to(whole.dtype)
    return whole


def _watch(module: Any, name: str, tables: weakref.ref[RemoteTables]) -> Iterator[RemovableHandle]:
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
