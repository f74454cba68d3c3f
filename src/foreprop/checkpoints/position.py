"""Where in its data a training is: the epoch, and the batches of it that have been used.

A loader has more state than anybody can see: orders that are drawn as they are read, batches that
are loaded ahead, random numbers within samples. So a pass is gone on with by beginning it as it was
begun, with the random numbers of then, and reading again what was read. A loader that has a
``state_dict`` of its own (torchdata's) is asked for that instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from foreprop.checkpoints.randomstates import (
    generators_of,
    random_states,
    restore_generators,
    restore_random_states,
    states_of,
)
from foreprop.errors import ConfigError

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

    # To be saved, and restored.
    def state(self) -> State:
        """Between two batches, or two epochs."""
        own = self._has_own_state
        return {
            "epoch": self.epoch,
            "batches": self.batches,
            "begun": self._begun,
            "beginning": self._beginning if self._begun and not own else {},
            "now": self._now(),
            "loader": self.loader.state_dict() if self._begun and own else {},
        }

    def _now(self) -> State:
        return {
            "random": random_states(),
            "generators": states_of(generators_of(self.loader)),
            "epoch": _epoch_of(self.loader),
        }

    @property
    def _has_own_state(self) -> bool:
        return hasattr(self.loader, "state_dict") and hasattr(self.loader, "load_state_dict")

    def restore(self, state: State, *, saved_by: int, world_size: int) -> str | None:
        """Go on from there; with another number of ranks, from about there. Returns a notice.

        No sample of the epoch is left out then. At most a batch of each rank comes twice.
        """
        self.epoch, self.batches = state["epoch"], state["batches"]
        notice = None
        if saved_by != world_size:
            state = _with_epochs(state)
            notice = self._divide(state, saved_by, world_size) if state["begun"] else None
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
                f"the checkpoint was made by {saved_by} ranks in the middle of an epoch, with a"
                " loader that saves its own position, which nobody can divide among"
                f" {world_size}: go on with {saved_by} ranks, or from a checkpoint between epochs"
            )
        alone = 1 in (saved_by, world_size)  # whose loader draws another order
        self.batches = 0 if alone else state["batches"] * saved_by // world_size
        state |= {"batches": self.batches, "divided": True}
        where = f"batch {self.batches} of " if self.batches else ""
        return f"samples are divided anew from {where}epoch {self.epoch} on"

    # A pass.
    def begin(self) -> Iterator[Any]:
        """The batches of this epoch that have not been used."""
        if self._passes and self._saved is None:
            self.end()
        self._passes += 1
        saved, self._saved, self._between = self._saved, None, None
        self._begun = True
        if saved is None:
            self.batches = 0
            self._beginning = self._now()
            return self._first_batch_on()
        self._beginning = saved["beginning"]
        if saved["loader"]:
            self.loader.load_state_dict(saved["loader"])
            _set_epoch(self.loader, saved["now"]["epoch"])
            batches = self._first_batch_on()
        else:
            batches = self._read_again(saved)
        restore_random_states(saved["now"]["random"])
        return batches

    def _first_batch_on(self) -> Iterator[Any]:
        batches: Iterator[Any] = iter(self.loader)
        return batches

    def _read_again(self, saved: State) -> Iterator[Any]:
        beginning, exact = saved["beginning"], "divided" not in saved
        restore_generators(generators_of(self.loader), beginning["generators"])
        _set_epoch(self.loader, beginning["epoch"])
        restore_random_states(beginning["random"])
        batches = self._first_batch_on()
        for number in range(saved["batches"]):
            if next(batches, self) is self and exact:
                raise ConfigError(
                    f"the checkpoint is after {saved['batches']} batches of epoch {self.epoch}, and"
                    f" the loader has only {number} now: give it the data and the batch size that"
                    " it had"
                )
        return batches

    def end(self) -> None:
        """The epoch is over, with all that belongs to it."""
        self.epoch += 1
        self.batches = self._passes = 0
        self._begun = False
        self._beginning = {}


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
