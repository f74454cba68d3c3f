"""A folder of checkpoints: at every moment the last complete one can be read.

    step-000000200/     index.json  shared.pt  rank-0.pt  rank-1.pt  tables-0/...
    unfinished-.../     one that is being written, or was when its processes ended

Every rank writes its part into the unfinished folder, and says so by a file that appears in one
step. When all that are here have, the lowest of them (rank 0, unless it has left an elastic
session) adds the index, with the size and SHA-256 of every file, and renames the folder. Everything
is on the disk before the next thing names it. So whoever is killed, or finds the disk full, at
whatever moment, leaves the checkpoints that were there before.

The files hold plain data, which may come from anywhere. Sums say that a file is what was written,
not who wrote it. So each is held to its form when it is read, before anything goes on from it. A
rank's file has what is that rank's alone, and ``shared.pt`` what is alike on all ranks. *Tables*
are the remote ones: they have files of their own, which go with what is shared.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import os
import re
import shutil
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NotRequired, TypedDict, cast

import msgspec
import torch

from foreprop.core.manifest import MOST_PROCESSES
from foreprop.durable import read_regular, sync_folder, write_file
from foreprop.engine.optimizer import why_not_elementwise
from foreprop.errors import ConfigError, ForepropError
from foreprop.quantities import counted
from foreprop.session.position import State, check_generators, check_random_states

# What the files hold.
_MOST = 2**53
Count = Annotated[int, msgspec.Meta(ge=0, le=_MOST)]


class RandomStates(TypedDict):
    """The states from which the next random numbers are drawn."""

    random: dict[str, Any]
    generators: list[torch.Tensor]
    epoch: Count | None


class Beginning(TypedDict, total=False):
    """The `RandomStates` of a pass's start; empty between two passes."""

    random: dict[str, Any]
    generators: list[torch.Tensor]
    epoch: Count | None


class Position(TypedDict):
    """The state of a `session.position.LoaderPosition`."""

    epoch: Count
    batches: Count
    begun: bool
    beginning: Beginning
    now: RandomStates
    loader: dict[Any, Any]
    parts: NotRequired[list[str]]
    before: NotRequired[Count]
    deal: NotRequired[str | None]


class OwnSession(TypedDict):
    buffers: dict[str, torch.Tensor]
    residuals: dict[str, Any]


class OwnPart(TypedDict):
    sessions: list[OwnSession]
    objects: dict[str, Any]
    position: Position


class OptimizerState(TypedDict):
    state: dict[int, dict[str, Any]]
    param_groups: list[dict[str, Any]]


class SharedSession(TypedDict):
    model: dict[str, Any]
    optimizer: OptimizerState
    masters: NotRequired[dict[str, torch.Tensor]]
    ema: NotRequired[dict[str, Any]]


class SharedPart(TypedDict):
    step: Count
    sessions: list[SharedSession]


class LeftState(TypedDict):
    """What members leave for who joins (`session.loop.LoopStates`)."""

    before: Count
    numbers: list[list[dict[str, Any]]]
    objects: dict[str, Any]
    position: Position


_converting = threading.Lock()
"""Held while msgspec first uses a type: two threads at once would end the process."""


def check_form(found: Any, form: Any) -> None:
    """Raise a ValueError that says what is not of this form, and where."""
    try:
        with _converting:
            msgspec.convert(found, type=form)
    except Exception as error:  # msgspec's own, or of a tensor in a mapping's place
        raise ValueError(str(error)) from error
    if isinstance(found, dict) and "position" in found:
        position: Any = found["position"]
        beginning = position["beginning"]
        if beginning and beginning.keys() != position["now"].keys():
            raise ValueError("the beginning of the pass is not whole - at `$.position.beginning`")
        if position["begun"] and not position["loader"] and not beginning:
            raise ValueError("a pass has begun, and nothing says how - at `$.position`")
        for name in ("now", "beginning"):
            if states := position[name]:
                try:
                    check_random_states(states["random"])
                    check_generators(states["generators"])
                except Exception as error:  # whatever torch, numpy and Python make of it
                    raise ValueError(
                        f"no random numbers ({error!r}) - at `$.position.{name}`"
                    ) from error


# An optimizer that was given a checkpoint's state.
def check_loaded(optimizer: torch.optim.Optimizer) -> None:
    """Raise a ValueError for what is no state of the optimizer: torch would fail in a step."""
    for group in optimizer.param_groups:
        for name, usual in optimizer.defaults.items():
            if name not in group or not _is_like(group[name], usual):
                found = f"{group[name]!r:.60}" if name in group else "not there"
                raise ValueError(f"{name} of the optimizer is {found}, and is usually {usual!r}")
    if why_not_elementwise(optimizer) is not None:
        return  # its state may have any form
    for group in optimizer.param_groups:
        usual = _usual_state(optimizer, group)
        for parameter in group["params"]:
            if state := optimizer.state.get(parameter):
                _check_state(state, usual, parameter)
    keys: list[Any] = list(optimizer.state)
    if others := [key for key in keys if not isinstance(key, torch.Tensor)]:
        raise ValueError(f"the optimizer has state of {others[:9]}, which are no parameters")


def _is_like(value: Any, usual: Any) -> bool:
    # whether an optimizer could have been given this number in the other one's place
    if isinstance(usual, tuple | list):
        same = isinstance(value, tuple | list) and len(value) == len(usual)
        return same and all(map(_is_like, value, usual))
    if usual is None or isinstance(usual, bool):
        return value is None or isinstance(value, bool)
    if isinstance(value, torch.Tensor):  # as a learning rate may be
        return isinstance(usual, float | int | torch.Tensor) and value.numel() == 1
    return isinstance(value, float | int if isinstance(usual, float | int) else type(usual))


def _usual_state(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> State:
    # what it keeps of one element; raises whatever it raises for numbers that it does not take
    place = next((each.device for each in group["params"] if not each.is_meta), None)
    element = torch.zeros(1, requires_grad=True, device=place)
    element.grad = torch.zeros_like(element)
    names = inspect.signature(type(optimizer)).parameters.keys() & group.keys()
    scratch = type(optimizer)([element], **{name: group[name] for name in names - {"params"}})
    scratch.step()
    return dict(scratch.state[element])


def _check_state(state: State, usual: State, parameter: torch.Tensor) -> None:
    for name, like in usual.items():
        value: Any = state.get(name)
        if not isinstance(like, torch.Tensor):
            fits = _is_like(value, like)
        else:
            shape = parameter.shape if like.dim() else ()
            fits = isinstance(value, torch.Tensor) and value.shape == shape
        if not fits or (name == "step" and not float(value) >= 0):
            raise ValueError(f"{name} of a parameter of {tuple(parameter.shape)} is {value!r:.60}")


# The folder, and the files in it.
INDEX = "index.json"
SHARED = "shared.pt"
_COMPLETE = re.compile(r"step-(\d{9,15})")
_UNFINISHED = "unfinished-"
_FILE = re.compile(r"(tables-\d+/)?[a-z]+(-\d+)*(-[0-9a-f]{8})?\.(pt|json)")


class StoredFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    bytes: Annotated[int, msgspec.Meta(ge=0)]
    sha256: str


Rank = Annotated[int, msgspec.Meta(ge=0, lt=MOST_PROCESSES)]


class Index(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    format: int
    step: int
    world_size: Annotated[int, msgspec.Meta(ge=1, le=MOST_PROCESSES)]
    files: dict[str, StoredFile]
    ranks: tuple[Rank, ...] = ()
    """The ranks whose parts it has, if not all."""
    left: tuple[tuple[Rank, Annotated[int, msgspec.Meta(ge=0)]], ...] = ()
    """Ranks that had left, each with the step of its session that it left within."""


FORMAT = 1
_MOST_INDEX_BYTES = 1 << 28
_INDEX = msgspec.json.Decoder(Index)
_FILES = msgspec.json.Decoder(dict[str, StoredFile])


class Checkpoint:
    """A complete checkpoint, as found in its folder."""

    def __init__(self, path: Path, index: Index) -> None:
        self.path = path
        self.step = index.step
        self.world_size = index.world_size
        self.ranks = index.ranks or tuple(range(index.world_size))  # whose parts it has
        self.left = index.left
        self._index = index

    def check(self) -> None:
        """Raise a `ConfigError` that names the file which is not what was written."""
        for name, wanted in self._index.files.items():
            path = self.path / name
            try:
                found = _describe(path)
            except OSError as error:
                raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
            if found.bytes != wanted.bytes:
                raise ConfigError(f"{path} has {found.bytes} bytes, and had {wanted.bytes}")
            if found.sha256 != wanted.sha256:
                raise ConfigError(f"{path} has other contents than were written")

    def read(self, name: str, form: Any = dict[str, Any]) -> dict[str, Any]:
        """A file's contents, on the CPU, and nothing but data, of this form.

        Raises `ConfigError`.
        """
        path = self.path / name
        if name not in self._index.files:
            raise ConfigError(f"the checkpoint {self.path} has no {name}")
        try:
            found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        except FileNotFoundError:
            raise ConfigError(
                f"{path} is not there: a checkpoint's folder must be on storage that all machines"
                " share"
            ) from None
        except Exception as error:  # whatever torch makes of a file that is not its own
            raise ConfigError(f"{path} cannot be read: {error}") from error
        try:
            check_form(found, form)
        except ValueError as error:
            raise ConfigError(
                f"{path} is not as foreprop writes it ({error}), and its sums are right, so another"
                f" program wrote it. Remove the folder {path.parent}; then the checkpoint before it"
                " is taken"
            ) from error
        return found

    @contextlib.contextmanager
    def used(self, name: str) -> Iterator[None]:
        """Make every error a `ConfigError` that is raised while what a file has is loaded."""
        try:
            yield
        except ForepropError:
            raise
        except Exception as error:  # of torch, of loaders and codecs, of users' own classes
            raise ConfigError(
                f"{self.path / name} cannot be gone on from ({error!r}): it is of another program,"
                f" or of other settings. Remove the folder {self.path}, or give what it was made"
                " with"
            ) from error

    def rank_part(self, rank: int) -> dict[str, Any]:
        """The part that a rank's loop goes on from; raises `ConfigError`."""
        return self.read(part_name(rank), OwnPart)

    def session(self, name: str, number: int) -> dict[str, Any]:
        """What a file has of the session of this number; raises `ConfigError`."""
        path = self.path / name
        saved = self.read(name, SharedPart if name == SHARED else OwnPart)["sessions"]
        if number >= len(saved):
            raise ConfigError(
                f"{path} is of {counted(len(saved), 'session')}, and this is number {number + 1}"
                " that goes on from it"
            )
        found: dict[str, Any] = saved[number]
        return found

    @property
    def is_whole(self) -> bool:
        return len(self.ranks) == self.world_size

    def source_rank(self, rank: int, world_size: int) -> int | None:
        """The rank whose part this rank goes on from, if there is one.

        In a world of the same size that is its own part; otherwise parts are given out in order.
        """
        if world_size == self.world_size:
            return rank if rank in self.ranks else None
        return self.ranks[rank] if rank < len(self.ranks) else None

    def tables(self, session: int) -> Path | None:
        """The folder of a session's remote tables, if it has some."""
        name = tables_name(session)
        has_some = any(file.startswith(f"{name}/") for file in self._index.files)
        return self.path / name if has_some else None


def part_name(rank: int) -> str:
    return f"rank-{rank}.pt"


def tables_name(session: int) -> str:
    return f"tables-{session}"


class CheckpointFolder:
    """A folder that any number of processes use; only the lowest rank renames and removes."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    # Reading.
    def steps(self) -> list[int]:
        """The steps of the checkpoints that are there, whole or not; the newest one first."""
        names = [path.name for path in self.path.iterdir()] if self.path.is_dir() else []
        found = (_COMPLETE.fullmatch(name) for name in names)
        return sorted((int(match[1]) for match in found if match), reverse=True)

    def open(self, step: int) -> Checkpoint:
        """Raises `ConfigError` if its index cannot be read, or names other files than ours."""
        path = self._complete(step)
        try:
            index = _INDEX.decode(read_regular(path / INDEX, _MOST_INDEX_BYTES))
        except (OSError, ValueError, RecursionError) as error:  # msgspec's are ValueErrors
            raise ConfigError(
                f"{path / INDEX} cannot be read on this machine: {error}; a checkpoint's folder"
                " must be on storage that all machines share"
            ) from error
        if index.format != FORMAT or index.step != step:
            raise ConfigError(
                f"{path / INDEX} says format {index.format} and step {index.step}; this version of"
                f" foreprop reads format {FORMAT}, and the folder's name says step {step}"
            )
        odd = [rank for rank in (*index.ranks, *dict(index.left)) if rank >= index.world_size]
        if odd or list(index.ranks) != sorted(set(index.ranks)):
            raise ConfigError(
                f"{path / INDEX} names ranks {[*index.ranks, *dict(index.left)]}, and world_size is"
                f" {index.world_size}: each once, in order, below that"
            )
        for name in index.files:  # only files of this folder: an index may come from anywhere
            if not _FILE.fullmatch(name):
                raise ConfigError(f"{path / INDEX} names {name!r}, which is no file of ours")
        return Checkpoint(path, index)

    def newest(self, report: Callable[[str], object]) -> Checkpoint | None:
        """The newest checkpoint that is whole; calls ``report`` for each newer one."""
        for step in self.steps():
            try:
                found = self.open(step)
                found.check()
            except ConfigError as error:
                report(
                    f"the checkpoint of step {step} is damaged, and the one before it is taken:"
                    f" {error}"
                )
            else:
                return found
        return None

    def _complete(self, step: int) -> Path:
        return self.path / f"step-{step:09d}"

    # Writing.
    def begin(self, step: int, token: str) -> UnfinishedCheckpoint:
        return UnfinishedCheckpoint(self.path / f"{_UNFINISHED}{step:09d}-{token}", step)

    def finish(
        self,
        unfinished: UnfinishedCheckpoint,
        world_size: int,
        *,
        keep: int,
        without: Collection[int] = (),
        left: Sequence[tuple[int, int]] = (),
    ) -> tuple[int, ...]:
        """Make it complete, when all parts are there, and remove all but the newest ones.

        ``without``: ranks that the values of this step do not count, whatever they have written.
        Returns the ranks whose parts it has.
        """
        complete = self._complete(unfinished.step)
        if complete.exists() and not unfinished.path.exists():
            # by one that had been taken for lost, which had all parts, too
            return self.open(unfinished.step).ranks
        everybody = range(world_size)
        missing = {*unfinished.missing(everybody), *without}
        ranks = tuple(rank for rank in everybody if rank not in missing)
        index = Index(
            format=FORMAT,
            step=unfinished.step,
            world_size=world_size,
            files=unfinished.stored_files(ranks),
            ranks=ranks if missing else (),
            left=tuple(left),
        )
        write_file(unfinished.path / INDEX, lambda file: file.write(msgspec.json.encode(index)))
        sync_folder(unfinished.path)
        if complete.exists():  # a try that was taken to have ended made it
            self.remove([unfinished.step])
        os.rename(unfinished.path, complete)
        sync_folder(self.path)
        self.remove(self.steps()[keep:])
        return ranks

    def remove(self, steps: Iterable[int]) -> None:
        """Remove the complete checkpoints of these steps, each at once as far as anybody sees."""
        for step in steps:
            doomed = self.path / f"{_UNFINISHED}{step:09d}-removed"
            with contextlib.suppress(OSError):  # it is only in the way
                os.rename(self._complete(step), doomed)
            shutil.rmtree(doomed, ignore_errors=True)

    def remove_older(self, newest: UnfinishedCheckpoint) -> None:
        """Remove older unfinished ones of the same training."""
        token = newest.path.name.rpartition("-")[2]
        for path in self.path.glob(f"{_UNFINISHED}*-{token}"):
            step = int(path.name.removeprefix(_UNFINISHED).partition("-")[0])
            if 0 < step < newest.step:
                shutil.rmtree(path, ignore_errors=True)

    def remove_unfinished(self) -> None:
        """Remove what earlier processes have left; none of this training's may be under way."""
        for path in self.path.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(path, ignore_errors=True)


class UnfinishedCheckpoint:
    """A checkpoint that is being written. Each rank writes its own files."""

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        self.step = step

    def write_part(self, rank: int, contents: Mapping[str, Mapping[str, Any]]) -> None:
        """Write files, by name, and then the word that this rank's part is there."""
        self.path.mkdir(parents=True, exist_ok=True)
        stored = {name: self._write(name, content) for name, content in contents.items()}
        if SHARED in contents:
            for path in sorted(self.path.glob("tables-*/*")):
                stored[path.relative_to(self.path).as_posix()] = _describe(path)
        word = self._word(rank)
        unfinished = word.with_suffix(".new")
        write_file(unfinished, lambda file: file.write(msgspec.json.encode(stored)))
        sync_folder(self.path)
        os.rename(unfinished, word)  # last: from now on the folder may be renamed

    def _write(self, name: str, content: Mapping[str, Any]) -> StoredFile:
        digest = _Digest()

        def write(file: BinaryIO) -> None:
            digest.file = file
            torch.save(content, cast("BinaryIO", digest))

        write_file(self.path / name, write)
        return StoredFile(digest.written_bytes, digest.sha256.hexdigest())

    def _word(self, rank: int) -> Path:
        return self.path / f"part-{rank}.json"

    def missing(self, ranks: Iterable[int]) -> list[int]:
        """The ranks whose parts are not there yet."""
        return [rank for rank in ranks if not self._word(rank).exists()]

    def stored_files(self, ranks: Iterable[int]) -> dict[str, StoredFile]:
        found: dict[str, StoredFile] = {}
        for rank in ranks:
            data = self._word(rank).read_bytes()
            found |= _FILES.decode(data)
        return found

    def remove_part(self, rank: int, *, shared: bool) -> None:
        """Remove this rank's part to make room; everything, if that is what is ``shared``."""
        if shared:
            self.remove()
        with contextlib.suppress(OSError):  # it is only in the way
            os.unlink(self.path / part_name(rank))

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


class _Digest:
    """A file for `torch.save` that knows what has been written."""

    file: BinaryIO

    def __init__(self) -> None:
        self.sha256 = hashlib.sha256()
        self.written_bytes = 0

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        self.written_bytes += len(data)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()


def _describe(path: Path) -> StoredFile:
    with open(path, "rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return StoredFile(os.fstat(file.fileno()).st_size, sha256)
