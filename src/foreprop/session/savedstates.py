"""What a session has for a checkpoint of the whole training, and takes from one.

The lowest rank that is here saves what is alike on all ranks: as a ``state_dict()`` has it, where
servers update, too. Each saves its own buffers, and what lossy codecs have kept back.
"""

from __future__ import annotations

import atexit
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from foreprop.checkpoints.loop import copied
from foreprop.checkpoints.optimizerstates import check_loaded
from foreprop.checkpoints.stored import SHARED, part_name
from foreprop.config import LOGGER
from foreprop.errors import ConfigError

if TYPE_CHECKING:
    from foreprop.checkpoints.stored import Checkpoint
    from foreprop.config import Config
    from foreprop.elastic.attendance import Attendance
    from foreprop.session.alone import LoneSession
    from foreprop.session.training import Training

State = dict[str, Any]

_MADE_BY = "optimizer class"


def buffers_of(model: torch.nn.Module) -> State:
    """A copy, also of those that no ``state_dict()`` has."""
    return {name: copied(buffer) for name, buffer in model.named_buffers()}


def load_buffers(model: torch.nn.Module, saved: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in saved:
                buffer.copy_(saved[name])


def load_model_and_optimizer(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, saved: State, where: Path
) -> None:
    """Raises `ConfigError` for another model's or optimizer's checkpoint. Before connecting."""
    try:
        if optimizer is not None:
            _check_kind(optimizer, saved.get(_MADE_BY))
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


def _check_kind(optimizer: torch.optim.Optimizer, made_by: str | None) -> None:
    """Another one's numbers and states would fit now, and not, or silently, in a step."""
    name = type(optimizer).__name__
    if made_by not in (None, name):  # None: of a foreprop that did not save it
        raise ConfigError(f"it was made with {made_by}, and the optimizer is {name}")


def _is_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta


class ConnectedSnapshots:
    """Of a session of several processes, or of one with servers. Training thread."""

    def __init__(self, training: Training, resumed: Checkpoint | None, number: int) -> None:
        """``number``: which loop of this session it is."""
        if training.stepped and not training.completed:  # there is nothing to step
            raise ConfigError("parallelize() was given no optimizer, whose steps are counted here")
        self.rank, self.world_size = training.world.rank, training.world.size
        self.timeout_s = training.config.step_timeout_s
        self.report_s = training.config.stall_report_s
        self.resumed = resumed
        self.name = f"{training.backends.session_id}/{number}"
        self.is_elastic = training.config.elastic
        self.joined_at: int | None = None
        if training.config.join is not None:
            from foreprop.session.newcomer import joined_at

            self.joined_at = joined_at(training)
        self._training = training
        self._number = number

    @property
    def before(self) -> int:
        return self._training.completed_before

    @property
    def step(self) -> int:
        return self._training.completed_before + self._training.completed

    def meet(self) -> None:
        self._training.meet("a checkpoint")

    def failed(self) -> bool:
        return self._training.backends.failed

    @property
    def _attendance(self) -> Attendance | None:
        """Of a session whose ranks may leave."""
        found = (getattr(each, "members", None) for each in self._training.backends.all)
        notices = (one.notices for one in found if one is not None)
        return next((each.attendance for each in notices if each is not None), None)

    def present(self, step: int) -> Sequence[int]:
        attendance = self._attendance
        if attendance is None:
            return range(self.world_size)
        return attendance.present(step - self._training.completed_before)

    def behind(self, step: int) -> Sequence[int]:
        attendance = self._attendance
        if attendance is None:
            return ()
        return attendance.behind(step - self._training.completed_before)

    def is_settled(self) -> bool:
        return (attendance := self._attendance) is None or attendance.is_settled()

    def left(self) -> Sequence[tuple[int, int]]:
        attendance = self._attendance
        changes = () if attendance is None else attendance.known()
        return [(each.rank, each.step) for each in changes if not each.joins]

    def coming(self) -> Sequence[int]:
        attendance = self._attendance
        return () if attendance is None else attendance.coming()

    def numbers(self) -> list[dict[str, Any]]:
        groups = self._training.user.optimizer.param_groups
        return [
            {name: copied(value) for name, value in group.items() if name != "params"}
            for group in groups
        ]

    def come(self, before: int, numbers: Sequence[Mapping[str, Any]]) -> None:
        self._training.completed_before = before
        if (attendance := self._attendance) is not None:
            attendance.changes()  # from now on it knows who had left before it came
        groups = self._training.user.optimizer.param_groups
        for group, others in zip(groups, numbers, strict=True):
            group.update(others)

    def look(self) -> None:
        self._training.backends.raise_if_failed()

    def exchange(self, name: str, mine: str, what: str) -> list[str]:
        board = self._training.board(f"checkpoint/{self._number}")
        return board.exchange(name, mine, what)

    def at_end(self, function: Callable[[], None]) -> None:
        self._training.life.add_undo(function)

    def at_early_end(self, function: Callable[[Sequence[int]], None]) -> None:
        if (attendance := self._attendance) is not None:
            attendance.on_end.append(function)

    def own_state(self) -> State:
        training = self._training
        return {
            "buffers": buffers_of(training.user.model),
            "residuals": training.checkpoints.state_dict()["residuals"],
        }

    def shared_state(self) -> State:
        training = self._training
        optimizer = training.user.optimizer
        with training.checkpoints.tables_left_out():
            values = training.user.model.state_dict()
            remote = {name for name, value in values.items() if _is_meta(value)}
            state: State = {"model": copied(values), "optimizer": copied(optimizer.state_dict())}
            state[_MADE_BY] = type(optimizer).__name__
            if _may_have_masters(training.config):
                masters = training.checkpoints.master_state_dict()
                if not all(_are_equal(values[name], value) for name, value in masters.items()):
                    state["masters"] = masters
            if training.config.ema is not None:
                state["ema"] = training.checkpoints.ema_state_dict()
        for name in ("model", "masters", "ema"):  # tables have files of their own
            for table in remote & state.get(name, {}).keys():
                del state[name][table]
        return state

    def save_tables(self, folder: Path) -> None:
        if self._training.remote is not None:
            self._training.checkpoints.save_tables(folder)


def _may_have_masters(config: Config) -> bool:
    """Whether workers may see less of the parameters than servers have."""
    return config.wire_dtype is not None or config.compression is not None


def _are_equal(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or _is_meta(one):
        return True
    return torch.equal(one, other)


def _averages_in(saved: State, config: Config, where: Path) -> State | None:
    """None if none are wanted, or were saved, and that is said."""
    if ("ema" in saved) != (config.ema is not None):
        kept = "they begin with the parameters" if config.ema is not None else "they are dropped"
        has = "has" if "ema" in saved else "has no"
        LOGGER.warning(
            "the checkpoint %s %s moving averages, and ema=%s: %s", where, has, config.ema, kept
        )
        return None
    return saved.get("ema")


def resume_connected(training: Training, found: Checkpoint, number: int) -> None:
    """After connecting. ``number``: which session it is."""
    saved = found.session(SHARED, number)
    model, checkpoints = training.user.model, training.checkpoints
    if training.config.wire_dtype is not None and "masters" in saved:
        checkpoints.begin_rounded(saved["model"], lambda: _shown_and_full(found, number))
    whose = found.whose(training.world.rank, training.world.size)
    mine = found.ranks[0] if whose is None else whose
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
        checkpoints.load_tables(tables)
    # last: whoever uses a state_dict() is shown rank 0's
    with found.used(part_name(mine)):
        load_buffers(model, own["buffers"])
    training.buffers.forget_shown()
    training.completed_before += found.step


def _shown_and_full(found: Checkpoint, number: int) -> tuple[State, State]:
    """Read anew: few ask before the first step, and nobody needs room for it later."""
    saved = found.read(SHARED)["sessions"][number]
    return saved["model"], saved["masters"]


class LoneSnapshots:
    """Of a world of one, whose model and optimizer are plain PyTorch's. Training thread."""

    rank = 0
    world_size = 1
    timeout_s = report_s = 0.0
    is_elastic = False
    joined_at: int | None = None

    def __init__(self, session: LoneSession, resumed: Checkpoint | None) -> None:
        if session._optimizer is None:
            raise ConfigError("parallelize() was given no optimizer, whose steps are counted here")
        self.resumed = resumed
        self._session = session
        self.before = 0 if resumed is None else resumed.step
        self.name = secrets.token_hex(8)
        session.metrics()  # from now on its steps are counted

    @property
    def step(self) -> int:
        return self.before + int(self._session.stats()["steps"])

    def meet(self) -> None:
        """There is nobody else."""

    def failed(self) -> bool:
        return False

    def present(self, step: int) -> Sequence[int]:
        return (0,)

    def behind(self, step: int) -> Sequence[int]:
        return ()

    def is_settled(self) -> bool:
        return True

    def left(self) -> Sequence[tuple[int, int]]:
        return ()

    def coming(self) -> Sequence[int]:
        return ()

    def numbers(self) -> list[dict[str, Any]]:
        return []

    def come(self, before: int, numbers: Sequence[Mapping[str, Any]]) -> None:
        """Nobody joins a world of one."""

    def look(self) -> None:
        """There is nothing that others could end."""

    def exchange(self, name: str, mine: str, what: str) -> list[str]:
        return [mine]

    def at_end(self, function: Callable[[], None]) -> None:
        self._session._at_end.append(function)
        atexit.register(self._session.close)

    def at_early_end(self, function: Callable[[Sequence[int]], None]) -> None:
        """Nobody joins a world of one."""

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

    def save_tables(self, folder: Path) -> None:
        """Remote tables make a world of one a session with servers."""


def resume_alone(session: LoneSession, found: Checkpoint, number: int) -> None:
    """``number``: which session it is."""
    lowest = part_name(found.ranks[0])  # rank 0 may have left an elastic session
    own = found.session(lowest, number)
    with found.used(lowest):
        load_buffers(session._model, own["buffers"])
    saved = found.session(SHARED, number)
    averages = _averages_in(saved, session.config, found.path)
    if averages is not None:
        with found.used(SHARED):
            session.load_ema_state_dict(averages)
