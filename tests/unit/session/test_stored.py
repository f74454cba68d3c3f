"""Whatever happens to a checkpoint, and whenever, the one that was there before can be read."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from broken_disk import Disk, PowerCut

from foreprop.errors import ConfigError
from foreprop.session import stored
from foreprop.session.stored import (
    INDEX,
    SHARED,
    Checkpoint,
    CheckpointFolder,
    part_name,
)
from tests.tiers import long_cases

RANKS = 2


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


def save(folder: Path, step: int, *, keep: int = 3, token: str = "0123abcd") -> None:
    """Save a checkpoint as two ranks do, one after the other."""
    files = CheckpointFolder(folder)
    unfinished = files.begin(step, token)
    unfinished.path.mkdir(parents=True)
    (unfinished.path / "tables-0").mkdir()
    (unfinished.path / "tables-0" / "tables.json").write_text(str(step))
    for rank in range(RANKS):
        contents = {part_name(rank): {"value": torch.full((40,), step + rank)}}
        if rank == 0:
            contents[SHARED] = {"value": torch.full((40,), step)}
        assert unfinished.missing(range(RANKS)) == list(range(rank, RANKS))
        unfinished.write_part(rank, contents)
    files.finish(unfinished, RANKS, keep=keep)


def load(folder: Path) -> list[int]:
    """The values of the newest checkpoint: the shared part's, and each rank's."""
    found = CheckpointFolder(folder).newest(lambda _: None)
    assert found is not None
    parts = [found.read(SHARED), *(found.read(part_name(rank)) for rank in range(found.world_size))]
    tables = found.tables(0)
    assert tables is not None
    assert int((tables / "tables.json").read_text()) == found.step
    return [int(part["value"][7]) for part in parts]


OLD, NEW, NEXT = [100, 100, 101], [200, 200, 201], [300, 300, 301]


def operations(monkeypatch: pytest.MonkeyPatch, folder: Path) -> int:
    """How many operations a second checkpoint takes."""
    save(folder, 100)
    with monkeypatch.context() as patch:
        (disk := Disk()).stand_for(patch, stored)
        save(folder, 200, keep=1)
    return disk.done


@pytest.mark.parametrize("every", [3, *long_cases(1)])
@pytest.mark.parametrize("cut", [True, *long_cases(False)], ids=["power cut", "full disk"])
def test_at_every_operation_the_last_one_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: bool, every: int
) -> None:
    count = operations(monkeypatch, tmp_path / "count")
    assert count > 30
    found = []
    for at in range(1, count + 1, every):
        folder = tmp_path / str(at)
        save(folder, 100)
        (disk := Disk(at, cut=cut)).stand_for(monkeypatch, stored)
        with contextlib.suppress(PowerCut, OSError, RuntimeError):  # torch's, from a write
            save(folder, 200, keep=1)
        monkeypatch.undo()
        assert disk.fired or not cut
        found.append(load(folder))
        newest = found[-1][0]
        files = CheckpointFolder(folder)
        files.remove(step for step in files.steps() if step > newest)
        files.remove_unfinished()
        save(folder, 300, keep=1, token="4567abcd")
        assert load(folder) == NEXT
        assert [path.name for path in folder.iterdir()] == ["step-000000300"], "leftovers"
    last_old = max(at for at, loaded in enumerate(found) if loaded == OLD)
    assert found == [OLD] * (last_old + 1) + [NEW] * (len(found) - last_old - 1)
    assert NEW in found


def test_a_rank_has_done_all_when_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 may rename the folder as soon as the last word is there."""
    files = CheckpointFolder(tmp_path)
    unfinished = files.begin(100, "0123abcd")
    unfinished.write_part(0, {SHARED: {}})
    rename = os.rename

    def rename_and_finish(source: Path, target: Path) -> None:
        rename(source, target)
        if Path(target).name == "part-1.json":
            files.finish(unfinished, RANKS, keep=1)

    monkeypatch.setattr(os, "rename", rename_and_finish)
    unfinished.write_part(1, {part_name(1): {}})
    assert files.steps() == [100]


def test_the_newest_ones_stay(tmp_path: Path) -> None:
    for step in range(100, 700, 100):
        save(tmp_path, step, keep=2)
    assert CheckpointFolder(tmp_path).steps() == [600, 500]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000000500", "step-000000600"]


def test_some_ranks_have_left(tmp_path: Path) -> None:
    """The parts of the others make it; what was left of the one before goes."""
    files = CheckpointFolder(tmp_path)
    for step, token in ((50, "0123abcd"), (60, "89abcdef"), (0, "0123abcd")):
        files.begin(step, token).path.mkdir()
    unfinished = files.begin(100, "0123abcd")
    unfinished.write_part(1, {part_name(1): {"own": 1}, SHARED: {"value": 3}})
    for rank in (2, 3):
        unfinished.write_part(rank, {part_name(rank): {"own": rank}})
    assert unfinished.missing([1, 2, 3]) == []
    left = [(0, 7), (3, 9)]
    files.finish(unfinished, 4, keep=1, without=[3], left=left)  # 3 has not pushed all of 100
    files.remove_older(unfinished)
    found = files.open(100)
    assert (found.ranks, found.world_size, found.is_whole) == ((1, 2), 4, False)
    assert found.left == tuple(left)
    assert [found.source_rank(rank, 4) for rank in range(4)] == [None, 1, 2, None]
    assert [found.source_rank(rank, 3) for rank in range(3)] == [1, 2, None]
    assert found.read(part_name(2)) == {"own": 2}
    with pytest.raises(ConfigError, match="has no rank-3"):
        found.rank_part(3)
    stay = ["step-000000100", "unfinished-000000000-0123abcd", "unfinished-000000060-89abcdef"]
    assert sorted(path.name for path in tmp_path.iterdir()) == stay
    files.finish(unfinished, 4, keep=1)  # one that was taken for lost, and has all parts, too
    assert files.open(100).left == tuple(left)


def test_others_files_stay(tmp_path: Path) -> None:
    for name in ("step-1", "step-000000100.bak", "notes.txt"):
        (tmp_path / name).touch()
    save(tmp_path, 100, keep=1)
    save(tmp_path, 200, keep=1)
    CheckpointFolder(tmp_path).remove_unfinished()
    assert len(list(tmp_path.iterdir())) == 4
    assert load(tmp_path) == NEW


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, tuple[Any, str]] = {
    "shorter": (truncate, r"shared\.pt has \d+ bytes, and had \d+"),
    "one bit": (flip, r"shared\.pt has other contents than were written"),
    "gone": (Path.unlink, r"shared\.pt cannot be read: No such file"),
}


@pytest.mark.parametrize("damage", sorted(DAMAGES))
def test_the_one_before_a_damaged_one_is_taken_and_that_is_said(
    tmp_path: Path, damage: str
) -> None:
    save(tmp_path, 100)
    save(tmp_path, 200)
    change, says = DAMAGES[damage]
    change(tmp_path / "step-000000200" / SHARED)
    told: list[str] = []
    found = CheckpointFolder(tmp_path).newest(told.append)
    assert found is not None
    assert found.step == 100
    assert len(told) == 1
    assert re.match(rf"the checkpoint of step 200 is damaged, .*{says}", told[0])


def test_none_is_whole(tmp_path: Path) -> None:
    save(tmp_path, 100)
    truncate(tmp_path / "step-000000100" / INDEX)
    told: list[str] = []
    assert CheckpointFolder(tmp_path).newest(told.append) is None
    assert len(told) == 1
    assert CheckpointFolder(tmp_path / "nothing").newest(told.append) is None
    assert len(told) == 1


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "another file": ({"files": {"../x.pt": {"bytes": 1, "sha256": ""}}}, "names '../x.pt'"),
    "an absolute one": ({"files": {"/x.pt": {"bytes": 1, "sha256": ""}}}, "names '/x.pt'"),
    "another step": ({"step": 7}, "says format 1 and step 7"),
    "a later format": ({"format": 2}, "says format 2 and step 100"),
    "something more": ({"more": 2}, "cannot be read"),
    "no number": ({"world_size": "two"}, "cannot be read"),
    "no ranks": ({"world_size": 0}, "cannot be read .*world_size"),
    "less than none": ({"world_size": -1}, "cannot be read .*world_size"),
    "too many": ({"world_size": 10**18}, "cannot be read .*world_size"),
    "a rank too many": ({"ranks": [0, 2]}, r"names ranks \[0, 2\], and world_size is 2"),
    "a rank twice": ({"ranks": [1, 1]}, r"names ranks \[1, 1\]"),
    "one that left too many": ({"left": [[7, 1]]}, r"names ranks \[7\]"),
}


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_an_index_that_is_none_of_ours(tmp_path: Path, name: str) -> None:
    save(tmp_path, 100)
    path = tmp_path / "step-000000100" / INDEX
    change, says = CHANGES[name]
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=says):
        CheckpointFolder(tmp_path).open(100)


def test_only_data_is_read(tmp_path: Path) -> None:
    """An object that would run code is an error."""
    files = CheckpointFolder(tmp_path)
    unfinished = files.begin(100, "0123abcd")
    unfinished.write_part(0, {SHARED: {"value": Path("x")}})
    files.finish(unfinished, 1, keep=1)
    found = files.newest(lambda _: None)
    assert found is not None
    with pytest.raises(ConfigError, match=r"shared\.pt cannot be read"):
        found.read(SHARED)
    with pytest.raises(ConfigError, match=r"has no rank-0\.pt"):
        found.rank_part(0)


def model_in(found: Checkpoint) -> Any:
    return found.session(SHARED, 0)


def own_in(found: Checkpoint) -> Any:
    return found.rank_part(0), found.session(part_name(0), 0)


NOW = {"random": {}, "generators": [], "epoch": None}
POSITION = {"epoch": 0, "batches": 0, "begun": False, "beginning": {}, "now": NOW, "loader": {}}
OWN = {"objects": {}, "position": POSITION}
OPTIMIZER = {"state": {}, "param_groups": []}
WHOLE = {"step": 100, "sessions": [{"model": {}, "optimizer": OPTIMIZER}]}
LACKS = "Object missing required field"
FOREIGN: dict[str, tuple[Any, Callable[[Checkpoint], Any], str]] = {
    "a list": ([], model_in, "Expected `object`, got `array`"),
    "no buffers": (
        {**OWN, "sessions": [{"residuals": {}}]},
        own_in,
        f"{LACKS} `buffers` - at `$.sessions[0]`",
    ),
    "no list": ({"step": 100, "sessions": {}}, model_in, "Expected `array`, got `object` - at"),
    "no model": (
        {"step": 100, "sessions": [{"optimizer": OPTIMIZER}]},
        model_in,
        f"{LACKS} `model` - at `$.sessions[0]`",
    ),
    "no position": ({"objects": {}, "sessions": []}, own_in, f"{LACKS} `position`"),
    "no sessions": (OWN, own_in, f"{LACKS} `sessions`"),
    "an epoch before the first": (
        {**OWN, "sessions": [], "position": {**POSITION, "epoch": -1}},
        own_in,
        "Expected `int` >= 0 - at `$.position.epoch`",
    ),
    "a pass that began nowhere": (
        {**OWN, "sessions": [], "position": {**POSITION, "begun": True}},
        own_in,
        "a pass has begun, and nothing says how - at `$.position`",
    ),
    "no random numbers": (
        {
            **OWN,
            "sessions": [],
            "position": {**POSITION, "now": {**NOW, "random": {"python": [3, [1], None]}}},
        },
        own_in,
        "no random numbers (ValueError('state vector is the wrong size')) - at `$.position.now`",
    ),
}


@pytest.mark.parametrize("name", sorted(FOREIGN))
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, name: str) -> None:
    """The file's sums are right, so no disk has done it."""
    content, read, says = FOREIGN[name]
    file = SHARED if read is model_in else part_name(0)
    files = CheckpointFolder(tmp_path)
    unfinished = files.begin(100, "0123abcd")
    unfinished.write_part(0, {SHARED: {}, file: content})
    files.finish(unfinished, 1, keep=1)
    found = files.newest(lambda _: None)
    assert found is not None
    with pytest.raises(ConfigError) as raised:
        read(found)
    where = f"{found.path / file} is not as foreprop writes it ("
    assert str(raised.value).startswith(f"{where}{says}")
    assert "and its sums are right" in str(raised.value)
    assert f"Remove the folder {found.path}; then" in str(raised.value)


def test_a_session_that_is_not_there(tmp_path: Path) -> None:
    files = CheckpointFolder(tmp_path)
    unfinished = files.begin(100, "0123abcd")
    unfinished.write_part(0, {SHARED: WHOLE})
    files.finish(unfinished, 1, keep=1)
    assert files.open(100).session(SHARED, 0) == WHOLE["sessions"][0]  # type: ignore[index]
    with pytest.raises(ConfigError, match=r"shared\.pt is of 1 session, and .* number 2"):
        files.open(100).session(SHARED, 1)
