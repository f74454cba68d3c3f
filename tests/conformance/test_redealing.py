"""Epochs of `shard`'s loaders in sessions that lose workers: lists of all that all ranks read."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

import foreprop
from foreprop.core.dealing import CERTAIN_STEPS, MemberChange
from foreprop.engine.world import World
from foreprop.errors import PeerLost
from tests.cluster import run_cluster
from tests.conformance.counting_runs import ELASTIC, Died, dedicated, die, make_step
from tests.conformance.node_losses import lose_node
from tests.conformance.parity import build_seeded, check_same_bits, servers_only, snapshot, with_sgd
from tests.conformance.shares import numbers
from tests.dealtloop import Loop, left_within, run
from tests.tiers import long_cases

pytestmark = servers_only  # each test names the architecture that it needs

SAMPLES, RANKS, BATCH = 50, 3, 2
Read = list[tuple[int, list[int]]]
"""The step of each batch, and its samples."""


def table() -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(3)
    return torch.randn(SAMPLES, 5, generator=drawn), torch.arange(SAMPLES) % 3


class Run:
    """Of all ranks, some of which die: what each read, by pass, and its stats."""

    def __init__(
        self,
        make_loader: Callable[[], Any],
        victims: dict[int, tuple[int, int | None]],
        *,
        epochs: int = 2,
        make_validation: Callable[[], Any] | None = None,
        log: Path | None = None,
        beside: bool = False,
        **settings: Any,
    ) -> None:
        """``victims``: by rank in which step, and at which layer of its backward or after it.

        ``log``: where dedicated servers write. ``beside``: there are none, and nodes die.
        """
        self.make_loader, self.victims, self.epochs = make_loader, victims, epochs
        self.make_validation = make_validation
        usual: dict[str, Any] = {**ELASTIC, **settings}
        self.settings = {"step_timeout_s": 30.0, **settings} if beside else usual
        self.log, self.beside = log, beside
        self.validated: list[list[Read]] = [[] for _ in range(RANKS)]
        self.models: list[Any] = [None] * RANKS
        self.read: list[list[Read]] = [[] for _ in range(RANKS)]
        self.lengths: list[list[int]] = [[] for _ in range(RANKS)]
        self.stats: list[Any] = [None] * RANKS
        local_size = 1 if "counted_replay" not in settings else RANKS
        self.ended = run_cluster(RANKS, self._work, local_size=local_size)
        self.survivors = [rank for rank in range(RANKS) if rank not in victims]
        assert [rank for rank in range(RANKS) if self.ended[rank]] == self.survivors

    def _work(self, world: World) -> bool:
        rank = world.rank
        model, optimizer = build_seeded(with_sgd(), seed=rank)
        servers: Any = contextlib.nullcontext()
        if not self.beside:
            own = {} if self.log is None else {"counted_log": str(self.log)}
            servers = dedicated(world, **own)
        try:
            with servers:
                about: Any = self.settings
                with foreprop.parallelize(model, optimizer, world=world, **about) as session:
                    self._train(world, model, optimizer, session)
                    self.models[rank] = snapshot(model.state_dict())
                self.stats[rank] = session.stats()
                return True
        except (Died, PeerLost):
            return False

    def _train(self, world: World, model: Any, optimizer: Any, session: Any) -> None:
        x, y = table()
        rank, step = world.rank, 0
        end = lose_node if self.beside else die
        victim_step, layer = self.victims.get(rank, (0, None))
        loader = foreprop.shard(self.make_loader(), world=world, seed=5)
        validation = None
        if self.make_validation is not None:
            validation = foreprop.shard(self.make_validation(), world=world)
        for _ in range(self.epochs):
            self.read[rank].append([])
            for batch in loader:
                step += 1
                samples = torch.as_tensor(batch).reshape(-1)
                self.read[rank][-1].append((step, samples.tolist()))
                self.lengths[rank].append(len(loader))
                if step == victim_step and layer is not None:
                    model[layer].weight.register_hook(lambda _: end(session))
                make_step(model, optimizer, (x[samples], y[samples]))
                if step == victim_step and layer is None:
                    session.flush()
                    end(session)
            if validation is not None:
                read = [(step, torch.as_tensor(each).reshape(-1).tolist()) for each in validation]
                self.validated[rank].append(read)

    @property
    def changes(self) -> list[MemberChange]:
        """As the survivors know them."""
        known = [
            {rank: about["step"] for rank, about in self.stats[survivor]["left"].items()}
            for survivor in self.survivors
        ]
        assert known == [known[0]] * len(known)
        return [MemberChange(rank, step) for rank, step in known[0].items()]

    def simulated(self, orders: Sequence[Sequence[Any]], **about: Any) -> list[list[Read]]:
        """By rank and pass, what `core.dealing` gives of these orders."""
        found: list[list[Read]] = [[] for _ in range(RANKS)]
        done = 0
        for order in orders:
            loop = Loop(
                items=len(order),
                workers=RANKS,
                steps_before=done,
                changes=self.changes,
                **about,
            )
            readers = run(loop)
            for rank, reader in readers.items():
                read = [(step, flat([order[i] for i in items])) for step, items in reader.read]
                found[rank].append(read)
            done = readers[self.survivors[0]].done
        return found

    def check(self, orders: Sequence[Sequence[Any]], **about: Any) -> None:
        """All that all ranks read, whole; and that every pass has every sample once."""
        expected = self.simulated(orders, **about)
        left = left_within(Loop(items=0, workers=RANKS, rounds=1, changes=self.changes))
        assert left.keys() == self.victims.keys()
        for rank in self.survivors:
            assert self.read[rank] == expected[rank]
        for rank, step in left.items():
            until = [[each for each in read if each[0] <= step] for read in self.read[rank]]
            wanted = [[each for each in read if each[0] <= step] for read in expected[rank]]
            assert until == wanted[: len(until)]
        for number, order in enumerate(orders):
            seen = Counter(
                sample
                for rank in range(RANKS)
                for read in self.read[rank][number : number + 1]
                for step, samples in read
                if step <= left.get(rank, step)
                for sample in samples
            )
            assert seen.keys() == set(flat(order))
            assert {sample for sample, times in seen.items() if times > 1} <= set(
                flat(order[:RANKS])
            )


def flat(items: Sequence[Any]) -> list[int]:
    return [one for item in items for one in (item if isinstance(item, list) else [item])]


def shuffled(epoch: int) -> list[int]:
    """As torch's sampler draws it, with `shard`'s seed."""
    generator = torch.Generator().manual_seed(5 + epoch)
    return torch.randperm(SAMPLES, generator=generator).tolist()


def of_tensors(batch: Any) -> Any:
    """Only the numbers of samples."""
    return torch.stack([torch.as_tensor(each[0]) for each in batch])


def usual(**options: Any) -> DataLoader[Any]:
    about = {"batch_size": BATCH, "shuffle": True, "collate_fn": of_tensors, **options}
    return DataLoader(numbers(SAMPLES), **about)


@pytest.mark.parametrize("victim", [1, *long_cases(0, 2)])
@pytest.mark.parametrize("layer", [2, *long_cases(None)])
def test_the_rest_of_an_epoch_is_dealt_anew(
    victim: int, layer: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "foreprop"):
        found = Run(usual, {victim: (3, layer)})
    found.check([shuffled(0), shuffled(1)], rounds=BATCH)
    (change,) = found.changes
    batch, rest = change.step + CERTAIN_STEPS, ", ".join(map(str, found.survivors))
    assert (
        f"epoch 0 of a DataLoader is dealt out anew among rank {rest}, from batch {batch} on:"
        f" {2 * BATCH} samples first that rank {victim} was still to read"
    ) in caplog.text
    assert caplog.text.count("dealt out anew") == 1


def test_the_length_is_that_of_what_is_dealt() -> None:
    """Before it is known, the loader's own; then that of the pass; then of those who are left."""
    found = Run(usual, {2: (3, None)})
    whole, anew, later = -(-SAMPLES // (RANKS * BATCH)), 11, -(-SAMPLES // (2 * BATCH))
    assert len(found.read[0][0]) == anew
    assert found.lengths[0] == [whole] * 5 + [anew] * (anew - 5) + [later] * later


class Lazy(Sampler[int]):
    """One's own, which draws as it is read."""

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        return iter(range(SAMPLES - 1, -1, -1))


def own_batches() -> DataLoader[Any]:
    """Not torch's: batches are dealt out whole."""
    pairs = [[2 * at, 2 * at + 1] for at in range(SAMPLES // 2)]
    return DataLoader(numbers(SAMPLES), batch_sampler=pairs, collate_fn=of_tensors)


def one_by_one() -> DataLoader[Any]:
    options: Any = {"batch_size": None, "sampler": Lazy()}
    return DataLoader(numbers(SAMPLES), collate_fn=lambda each: of_tensors([each]), **options)


BACKWARDS = list(range(SAMPLES - 1, -1, -1))
PAIRS = [[2 * at, 2 * at + 1] for at in range(SAMPLES // 2)]
KINDS: dict[str, tuple[Callable[[], Any], Sequence[Any], dict[str, Any]]] = {
    "batches of one's own": (own_batches, PAIRS, {"rounds": 1}),
    "one by one": (one_by_one, BACKWARDS, {"rounds": 1}),
    "workers": (
        lambda: usual(num_workers=2, shuffle=False),
        range(SAMPLES),
        {"rounds": BATCH, "ahead": 4},
    ),
    "workers that stay": (
        lambda: usual(num_workers=1, persistent_workers=True, shuffle=False),
        range(SAMPLES),
        {"rounds": BATCH, "ahead": 2},
    ),
}


@pytest.mark.parametrize(
    "kind", ["batches of one's own", *long_cases("one by one", "workers", "workers that stay")]
)
def test_every_kind_of_order(kind: str) -> None:
    make, order, about = KINDS[kind]
    found = Run(make, {1: (4, None)})
    found.check([order, order], **about)


def test_two_die_one_after_the_other() -> None:
    """The second one owes some of what was the first one's."""
    found = Run(usual, {0: (2, None), 2: (5, None)})
    found.check([shuffled(0), shuffled(1)], rounds=BATCH)


def test_a_node_dies_with_its_server() -> None:
    """Of who left within which step all hear from the servers that are left."""
    about = {"elastic": True, "architecture": "p2p", "slice_elems": 10}
    found = Run(usual, {1: (3, None)}, beside=True, **about)
    found.check([shuffled(0), shuffled(1)], rounds=BATCH)
    check_same_bits(found.models[0], found.models[2])


def test_validation_is_dealt_among_those_who_are_here() -> None:
    """Of two loaders each has deals of its own."""
    found = Run(usual, {1: (4, None)}, make_validation=lambda: usual(shuffle=False))
    found.check([shuffled(0), shuffled(1)], rounds=BATCH)
    for number in range(2):
        validated = [flat_read(found.validated[rank][number]) for rank in found.survivors]
        assert [sorted(each) for each in validated] == [
            list(range(0, SAMPLES, 2)),
            list(range(1, SAMPLES, 2)),
        ]


def flat_read(read: Read) -> list[int]:
    return [sample for _, samples in read for sample in samples]


@pytest.mark.parametrize("layer", [2, *long_cases(None)])
def test_a_replay_reads_what_the_session_read(tmp_path: Path, layer: int | None) -> None:
    """The dead rank takes part in it, and is not counted; all others read and compute the same."""
    found = Run(usual, {1: (3, layer)}, log=tmp_path)
    about = {"architecture": "p2p", "servers_per_node": 2, "slice_elems": 10}
    again = Run(usual, {}, beside=True, counted_replay=str(tmp_path), **about)
    for rank in found.survivors:
        assert again.read[rank] == found.read[rank]
        check_same_bits(again.models[rank], found.models[rank])
    check_same_bits(again.models[1], found.models[0])


@pytest.mark.long
@pytest.mark.process  # loaders fork workers while the other ranks' threads run
def test_a_death_at_the_end_is_made_up_after_it() -> None:
    """All batches have been drawn ahead: the loader goes on with what is owed."""
    found = Run(lambda: usual(num_workers=2, prefetch_factor=8), {1: (5, None)})
    found.check([shuffled(0), shuffled(1)], rounds=BATCH, ahead=16)
    assert [len(read) for read in found.read[0]] == [11, 13]


def test_what_cannot_be_made_up_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """Of nine steps one dies within the eighth: nobody is sure of it before the tenth."""
    with caplog.at_level(logging.WARNING, "foreprop"):
        found = Run(usual, {1: (8, None)}, epochs=2)
    read = [sample for one in found.read for _, samples in one[0] for sample in samples]
    lost = set(range(SAMPLES)) - set(read)
    assert (
        "epoch 0 of a DataLoader had ended when rank 1 was known to have left within step 8:"
        f" {len(lost)} of its samples are not seen"
    ) in caplog.text
    assert len(lost) > 0
    later = [read for passes in found.read for read in passes[1:]]
    again = [sample for read in later for _, samples in read for sample in samples]
    assert set(again) == set(range(SAMPLES))


class Stream(IterableDataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[Any]:
        return iter(range(SAMPLES))


class Twice(DataLoader[Any]):
    """A loader that does as it likes."""

    def __iter__(self) -> Any:
        return super().__iter__()


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a stream": (lambda: DataLoader(Stream(), batch_size=BATCH), "it is read in order, or is"),
    "a loader's own way": (
        lambda: Twice(numbers(SAMPLES), batch_size=BATCH, collate_fn=of_tensors),
        "it draws its batches in a way of its own",
    ),
}


@pytest.mark.parametrize("kind", ["a loader's own way", "a stream"])
def test_what_cannot_be_dealt_anew_is_said(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    make, why = REFUSED[kind]
    with caplog.at_level(logging.WARNING, "foreprop"):
        found = Run(make, {1: (3, None)})
    assert f"left within step 3 was still to read of a {type(make()).__name__}" in caplog.text
    assert why in caplog.text
    assert [len(read) for read in found.read[0]] == [9, 9], "its share is as it was"
