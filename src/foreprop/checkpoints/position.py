"""Where in its data a training is: the epoch, and the batches of it that have been used.

A loader has more state than anybody can see: orders that are drawn as they are read, batches that
are loaded ahead, random numbers within samples. So a pass is gone on with by beginning it as it was
begun, with the random numbers of then, and reading again what was read. A loader that has a
``state_dict`` of its own (torchdata's) is asked for that instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from foreprop.checkpoints.randomstates import (
    generators_of,
    random_states,
    restore_generators,
    restore_random_states,
    states_of,
)
from foreprop.errors import ConfigError
from foreprop.quantities import counted

State = dict[str, Any]


class LoaderPosition:
    """Of one training loop. Training thread."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.epoch = 0
        """The one that is under way, or the next one."""
        self.batches = 0
        """Used in this epoch."""
        self._begun = False
        self._passes = 0  # begun in this epoch
        self._beginning: State = {}
        self._saved: State | None = None
        """From where the next pass goes on."""
        self._between: State | None = None
        """What the training has gone on from, if that was between two epochs."""
        self._parts: list[str] = []
        """Of the pass under way: what was read before of it, when it was dealt otherwise."""
        self._before = 0
        """Batches of this epoch that were used before the last one of those had ended."""
        self._joins = False
        """Whether the next pass is one that others are in."""

    # To be saved, and restored.
    def state(self) -> State:
        """Between two batches, or two epochs."""
        own = self._has_own_state
        state = {
            "epoch": self.epoch,
            "batches": self.batches,
            "begun": self._begun,
            "beginning": self._beginning if self._begun and not own else {},
            "now": self._now(),
            "loader": self.loader.state_dict() if self._begun and own else {},
        }
        if self._begun:
            state |= {"parts": self._parts, "before": self._before}
            state["deal"] = _dealt_parts().maybe_part(self.loader) if _may_be_dealt() else None
        return state

    def _now(self) -> State:
        return {
            "random": random_states(),
            "generators": states_of(generators_of(self.loader)),
            "epoch": _epoch_of(self.loader),
        }

    @property
    def _has_own_state(self) -> bool:
        return hasattr(self.loader, "state_dict") and hasattr(self.loader, "load_state_dict")

    def restore(
        self,
        state: State,
        *,
        saved_by: int,
        world_size: int,
        is_whole: bool = True,
        left: Sequence[tuple[int, int]] = (),
        dealt_by: Callable[[], State] | None = None,
    ) -> str | None:
        """Go on from there; with another number of ranks, from about there. Returns a notice.

        No sample of the epoch is left out then. At most a batch of each rank comes twice; none, if
        an elastic session was saved, which knows who has read what. Of that are ``is_whole``,
        whether all ranks were there, ``left``, within which step others have left, and
        ``dealt_by``, the state of the one rank whose dealing all go on with.
        """
        self.epoch, self.batches = state["epoch"], state["batches"]
        self._parts, self._before = state.get("parts", []), state.get("before", 0)
        notice, deal = None, state.get("deal")
        is_alike = saved_by == world_size
        if deal is not None and is_alike:
            is_alike = is_whole and _dealt_parts().is_shared_by_all(deal)
        if not is_alike:
            state = _with_epochs(state)
            if deal is not None and 1 not in (saved_by, world_size):
                notice = self._deal_anew(state, dealt_by() if dealt_by else state, left)
            elif state["begun"]:
                notice = self._divide(state, saved_by, world_size)
        self._saved = state
        self._between = None if state["begun"] else state["now"]
        if self._between is not None:
            self._saved = None
            self.be_between()
        return notice

    def be_between(self) -> None:
        """The loop begins: after a checkpoint between epochs, what it draws is as it was then."""
        if (now := self._between) is not None:
            restore_generators(generators_of(self.loader), now["generators"])
            _set_epoch(self.loader, now["epoch"])
            restore_random_states(now["random"])

    def _divide(self, state: State, saved_by: int, world_size: int) -> str:
        if state["loader"]:
            raise ConfigError(
                f"the checkpoint was made by {counted(saved_by, 'rank')} in the middle of an"
                " epoch, with a loader that saves its own position, which nobody can divide among"
                f" {world_size}: go on with {counted(saved_by, 'rank')}, or from a checkpoint"
                " between epochs"
            )
        if 1 in (saved_by, world_size):  # whose loader draws another order
            self.batches, self._before, self._parts = 0, 0, []
        else:
            read = (state["batches"] - self._before) * saved_by // world_size
            self.batches = self._before + read
        state |= {"batches": self.batches, "divided": True}
        return self._describe_division()

    def _deal_anew(self, state: State, dealt: State, left: Sequence[tuple[int, int]]) -> str:
        """What nobody has read of the epoch, among those who are here now."""
        part = _dealt_parts().with_left(dealt["deal"], left)
        self._parts, self._before = [*dealt["parts"], part], self.batches
        generators = dealt["beginning"]["generators"]
        state["beginning"] = {**state["beginning"], "generators": generators}
        return self._describe_division()

    def _describe_division(self) -> str:
        where = f"batch {self.batches} of " if self.batches else ""
        return f"samples are divided anew from {where}epoch {self.epoch} on"

    def join(self, state: State) -> None:
        """A newcomer: go on where the others are; its loader has been told which pass that is."""
        self.epoch, self.batches = state["epoch"], state["batches"]
        if state["begun"]:
            self._parts, self._before, self._joins = state["parts"], state["before"], True
        else:
            _dealt_parts().begin_epoch(self.loader, state["now"]["epoch"])

    # A pass.
    def begin(self) -> Iterator[Any]:
        """The batches of this epoch that have not been used."""
        if self._passes and self._saved is None:
            self.end()
        self._passes += 1
        saved, self._saved, self._between = self._saved, None, None
        self._begun = True
        if saved is None:
            if not self._joins:
                self.batches, self._before, self._parts = 0, 0, []
            self._joins = False
            self._beginning = self._now()
            return self._first_batch_on()
        self._beginning = saved["beginning"]
        if saved["loader"]:
            try:
                self.loader.load_state_dict(saved["loader"])
            except Exception as error:  # whatever the user's loader makes of it
                raise ConfigError(f"loader cannot go on from the checkpoint: {error!r}") from error
            _set_epoch(self.loader, saved["now"]["epoch"])
            batches = self._first_batch_on()
        else:
            batches = self._read_again(saved)
        restore_random_states(saved["now"]["random"])
        return batches

    def _first_batch_on(self) -> Iterator[Any]:
        if self._parts:
            _dealt_parts().go_on_after(self.loader, self._parts)
        batches: Iterator[Any] = iter(self.loader)
        return batches

    def _read_again(self, saved: State) -> Iterator[Any]:
        beginning, exact = saved["beginning"], "divided" not in saved
        restore_generators(generators_of(self.loader), beginning["generators"])
        _set_epoch(self.loader, beginning["epoch"])
        restore_random_states(beginning["random"])
        batches = self._first_batch_on()
        for number in range(saved["batches"] - self._before):
            if next(batches, self) is not self:
                continue
            if exact:
                raise ConfigError(
                    f"the checkpoint is after {counted(saved['batches'], 'batch')} of epoch"
                    f" {self.epoch}, and the loader has only {number} now: give it the data and the"
                    " batch size that it had"
                )
            break
        return batches

    def end(self) -> None:
        """The epoch is over, with all that belongs to it."""
        self.epoch += 1
        self.batches = self._passes = self._before = 0
        self._parts = []
        self._begun = False
        self._beginning = {}


def _may_be_dealt() -> bool:
    """Whether there is an elastic session: no other one loads that."""
    return "foreprop.elastic.attendance" in sys.modules


def _dealt_parts() -> Any:
    from foreprop.data import dealtparts

    return dealtparts


def _with_epochs(state: State) -> State:
    """A copy; a loader that counts its passes may have taken the place of one that does not."""
    changed = dict(state)
    for name in ("now", "beginning"):
        if state[name] and state[name]["epoch"] is None:
            changed[name] = {**state[name], "epoch": state["epoch"]}
    return changed


def _epoch_of(loader: Any) -> int | None:
    """Of a loader that counts its passes, as `foreprop.shard`'s do."""
    epoch = getattr(loader, "epoch", None)
    return epoch if isinstance(epoch, int) else None


def _set_epoch(loader: Any, epoch: int | None) -> None:
    if epoch is not None and hasattr(loader, "set_epoch"):
        loader.set_epoch(epoch)
