"""`foreprop.checkpoint` and `parallelize(..., resume=folder)`: a training goes on to the bit.

The lowest rank that is here saves what is alike on all ranks: as a ``state_dict()`` has it, where
servers update, too. Each saves its own buffers, and what lossy codecs have kept back (residuals).
All ranks go on from the newest checkpoint that is whole. Model and optimizer are loaded before the
session connects, for rank 0's become everybody's; the rest afterwards. A checkpoint may have
several sessions: they are told apart by their order.
"""

from __future__ import annotations

import atexit
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch

from foreprop.config import LOGGER, Config
from foreprop.engine.rendezvous import Board, decode_entry
from foreprop.engine.world import World
from foreprop.errors import ConfigError
from foreprop.quantities import counted
from foreprop.session import lifetime
from foreprop.session.alone import LoneSession, open_lone_sessions
from foreprop.session.loop import CheckpointedLoop, copied
from foreprop.session.session import ConnectedSession, Session
from foreprop.session.stored import SHARED, Checkpoint, CheckpointFolder, check_loaded, part_name
from foreprop.session.training import Training
from foreprop.session.writing import SavedSession

State = dict[str, Any]
Owner = Any  # a `Training`, or a `LoneSession`

_MADE_BY = "optimizer class"
_loops: weakref.WeakKeyDictionary[Owner, int] = weakref.WeakKeyDictionary()
"""How many loops each session has had."""


def checkpoint(
    folder: str | os.PathLike[str],
    *,
    every: int,
    loader: Any = None,
    keep: int = 3,
    session: Session | Sequence[Session] | None = None,
    **objects: Any,
) -> CheckpointedLoop:
    """Save the whole training now and then, and go on from there after `parallelize(resume=...)`.

        loop = foreprop.checkpoint("run1", every=500, loader=loader, schedule=schedule)
        for epoch in loop.epochs(10):
            for x, y in loop:
                ...

    What goes on is bit-identical to what would have been without a stop. Call it on every rank,
    after `parallelize` and before the loop. On a worker that joins an elastic session it goes on
    where the others' loops are. docs/checkpoints.md says what is saved.

    Args:
        folder: on storage that all machines share; made if it is not there.
        every: optimizer steps between two checkpoints.
        loader: what the loop iterates over, as `foreprop.shard` returned it.
        keep: how many checkpoints stay; older ones are removed.
        session: by default the one that is open; several in the order of their `parallelize`.
        **objects: whatever has ``state_dict`` and ``load_state_dict``: schedulers, a scaler.

    Raises:
        ConfigError: a setting or object that cannot be used, a folder that not all ranks see, or
            that has another training's checkpoints.
    """
    _check_count("every", every)
    _check_count("keep", keep)
    sessions = _open_sessions() if session is None else session
    sessions = list(sessions) if isinstance(sessions, (list, tuple)) else [sessions]
    if not sessions:
        raise ConfigError("session is an empty list; name those that are to be saved")
    return CheckpointedLoop(
        CheckpointFolder(folder),
        [_snapshots_of(one) for one in sessions],
        loader,
        objects,
        every=every,
        keep=keep,
    )


def _check_count(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} is {value!r}; it must be a whole number of at least 1")


def _open_sessions() -> list[Any]:
    here = threading.get_ident()
    found: list[Any] = [life for life in list(lifetime._open) if life.thread_id == here]
    found += [one for one in open_lone_sessions if not one._closed]
    if len(found) != 1:
        which = "none is" if not found else f"{len(found)} are"
        raise ConfigError(
            f"foreprop.checkpoint() saves the session that is open here, and {which}: call it after"
            " parallelize(), and with several models say session=[first, second], in the order of"
            " their parallelize()"
        )
    return found


def _snapshots_of(session: Any) -> SavedSession:
    if isinstance(session, LoneSession):
        return LoneSnapshots(session, origin_of(session))
    life = session._training.life if isinstance(session, ConnectedSession) else session
    if not isinstance(life, lifetime.Lifetime):
        raise ConfigError(
            f"session is a {type(session).__name__}; give what parallelize() returned"
        )
    training = life._training
    number = _loops[training] = _loops.get(training, 0) + 1
    return ConnectedSnapshots(training, origin_of(training), number)


def buffers_of(model: torch.nn.Module) -> State:
    """A copy of all buffers, also of those that no ``state_dict()`` has."""
    return {name: copied(buffer) for name, buffer in model.named_buffers()}


def load_buffers(model: torch.nn.Module, saved: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in saved:
                buffer.copy_(saved[name])


def load_model_and_optimizer(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, saved: State, where: Path
) -> None:
    """Load what is alike on all ranks; raises `ConfigError` if it is another model's."""
    try:
        if optimizer is not None:  # another one's state would fit now, and not, or silently, later
            name, made_by = type(optimizer).__name__, saved.get(_MADE_BY)
            if made_by not in (None, name):  # None: of a foreprop that did not save it
                raise ConfigError(f"it was made with {made_by}, and the optimizer is {name}")
        values: Mapping[str, Any] = saved.get("masters") or saved["model"]
        for name, full in saved.get("masters", {}).items():
            if full.shape != saved["model"][name].shape:
                raise ValueError(f"{name} has two shapes in it")
        missing, unexpected = model.load_state_dict(values, strict=False)
        remote = {name for name, value in model.state_dict().items() if _is_meta(value)}
        if lost := [*(set(missing) - remote), *unexpected]:
            raise ConfigError(f"they differ in {sorted(lost)}")
        if optimizer is not None:
            optimizer.load_state_dict(saved["optimizer"])
            check_loaded(optimizer)
    except Exception as error:  # torch's are of many kinds
        raise ConfigError(
            f"the checkpoint {where} is of another model or optimizer: {error}"
        ) from error


def _is_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta


class ConnectedSnapshots(SavedSession):
    """A session of several processes, or one with servers; ``number`` says which loop of it."""

    def __init__(self, training: Training, resumed: Checkpoint | None, number: int) -> None:
        if training.stepped and not training.completed:  # there is nothing to step
            raise ConfigError("parallelize() was given no optimizer, whose steps are counted here")
        self.rank, self.world_size = training.world.rank, training.world.size
        self.timeout_s = training.config.step_timeout_s
        self.report_s = training.config.stall_report_s
        self.resumed = resumed
        self.name = f"{training.first_session_id}/{number}"
        self.is_elastic = training.config.elastic
        self.joined_at = training.composition.first_step
        self._training = training
        self._number = number

    @property
    def before(self) -> int:
        return self._training.completed_before

    @property
    def step(self) -> int:
        return self._training.completed_before + self._training.completed

    def meet(self) -> None:
        self._training.composition.meet("a checkpoint")

    def failed(self) -> bool:
        return self._training.backends.failed

    def present(self, step: int) -> Sequence[int]:
        view = self._training.backends.view
        return range(self.world_size) if view is None else view.present(step - self.before)

    def left_before(self, step: int) -> Sequence[int]:
        view = self._training.backends.view
        return () if view is None else view.left_before(step - self.before)

    def is_settled(self) -> bool:
        view = self._training.backends.view
        return view is None or view.is_settled()

    def left(self) -> Sequence[tuple[int, int]]:
        changes = () if (view := self._training.backends.view) is None else view.known()
        return [(each.rank, each.step) for each in changes if not each.joins]

    def coming(self) -> Sequence[int]:
        view = self._training.backends.view
        return () if view is None else view.coming()

    def numbers(self) -> list[dict[str, Any]]:
        groups = self._training.user.optimizer.param_groups
        return [
            {name: copied(value) for name, value in group.items() if name != "params"}
            for group in groups
        ]

    def join(self, before: int, numbers: Sequence[Mapping[str, Any]]) -> None:
        self._training.resumed_at = before - self._training.completed_before
        self._training.completed_before = before
        if (view := self._training.backends.view) is not None:
            view.changes()  # from now on it knows who had left before it came
        groups = self._training.user.optimizer.param_groups
        for group, others in zip(groups, numbers, strict=True):
            group.update(others)

    def raise_if_failed(self) -> None:
        self._training.backends.raise_if_failed()

    def exchange(self, name: str, mine: str, what: str) -> list[str]:
        board = self._training.board(f"checkpoint/{self._number}")
        return board.exchange(name, mine, what)

    def at_end(self, function: Callable[[], None]) -> None:
        self._training.life.add_undo(function)

    def at_early_end(self, function: Callable[[Sequence[int]], None]) -> None:
        if (view := self._training.backends.view) is not None:
            view.on_end.append(function)

    def own_state(self) -> State:
        training = self._training
        return {
            "buffers": buffers_of(training.user.model),
            "residuals": training.composition.checkpoints.state_dict()["residuals"],
        }

    def shared_state(self) -> State:
        training = self._training
        optimizer = training.user.optimizer
        with training.composition.checkpoints.tables_left_out():
            values = training.user.model.state_dict()
            remote = {name for name, value in values.items() if _is_meta(value)}
            state: State = {"model": copied(values), "optimizer": copied(optimizer.state_dict())}
            state[_MADE_BY] = type(optimizer).__name__
            if training.config.wire_dtype is not None or training.config.compression is not None:
                # workers may see less of the parameters than servers have
                masters = training.composition.checkpoints.master_state_dict()
                if not all(
                    torch.equal(values[name], value)
                    for name, value in masters.items()
                    if isinstance(values[name], torch.Tensor) and not values[name].is_meta
                ):
                    state["masters"] = masters
            if training.config.ema is not None:
                state["ema"] = training.composition.checkpoints.ema_state_dict()
        for name in ("model", "masters", "ema"):  # tables have files of their own
            for table in remote & state.get(name, {}).keys():
                del state[name][table]
        return state

    def save_tables(self, folder: Path) -> None:
        if self._training.remote is not None:
            self._training.composition.checkpoints.tables.save(folder)


def _averages_in(saved: State, config: Config, where: Path) -> State | None:
    # logs it where averages are wanted and were not saved, or the other way round
    if ("ema" in saved) != (config.ema is not None):
        kept = "they begin with the parameters" if config.ema is not None else "they are dropped"
        has = "has" if "ema" in saved else "has no"
        LOGGER.warning(
            "the checkpoint %s %s moving averages, and ema=%s: %s", where, has, config.ema, kept
        )
        return None
    return saved.get("ema")


def resume_connected(training: Training, found: Checkpoint, number: int) -> None:
    """Go on with what is loaded after connecting; ``number`` is that of the session."""
    saved = found.session(SHARED, number)
    model, checkpoints = training.user.model, training.composition.checkpoints
    if training.config.wire_dtype is not None and "masters" in saved:

        def shown_and_full() -> tuple[State, State]:
            # few ask before the first step, and nobody needs memory for it later
            again = found.read(SHARED)["sessions"][number]
            return again["model"], again["masters"]

        checkpoints.begin_rounded(saved["model"], shown_and_full)
    source_rank = found.source_rank(training.world.rank, training.world.size)
    mine = found.ranks[0] if source_rank is None else source_rank
    own = found.session(part_name(mine), number)
    parts = [own]
    if training.config.compression is not None:
        parts = [
            own if rank == mine else found.session(part_name(rank), number) for rank in found.ranks
        ]
    with found.used(part_name(mine)):
        checkpoints.load_state_dict(parts)
    averages = _averages_in(saved, training.config, found.path)
    if averages is not None:
        with checkpoints.tables_left_out(), found.used(SHARED):
            checkpoints.load_ema_state_dict(averages)
    if training.remote is not None:
        if (tables := found.tables(number)) is None:
            raise ConfigError(
                f"the checkpoint {found.path} has no remote tables, and this model has: give"
                " parallelize(..., resume=...) the folder of this model, or load_tables() yourself"
            )
        checkpoints.tables.load(tables)
    # last: whoever uses a state_dict() is shown rank 0's
    with found.used(part_name(mine)):
        load_buffers(model, own["buffers"])
    training.buffers.forget_shown()
    training.resumed_at = found.step
    training.completed_before += found.step


class LoneSnapshots(SavedSession):
    """A world of one, whose model and optimizer are plain PyTorch's."""

    def __init__(self, session: LoneSession, resumed: Checkpoint | None) -> None:
        if session._optimizer is None:
            raise ConfigError("parallelize() was given no optimizer, whose steps are counted here")
        self.resumed = resumed
        self._session = session
        self.name = secrets.token_hex(8)
        session.metrics()  # from now on its steps are counted

    @property
    def before(self) -> int:
        return 0 if self.resumed is None else self.resumed.step

    @property
    def step(self) -> int:
        return self.before + int(self._session.stats()["steps"])

    def at_end(self, function: Callable[[], None]) -> None:
        self._session._at_end.append(function)
        atexit.register(self._session.close)

    def own_state(self) -> State:
        return {"buffers": buffers_of(self._session._model), "residuals": {}}

    def shared_state(self) -> State:
        session = self._session
        state: State = {"model": copied(session._model.state_dict())}
        if session._optimizer is not None:
            state["optimizer"] = copied(session._optimizer.state_dict())
            state[_MADE_BY] = type(session._optimizer).__name__
        if session.config.ema is not None:
            state["ema"] = session.ema_state_dict()
        return state


def resume_alone(session: LoneSession, found: Checkpoint, number: int) -> None:
    lowest = part_name(found.ranks[0])  # rank 0 may have left an elastic session
    own = found.session(lowest, number)
    with found.used(lowest):
        load_buffers(session._model, own["buffers"])
    saved = found.session(SHARED, number)
    averages = _averages_in(saved, session.config, found.path)
    if averages is not None:
        with found.used(SHARED):
            session.load_ema_state_dict(averages)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a session has been told to go on from; ``found`` is None if the folder was empty."""

    folder: Path
    thread_id: int
    found: Checkpoint | None


_origins: weakref.WeakKeyDictionary[Owner, Origin] = weakref.WeakKeyDictionary()


def origin_of(owner: Owner) -> Checkpoint | None:
    origin = _origins.get(owner)
    return None if origin is None else origin.found


def resumed(
    folder: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    config: Config,
    make: Callable[[World | None], Session],
    *,
    world: World | None,
) -> Session:
    """The session that ``make`` makes, gone on from the folder's newest checkpoint.

    ``world``: None for a world of one that has no servers.
    """
    path, here = Path(folder), threading.get_ident()
    number = sum(  # how many open sessions of this thread go on from it: their order counts
        origin.folder == path and origin.thread_id == here
        for owner, origin in _origins.items()
        if not (owner._closed if isinstance(owner, LoneSession) else owner.life.closed)
    )
    found = _load_newest(path, number, model, optimizer, config, world)
    session = make(world)
    owner: Owner = session._training if isinstance(session, ConnectedSession) else session
    _origins[owner] = Origin(path, here, found)
    try:  # what is each rank's own, and what only servers have
        if found is not None:
            resume = resume_alone if world is None else resume_connected
            resume(owner, found, number)
    except BaseException as error:
        session.__exit__(type(error), error, error.__traceback__)
        raise
    return session


class Newest(msgspec.Struct, frozen=True):
    """What rank 0 has found; a step of -1: nothing."""

    step: Annotated[int, msgspec.Meta(ge=-1, lt=10**15)] = -1
    error: Annotated[str, msgspec.Meta(max_length=1000)] = ""


def _load_newest(
    path: Path,
    number: int,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    config: Config,
    world: World | None,
) -> Checkpoint | None:
    """Load model and optimizer from the newest checkpoint; raises `ConfigError` on all ranks."""
    folder, is_first, board = CheckpointFolder(path), world is None or world.rank == 0, None
    if world is not None:
        world.limit_store(config)
        key = f"resume/{world.sessions}"  # of the session that is about to begin
        timeout_s, report_s = config.join_timeout_s, config.stall_report_s
        board = Board(world, key, timeout_s=timeout_s, report_s=report_s)

    def exchange(name: str, mine: str) -> list[str]:
        return [mine] if board is None else board.exchange(name, mine, "part of the checkpoint")

    own = Newest()
    if is_first:  # which checks every byte
        try:
            whole = folder.newest(lambda text: LOGGER.warning("%s", text))
            own = own if whole is None else Newest(step=whole.step)
        except OSError as error:
            text = f"the folder of checkpoints {path} cannot be read: {error}"
            own = Newest(error=text[:1000])
    said = exchange("newest", msgspec.json.encode(own).decode())[0]
    newest: Newest = decode_entry(said, Newest, "rank 0's newest checkpoint")
    if newest.error:
        raise ConfigError(newest.error)
    if newest.step < 0:
        if is_first:
            LOGGER.info("there is no checkpoint in %s yet: the training begins", path)
        return None
    wrong = ""
    try:
        found = folder.open(newest.step)
        size = 1 if world is None else world.size
        made = f"{counted(found.world_size, 'rank')} made"
        if not found.is_whole:
            made = f"rank {', '.join(map(str, found.ranks))} of {found.world_size} made"
        more = f", which {made}: {size} do not make the same bits"
        more = more if size != found.world_size or not found.is_whole else ""
        if is_first:
            LOGGER.info("goes on from step %d in %s%s", found.step, path, more)
        load_model_and_optimizer(model, optimizer, found.session(SHARED, number), found.path)
    except ConfigError as failed:
        wrong = str(failed)
    for rank, text in enumerate(exchange("loaded", wrong)):
        if text:
            raise ConfigError(text if board is None else f"rank {rank}: {text}")
    return found
