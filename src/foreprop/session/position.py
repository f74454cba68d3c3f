"""Where in its data a training is: the epoch, and the batches of it that have been used.

A loader has more state than anybody can see: orders that are drawn as they are read, batches that
are loaded ahead, random numbers within samples. So a pass is gone on with by beginning it as it was
begun, with the random numbers of then, and reading again what was read. A loader that has a
``state_dict`` of its own (torchdata's) is asked for that instead.

A pass of an elastic session is dealt anew when workers leave or join (`session.redealing`). Then it
is not enough to know how many batches were read: the *parts* of the pass say which samples were,
each as a `core.dealing.DealtPart`, and the rest is dealt anew.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import torch

from foreprop.core.dealing import DealtPart, MemberChange
from foreprop.errors import ConfigError
from foreprop.quantities import counted
from foreprop.session.shard import ShardedLoader
from foreprop.session.shares import SharedOrder

State = dict[str, Any]
"""Plain data, as safe loading takes it."""


class LoaderPosition:
    """Where one training loop is. Training thread."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.epoch = 0  # the one that is under way, or the next one
        self.batches = 0  # used in this epoch
        self._begun = False
        self._passes = 0  # begun in this epoch
        self._beginning: State = {}
        self._saved: State | None = None  # the next pass goes on from there
        self._between: State | None = None
        """What the training has gone on from, if that was between two epochs."""
        self._parts: list[str] = []
        """What was read of the pass under way when it was dealt otherwise."""
        self._before = 0  # batches of this epoch that were used in those parts
        self._joins = False  # the next pass is one that others are in

    # To be saved, and restored.
    def state(self) -> State:
        """The state that is saved, between two batches or two epochs."""
        own = hasattr(self.loader, "state_dict") and hasattr(self.loader, "load_state_dict")
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
            # only an elastic session deals, and loads that
            is_dealt = "foreprop.features.members.membershipview" in sys.modules
            state["deal"] = maybe_part(self.loader) if is_dealt else None
        return state

    def _now(self) -> State:
        epoch = getattr(self.loader, "epoch", None)  # of one that counts its passes, as `shard`'s
        return {
            "random": random_states(),
            "generators": [generator.get_state() for generator in generators_of(self.loader)],
            "epoch": epoch if isinstance(epoch, int) else None,
        }

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

        With another number no sample of the epoch is left out, and at most a batch of each rank
        comes twice; none, if an elastic session was saved, which knows who has read what. Such a
        session also gives: ``is_whole``, whether all ranks were there; ``left``, within which step
        others have left; ``dealt_by``, the state of the one rank whose dealing all go on with.
        """
        self.epoch, self.batches = state["epoch"], state["batches"]
        self._parts, self._before = state.get("parts", []), state.get("before", 0)
        notice, deal = None, state.get("deal")
        is_alike = saved_by == world_size
        if deal is not None and is_alike:
            is_alike = is_whole and is_shared_by_all(deal)
        if not is_alike:
            state = _with_epochs(state)
            if deal is not None and 1 not in (saved_by, world_size):
                # what nobody has read of the epoch goes to those who are here now
                dealt = dealt_by() if dealt_by else state
                part = with_left(dealt["deal"], left)
                self._parts, self._before = [*dealt["parts"], part], self.batches
                generators = dealt["beginning"]["generators"]
                state["beginning"] = {**state["beginning"], "generators": generators}
                notice = self._describe_division()
            elif state["begun"]:
                notice = self._divide(state, saved_by, world_size)
        self._saved = state
        self._between = None if state["begun"] else state["now"]
        if self._between is not None:
            self._saved = None
            self.be_between()
        return notice

    def be_between(self) -> None:
        """Draw at the loop's beginning, after a checkpoint between epochs, what was drawn then."""
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

    def _describe_division(self) -> str:
        where = f"batch {self.batches} of " if self.batches else ""
        return f"samples are divided anew from {where}epoch {self.epoch} on"

    def join(self, state: State) -> None:
        """Go on, on a newcomer, where the others are; its loader knows which pass that is."""
        self.epoch, self.batches = state["epoch"], state["batches"]
        if state["begun"]:
            self._parts, self._before, self._joins = state["parts"], state["before"], True
        else:
            begin_epoch(self.loader, state["now"]["epoch"])

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
            go_on_after(self.loader, self._parts)
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
        """Note that the epoch is over, with all that belongs to it."""
        self.epoch += 1
        self.batches = self._passes = self._before = 0
        self._parts = []
        self._begun = False
        self._beginning = {}


def _with_epochs(state: State) -> State:
    # a loader that counts its passes may have taken the place of one that does not
    changed = dict(state)
    for name in ("now", "beginning"):
        if state[name] and state[name]["epoch"] is None:
            changed[name] = {**state[name], "epoch": state["epoch"]}
    return changed


def _set_epoch(loader: Any, epoch: int | None) -> None:
    if epoch is not None and hasattr(loader, "set_epoch"):
        loader.set_epoch(epoch)


# Random numbers.
def random_states() -> State:
    """The states of Python's, numpy's and torch's generators; of the device's if it is in use."""
    version, numbers, gauss = random.getstate()
    states: State = {"python": [version, list(numbers), gauss], "torch": torch.get_rng_state()}
    if (numpy := sys.modules.get("numpy")) is not None:
        name, keys, place, has_gauss, cached = numpy.random.get_state(legacy=True)
        states["numpy"] = [str(name), keys.tolist(), int(place), int(has_gauss), float(cached)]
    if (device := _device_module()) is not None:
        states["device"] = device.get_rng_state()
    return states


def restore_random_states(states: State) -> None:
    """Go on from there with those generators that this process uses."""
    if not states:
        return
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(states["torch"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in states:
        name, keys, *rest = states["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))
    device = _device_module()
    if device is not None and "device" in states:
        device.set_rng_state(states["device"])


def check_random_states(states: State) -> None:
    """Raise whatever `restore_random_states` would, and change nothing."""
    if not states:
        return
    version, numbers, gauss = states["python"]
    random.Random().setstate((version, tuple(numbers), gauss))
    check_generators([states["torch"]])
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in states:
        name, keys, *rest = states["numpy"]
        tried = (name, numpy.array(keys, dtype=numpy.uint32), *rest)
        numpy.random.RandomState().set_state(tried)
    if not isinstance(states.get("device", states["torch"]), torch.Tensor):
        raise TypeError("the device's are no tensor")


def check_generators(states: Sequence[Any]) -> None:
    for state in states:
        torch.Generator().set_state(state)


def _device_module() -> Any:
    if not torch.accelerator.is_available():
        return None
    module = torch.get_device_module(torch.accelerator.current_accelerator())
    started = getattr(module, "is_initialized", lambda: True)
    return module if started() and hasattr(module, "get_rng_state") else None


def generators_of(loader: Any) -> list[torch.Generator]:
    """A loader's own generators, in an order that is alike for loaders that are made alike."""
    found: dict[int, torch.Generator] = {}
    batches = getattr(loader, "batch_sampler", None)
    samplers = (getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    for part in (loader, *samplers, getattr(loader, "dataset", None)):
        generator = getattr(part, "generator", None)
        if isinstance(generator, torch.Generator):
            found.setdefault(id(generator), generator)
    return list(found.values())


def restore_generators(generators: Sequence[torch.Generator], states: Sequence[Any]) -> None:
    # a loader that has more generators by now keeps the new ones as they are
    for generator, state in zip(generators, states, strict=False):
        generator.set_state(state)


# Parts of passes that were dealt otherwise.
_DECODER = msgspec.json.Decoder(DealtPart)


def maybe_part(loader: Any) -> str | None:
    """The pass under way as a part; None if it is not dealt, or cannot be dealt anew."""
    redealing = loader._redealing if isinstance(loader, ShardedLoader) else None
    if redealing is None or (found := redealing.where()) is None or found[1] is None:
        return None
    part = DealtPart(redealing.workers, loader._share.turn.rounds, found[1])
    return msgspec.json.encode(part).decode()


def with_left(part: str, left: Sequence[tuple[int, int]]) -> str:
    changes = tuple(MemberChange(rank, step) for rank, step in left)
    return msgspec.json.encode(_decode_part(part)._replace(left=changes)).decode()


def is_shared_by_all(part: str) -> bool:
    """Whether nobody has left or joined in this pass, or before."""
    deals, workers = _decode_part(part).progress.deals, _decode_part(part).workers
    return len(deals) == 1 and len(deals[0].members) == workers


def go_on_after(loader: Any, parts: Sequence[str]) -> None:
    """Have the loader's next pass give what these parts have left, one after the other.

    Raises `ConfigError` for a loader that cannot go on so.
    """
    share = loader._share if isinstance(loader, ShardedLoader) else None
    if not isinstance(share, SharedOrder):
        raise ConfigError(
            f"the checkpoint is in the middle of an epoch that was dealt out anew, and loader is a"
            f" {type(loader).__name__}: give foreprop.checkpoint() what foreprop.shard() returned"
        )
    share.parts = [_decode_part(part) for part in parts]


def begin_epoch(loader: Any, epoch: int | None) -> None:
    """Have a newcomer's next pass be this epoch from its beginning, as the others' is."""
    if epoch is None or not isinstance(loader, ShardedLoader):
        return
    if loader.epoch != epoch:  # now it is where the others were when they ended their last step
        loader.set_epoch(epoch)
    if loader._redealing is not None:
        loader._redealing.joined = None


def _decode_part(part: str) -> DealtPart:
    try:
        return _DECODER.decode(part)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"a checkpoint's loader position cannot be read: {error}") from error
