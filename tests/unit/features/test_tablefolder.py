"""Whatever happens to a save, and whenever, the tables that were there before can be loaded."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from broken_disk import Disk, PowerCut

from foreprop.errors import ConfigError, StorageError
from foreprop.features.tables import remotetables
from foreprop.features.tables.remotetables import INDEX, TableFolder
from tests.tiers import long_cases

PARTS = 3


def save(folder: Path, value: int) -> None:
    files = TableFolder(folder)

    def write_parts() -> dict[str, Any]:
        parts = [torch.full((50,), value + number) for number in range(PARTS)]
        return {"t": {"files": [files.write_part(0, n, part) for n, part in enumerate(parts)]}}

    files.save(write_parts)


def load(folder: Path) -> list[int]:
    names = TableFolder(folder).read_index()["t"]["files"]
    return [int(torch.load(folder / name, weights_only=True)[7]) for name in names]


def operations(monkeypatch: pytest.MonkeyPatch, folder: Path) -> int:
    """How many a second save into one folder takes."""
    with monkeypatch.context() as patch:
        save(folder, 100)
        (disk := Disk()).stand_for(patch, remotetables)
        save(folder, 200)
    return disk.done


OLD, NEW = [100, 101, 102], [200, 201, 202]


@pytest.mark.parametrize("every", [3, *long_cases(1)])
def test_killed_or_without_power_at_every_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    count = operations(monkeypatch, tmp_path / "count")
    found = []
    for at in range(1, count + 1, every):
        folder = tmp_path / str(at)
        save(folder, 100)
        disk = Disk(at, cut=True)
        disk.stand_for(monkeypatch, remotetables)
        with contextlib.suppress(PowerCut, RuntimeError):  # torch's, from a write
            save(folder, 200)
        monkeypatch.undo()
        assert disk.fired
        found.append(load(folder))
        save(folder, 300)
        assert load(folder) == [300, 301, 302]
        assert len(list(folder.iterdir())) == PARTS + 1, "leftovers"
    assert count > 20
    last_old = max(at for at, loaded in enumerate(found) if loaded == OLD)
    assert found == [OLD] * (last_old + 1) + [NEW] * (len(found) - last_old - 1)
    assert NEW in found


@pytest.mark.long
def test_a_full_disk_at_every_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = operations(monkeypatch, tmp_path / "count")
    for at in range(1, count + 1):
        folder = tmp_path / str(at)
        save(folder, 100)
        (disk := Disk(at)).stand_for(monkeypatch, remotetables)
        message = ""
        try:
            save(folder, 200)
        except StorageError as error:
            message = str(error)
        monkeypatch.undo()
        assert message.startswith(f"cannot save tables in {folder}: ") == disk.fired
        assert disk.fired or at > count - 2 * PARTS  # only removing was left
        assert len(list(folder.iterdir())) in (PARTS + 1, 2 * PARTS + 1)
        assert load(folder) in (OLD, NEW)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"cannot save tables in .*file/tables"):
        save(tmp_path / "file" / "tables", 1)


def test_files_of_others_stay(tmp_path: Path) -> None:
    for name in ("table-of-contents.pt", "model.pt", "table-0-0.pt.bak"):
        (tmp_path / name).touch()
    save(tmp_path, 100)
    save(tmp_path, 200)
    assert len(list(tmp_path.iterdir())) == PARTS + 4


NAMES: list[Any] = ["../x.pt", "/etc/passwd", "table-0-0.pt/../../x.pt", "", 7, None, ["table"]]


@pytest.mark.parametrize("name", NAMES)
def test_an_index_names_files_of_its_folder_only(tmp_path: Path, name: Any) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"tables": {"t": {"files": [name]}}}))
    with pytest.raises(ConfigError, match="has no complete tables"):
        TableFolder(tmp_path).read_index()


INDICES: dict[str, Callable[[], str]] = {
    "nothing": lambda: "",
    "a list": lambda: "[]",
    "no tables": lambda: "{}",
    "a number": lambda: '{"tables": 3}',
    "a table that is a number": lambda: '{"tables": {"t": 3}}',
    "files that are a number": lambda: '{"tables": {"t": {"files": 3}}}',
    "very deep": lambda: "[" * 100_000,
}


@pytest.mark.parametrize("name", INDICES)
def test_an_index_that_is_none(tmp_path: Path, name: str) -> None:
    (tmp_path / INDEX).write_text(INDICES[name]())
    with pytest.raises(ConfigError, match="has no complete tables"):
        TableFolder(tmp_path).read_index()


def test_a_save_of_the_first_format_loads_and_is_replaced(tmp_path: Path) -> None:
    """The first format's parts had no number of their save."""
    torch.save(torch.full((50,), 5), tmp_path / "table-0-0.pt")
    (tmp_path / INDEX).write_text(json.dumps({"tables": {"t": {"files": ["table-0-0.pt"]}}}))
    assert load(tmp_path) == [5]
    save(tmp_path, 100)
    assert load(tmp_path) == OLD
    assert not (tmp_path / "table-0-0.pt").exists()
