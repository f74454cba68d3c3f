"""Embeddings on the meta device, whose rows only the servers have, beside ordinary ones."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import foreprop
from foreprop.core.frames import PACE_STEPS
from foreprop.core.rowinit import row_init_of
from foreprop.engine.world import World
from foreprop.errors import ConfigError, ForepropError, TrainingLoopError
from foreprop.features.tables.exchange import RowExchange
from foreprop.features.tables.lookahead import lookahead
from foreprop.features.tables.rowparameter import RemoteRows
from foreprop.features.tables.rowtable import make_rows
from foreprop.plan.planning import MEASURED_STEPS
from tests.cluster import run_cluster, worlds
from tests.conformance import scaler_runs
from tests.conformance.matrices import few
from tests.conformance.parity import (
    Batch,
    Build,
    build_seeded,
    check_close,
    check_same_bits,
    merge,
    run_foreprop,
    run_plain,
    servers_only,
    train_classifier,
)
from tests.conformance.sparse_models import (
    CLASSES,
    ROWS,
    Bags,
    Pairs,
    Words,
    ranks,
    with_optimizer,
    words_of,
)
from tests.tiers import long_cases

pytestmark = servers_only  # each test names the architecture that it needs

NAME = "table.weight"


class BagsOf(nn.Module):
    """With offsets, and weights that are parameters, which wait for themselves."""

    def __init__(self, mode: str = "mean") -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(ROWS, CLASSES, mode=mode, sparse=mode != "max")
        self.weights = nn.Parameter(torch.ones(4)) if mode == "sum" else None

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        if self.weights is not None:
            return self.table(words, per_sample_weights=self.weights.expand(words.shape))
        return self.table(words.flatten(), torch.arange(0, words.numel(), words.shape[1]))


def remote(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """The same model with its table on the meta device."""

    def made() -> nn.Module:
        model: Any = make()
        model.table.to("meta")
        return model

    return made


def begun(make: Callable[[], nn.Module], init: str | None = None) -> Callable[[], nn.Module]:
    """The same model with its table in memory, as the servers would make it."""

    def made() -> nn.Module:
        model: Any = make()
        with torch.no_grad():
            model.table.weight.copy_(first_values(model.table, init))
        return model

    return made


def first_values(table: Any, init: str | None = None) -> torch.Tensor:
    weight, padding = table.weight, table.padding_idx
    return make_rows(
        row_init_of(NAME, init, padding_row=padding),
        torch.arange(len(weight)),
        weight.shape[1],
        weight.dtype,
    )


def compare(
    make: Callable[[], nn.Module],
    cls: type[torch.optim.Optimizer],
    by_rank: Sequence[Sequence[Batch]],
    loop: Any = train_classifier,
    **settings: Any,
) -> None:
    """Bit for bit as with a table that every worker has, and that begins with the same values."""
    wanted = run_foreprop(with_optimizer(begun(make), cls), loop, by_rank, **settings)
    settings = {"whole_tables": "all", **settings}
    got = run_foreprop(with_optimizer(remote(make), cls), loop, by_rank, **settings)
    for ours, theirs in zip(got, wanted, strict=True):
        check_same_bits(ours.model, theirs.model)
        assert ours.result == theirs.result


# The same training.
@pytest.mark.parametrize("architecture", ["hybrid", *long_cases("p2p")])
@pytest.mark.parametrize("count", [3, *long_cases(1)])
@pytest.mark.parametrize(
    ("make", "cls"),
    [
        (lambda: BagsOf("sum"), torch.optim.SGD),
        (lambda: Words(padding_idx=-1), torch.optim.Adagrad),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in [
                (Words, torch.optim.SGD),
                (Words, torch.optim.Adagrad),
                (Pairs, torch.optim.SparseAdam),
                (Bags, torch.optim.Adagrad),
                (BagsOf, torch.optim.SGD),
                (lambda: Words(padding_idx=3), torch.optim.Adagrad),
            ]
        ),
    ],
)
def test_it_trains_as_one_in_memory(
    make: Callable[[], nn.Module], cls: Any, count: int, architecture: str
) -> None:
    compare(make, cls, ranks(count), architecture=architecture, servers_per_node=2)


def test_it_trains_as_one_process_with_plain_pytorch() -> None:
    by_rank = ranks(2)
    build = with_optimizer(remote(Words), torch.optim.Adagrad)
    got = run_foreprop(build, train_classifier, by_rank, whole_tables="all")
    plain = run_plain(
        with_optimizer(begun(Words), torch.optim.Adagrad), train_classifier, merge(by_rank)
    )
    check_close(got[0].model, plain.model)


def test_it_trains_on_when_ranks_have_told_their_pace() -> None:
    by_rank = [batches * PACE_STEPS for batches in ranks(2)]
    compare(Words, torch.optim.SGD, by_rank)


def test_what_is_auto_leaves_the_rows_where_they_are() -> None:
    """With other servers or slices the session would begin anew."""
    by_rank = [batches * MEASURED_STEPS for batches in ranks(2)]
    build = with_optimizer(remote(Words), torch.optim.Adagrad)
    found = [
        run_foreprop(build, train_classifier, by_rank, whole_tables="all", **settings)[0]
        for settings in (
            {"architecture": "auto", "slice_elems": "auto"},
            {"architecture": "p2p"},
        )
    ]
    check_same_bits(found[0].model, found[1].model)


@pytest.mark.parametrize(
    "settings",
    [
        {"clip_grad_value": 0.01, "reduction": "sum", "sparse_reduction": "mean"},
        {"wire_dtype": "bfloat16", "slice_elems": 7},
        *long_cases({"clip_grad_norm": 0.1}, {"clip_grad_value": 0.01}, {"slice_elems": 7}),
        *long_cases({"wire_dtype": "bfloat16"}, {"reduction": "sum", "sparse_reduction": "mean"}),
        {"preset": "tensorflow"},
        *long_cases({"preset": "kvstore"}),
    ],
    ids=str,
)
def test_with_every_setting(settings: dict[str, Any]) -> None:
    compare(Words, torch.optim.Adagrad, ranks(2), **settings)


@pytest.mark.parametrize("dtype", [torch.bfloat16, *long_cases(torch.float64)])
def test_other_types(dtype: torch.dtype) -> None:
    compare(lambda: Pairs().to(dtype), torch.optim.Adagrad, ranks(2))


def test_the_largest_of_a_bag() -> None:
    """For which torch has no sparse gradient, and so it is named."""
    build = with_optimizer(begun(lambda: BagsOf("max")))
    wanted = run_foreprop(build, train_classifier, ranks(2))[0]
    build = with_optimizer(remote(lambda: BagsOf("max")))
    settings: dict[str, Any] = {"whole_tables": "all", "sparse_parameters": "table.*"}
    for got in run_foreprop(build, train_classifier, ranks(2), **settings):
        check_close(got.model, wanted.model)


def test_any_number_of_servers_has_the_same_bits() -> None:
    build = with_optimizer(remote(Words), torch.optim.Adagrad)
    settings: dict[str, Any] = {"whole_tables": "all"}
    wanted = run_foreprop(build, train_classifier, ranks(2), **settings)[0]
    for servers in (2, 3):
        for got in run_foreprop(
            build, train_classifier, ranks(2), servers_per_node=servers, **settings
        ):
            check_same_bits(got.model, wanted.model)


def accumulate(model: Any, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]) -> None:
    for first, second in zip(batches[::2], batches[1::2], strict=True):
        optimizer.zero_grad()
        for words, labels in (first, second):
            F.cross_entropy(model(words), labels).backward()
        optimizer.step()


def discard(model: Any, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]) -> None:
    """One pass of each step is discarded, by the model or by the optimizer."""
    for number, (words, labels) in enumerate(batches):
        for zeros in (model.zero_grad, optimizer.zero_grad):
            F.cross_entropy(model(words.flip(0)), labels).backward()
            zeros(set_to_none=number % 2 == 0)
        F.cross_entropy(model(words), labels).backward()
        optimizer.step()
        optimizer.zero_grad()


def with_look_ups_between(
    model: Any, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]
) -> Any:
    seen = []
    for batch in batches:
        train_classifier(model, optimizer, [batch])
        with torch.no_grad():
            seen += model.table(torch.tensor([[3, 7], [0, 3]])).flatten().tolist()
    return seen


def with_an_empty_batch(
    model: Any, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]
) -> None:
    for number, (words, labels) in enumerate(batches):
        optimizer.zero_grad()
        if number == 1:
            (model.table(words[:, :0]).sum() + 0 * model.table(words).sum()).backward()
        else:
            F.cross_entropy(model(words), labels).backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("count", "loop"),
    few([2, *long_cases(1)], [accumulate, with_look_ups_between, with_an_empty_batch]),
)
def test_loops(count: int, loop: Any) -> None:
    compare(Pairs, torch.optim.Adagrad, ranks(count), loop)


def test_discarded_gradients() -> None:
    """Plain PyTorch's is the reference: what is discarded must not come back."""
    build = with_optimizer(begun(Pairs), torch.optim.Adagrad)
    wanted = run_plain(build, discard, words_of(0)).model
    build = with_optimizer(remote(Pairs), torch.optim.Adagrad)
    settings: dict[str, Any] = {"whole_tables": "all", "backward_passes": 3}
    got = run_foreprop(build, discard, [words_of(0)], **settings)[0]
    check_close(got.model, wanted)


def test_a_frozen_table() -> None:
    def make() -> nn.Module:
        model = Words()
        model.table.weight.requires_grad_(False)
        return model

    compare(make, torch.optim.Adagrad, ranks(2))


@pytest.mark.parametrize("architecture", ["p2p", *long_cases("hybrid")])
def test_a_step_that_is_bad_on_one_rank_is_skipped_on_all(architecture: str) -> None:
    by_rank, bad = ranks(3), scaler_runs.BAD_STEP
    settings = {"architecture": architecture, "bad_rank": 1, "clip_grad_norm": 0.1}
    wanted = scaler_runs.together(with_optimizer(begun(Words)), by_rank, **settings)
    got = scaler_runs.together(
        with_optimizer(remote(Words)), by_rank, whole_tables="all", **settings
    )
    for ours, theirs in zip(got[0], wanted[0], strict=True):
        check_same_bits(ours, theirs)
    assert got[1] == wanted[1]
    check_same_bits(got[0][bad], got[0][bad - 1])


@pytest.mark.parametrize("architecture", ["hybrid", *long_cases("p2p")])
def test_moving_averages(architecture: str) -> None:
    def averages(make: Callable[[], nn.Module], **settings: Any) -> list[dict[str, Any]]:
        def work(world: World) -> dict[str, Any]:
            model, optimizer = build_seeded(with_optimizer(make, torch.optim.Adagrad), world.rank)
            options = {"ema": 0.7, "architecture": architecture, **settings}
            with foreprop.parallelize(model, optimizer, world=world, **options) as session:
                train_classifier(model, optimizer, words_of(world.rank))
                return session.ema_state_dict()

        return run_cluster(2, work)

    wanted = averages(begun(Words))
    for got, theirs in zip(averages(remote(Words), whole_tables="all"), wanted, strict=True):
        check_close(got, theirs)  # averages of other rows at once are rounded otherwise


def test_the_next_batch_s_rows_are_fetched_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A world of one is not sharded: as in a larger one, through its loader."""
    asked: list[tuple[int, bool]] = []
    ahead = [False]
    pull, prefetch = RowExchange.pull_rows, RemoteRows.prefetch

    def spy(self: RowExchange, parameter: int, step: int, numbers: torch.Tensor) -> Any:
        asked.append((step, ahead[0]))
        return pull(self, parameter, step, numbers)

    def prefetching(self: RemoteRows) -> None:
        ahead[0] = True
        prefetch(self)
        ahead[0] = False

    monkeypatch.setattr(RowExchange, "pull_rows", spy)
    monkeypatch.setattr(RemoteRows, "prefetch", prefetching)
    model, optimizer = build_seeded(with_optimizer(remote(Words)))
    with foreprop.parallelize(model, optimizer, world=worlds(1)[0]):
        batches: Any = lookahead.follow(iter(words_of(0, 6)))
        train_classifier(model, optimizer, batches)
    assert asked == [(0, False)] + [(step, True) for step in range(1, 6)]


# How rows begin.
def test_how_rows_begin() -> None:
    model, optimizer = build_seeded(with_optimizer(remote(lambda: Words(padding_idx=2))))
    inits = {
        "other.*=constant(3); table.*=uniform(-0.25, 0.5)": lambda rows: (
            rows.min() >= -0.25 and rows.max() <= 0.5 and rows.std() > 0.1
        ),
        "constant(0.5)": lambda rows: (rows[:2] == 0.5).all(),
        "normal(10, 0.01)": lambda rows: (rows[3:] - 10).abs().max() < 0.1,
        "other.*=constant(3)": lambda rows: 0.8 < rows[3:].std() < 1.2,
    }
    for init, holds in inits.items():
        with foreprop.parallelize(model, optimizer, world=worlds(1)[0], table_init=init) as session:
            rows = session.rows(NAME, torch.arange(ROWS))
        assert holds(rows), init
        assert not rows[2].any()
        assert torch.equal(rows, first_values(Words(padding_idx=2).table, init))


def test_another_seed_or_name_makes_other_rows() -> None:
    numbers = torch.arange(4)
    made = [
        make_rows(row_init_of(name, None, seed=seed), numbers, 3, torch.float32)
        for name, seed in (("a", 0), ("a", 1), ("b", 0))
    ]
    assert not torch.isin(made[0], torch.cat(made[1:])).any()


# With several workers on a node, and relays between them and the servers.
@pytest.mark.parametrize(
    ("count", "settings"),
    [
        (3, {"clip_grad_norm": 0.1}),
        *(
            pytest.param(5, settings, marks=pytest.mark.long)
            for settings in ({"clip_grad_norm": 0.1}, {}, {"wire_dtype": "bfloat16"})
        ),
    ],
)
@pytest.mark.parametrize("architecture", ["hybrid", *long_cases("p2p")])
def test_it_trains_as_one_in_memory_through_relays(
    architecture: str, count: int, settings: dict[str, Any]
) -> None:
    compare(
        Pairs,
        torch.optim.SparseAdam,
        ranks(count),
        local_size=2,
        architecture=architecture,
        servers_per_node=2,
        **settings,
    )


def test_changes_by_hand_and_files_through_relays(tmp_path: Path) -> None:
    """What a relay has fetched before a change counts no more; any workers save at one time."""
    numbers, values = torch.tensor([30, 2, 17]), torch.arange(18.0).view(3, 6) / 10

    def work(world: World) -> dict[str, torch.Tensor]:
        build = with_optimizer(remote(Words), torch.optim.Adagrad)
        model, optimizer = build_seeded(build, world.rank)
        everything = torch.arange(ROWS)
        settings: dict[str, Any] = {"whole_tables": "none", "servers_per_node": 2}
        with foreprop.parallelize(model, optimizer, world=world, **settings) as session:
            train_classifier(model, optimizer, words_of(world.rank)[:2])
            wanted = session.rows(NAME, everything)
            wanted[numbers] = values
            session.set_rows(NAME, numbers, values if world.rank == 0 else values + 1)
            assert torch.equal(session.rows(NAME, everything), wanted)
            if world.rank != 1:
                session.save_tables(tmp_path / str(world.rank))
            session.set_rows(NAME, everything, torch.zeros(ROWS, 6))
            assert not session.rows(NAME, everything).any()
            session.load_tables(tmp_path / "3")
            assert torch.equal(session.rows(NAME, everything), wanted)
            train_classifier(model, optimizer, words_of(world.rank)[2:])
            return {NAME: session.rows(NAME, everything)}

    got = run_cluster(4, work, local_size=2)
    for other in got[1:]:
        check_same_bits(other, got[0])


# Rows by themselves.
def test_rows() -> None:
    wanted = run_plain(
        with_optimizer(begun(Words), torch.optim.Adagrad), train_classifier, merge(ranks(2))
    ).model

    numbers = torch.tensor([[7, 0], [39, 7]], dtype=torch.int32)

    def work(world: World) -> torch.Tensor:
        build = with_optimizer(remote(Words), torch.optim.Adagrad)
        model, optimizer = build_seeded(build, world.rank)
        with foreprop.parallelize(model, optimizer, world=world) as session:
            train_classifier(model, optimizer, words_of(world.rank))
            assert torch.equal(session.rows("out.weight", numbers[:1, 1]), model.out.weight[:1])  # type: ignore[union-attr, index]
            with pytest.raises(IndexError, match=r"row 40 of table\.weight .* rows 0 to 39"):
                session.rows(NAME, torch.tensor([40]))
            with pytest.raises(ConfigError, match=r"no parameter is called 'table'; there are"):
                session.rows("table", numbers)
            return session.rows(NAME, numbers)

    for rows in run_cluster(2, work):
        assert rows.shape == (2, 2, 6)
        torch.testing.assert_close(rows, wanted[NAME][numbers], rtol=2e-4, atol=2e-5)


def test_rows_that_are_set_by_hand() -> None:
    """On every rank alike; with the same training afterwards as of a table in memory."""
    numbers, values = torch.tensor([30, 2, 17]), torch.arange(18.0).view(3, 6) / 10

    def loop(model: Any, optimizer: Any, batches: Sequence[Batch]) -> None:
        train_classifier(model, optimizer, batches[:2])
        with torch.no_grad():
            model.table.weight[numbers] = values
        train_classifier(model, optimizer, batches[2:])

    build = with_optimizer(begun(Words), torch.optim.Adagrad)
    wanted = run_foreprop(build, loop, ranks(2))

    def work(world: World) -> dict[str, torch.Tensor]:
        build = with_optimizer(remote(Words), torch.optim.Adagrad)
        model, optimizer = build_seeded(build, world.rank)
        batches = words_of(world.rank)
        settings: dict[str, Any] = {"whole_tables": "all", "servers_per_node": 2}
        with foreprop.parallelize(model, optimizer, world=world, **settings) as session:
            train_classifier(model, optimizer, batches[:2])
            session.set_rows(NAME, numbers, values if world.rank == 0 else values + 1)
            assert torch.equal(session.rows(NAME, numbers), values)
            train_classifier(model, optimizer, batches[2:])
            return copy.deepcopy(dict(model.state_dict()))

    for got, theirs in zip(run_cluster(2, work), wanted, strict=True):
        check_same_bits(got, theirs.model)


def test_rows_that_cannot_be_set() -> None:
    model, optimizer = build_seeded(with_optimizer(remote(Words)))
    one = torch.tensor([1])
    with foreprop.parallelize(model, optimizer, world=worlds(1)[0]) as session:
        with pytest.raises(ConfigError, match=r"\(2, 6\) values for the rows .* must be \(1, 6\)"):
            session.set_rows(NAME, one, torch.ones(2, 6))
        with pytest.raises(ConfigError, match="each number once"):
            session.set_rows(NAME, torch.tensor([1, 1]), torch.ones(2, 6))
        with pytest.raises(IndexError, match="row 40"):
            session.set_rows(NAME, torch.tensor([40]), torch.ones(1, 6))
        with pytest.raises(ConfigError, match=r"out\.weight is not a remote table"):
            session.set_rows("out.weight", one, torch.ones(1, 6))


# Files.
@pytest.mark.parametrize(
    ("cls", "architecture"),
    few([torch.optim.SparseAdam, *long_cases(torch.optim.Adagrad)], ["hybrid", *long_cases("p2p")]),
)
def test_files_go_on_where_they_were(
    cls: type[torch.optim.Optimizer], architecture: str, tmp_path: Path
) -> None:
    """Saved by two workers with two servers each, loaded with one each: the same bits."""
    build = with_optimizer(remote(Pairs), cls)
    common: dict[str, Any] = {"architecture": architecture, "whole_tables": "all", "ema": 0.9}

    def first(world: World) -> dict[str, Any]:
        model, optimizer = build_seeded(build, world.rank)
        batches = words_of(world.rank, 6)
        settings = {**common, "servers_per_node": 2}
        with foreprop.parallelize(model, optimizer, world=world, **settings) as session:
            train_classifier(model, optimizer, batches[:3])
            if world.rank == 1:
                session.save_tables(tmp_path / "tables")
            train_classifier(model, optimizer, batches[3:])
            return {**session.ema_state_dict(), "now": model.state_dict()[NAME].clone()}

    def second(world: World) -> dict[str, Any]:
        model, optimizer = build_seeded(build, world.rank)
        with foreprop.parallelize(model, optimizer, world=world, **common) as session:
            train_classifier(model, optimizer, words_of(9, 2))  # must leave no trace
            session.load_tables(tmp_path / "tables")
            train_classifier(model, optimizer, words_of(world.rank, 6)[3:])
            return {**session.ema_state_dict(), "now": model.state_dict()[NAME].clone()}

    wanted = run_cluster(2, first)
    for got, theirs in zip(run_cluster(2, second), wanted, strict=True):
        check_same_bits({"now": got.pop("now")}, {"now": theirs.pop("now")})
        check_close(got, theirs)  # averages of other rows at once are rounded otherwise


def test_files_have_no_rows_that_nobody_has_changed(tmp_path: Path) -> None:
    class Large(Words):
        def __init__(self) -> None:
            super().__init__()
            with torch.device("meta"):
                self.table = nn.Embedding(10**8, 6, sparse=True)

    model, optimizer = build_seeded(with_optimizer(Large, torch.optim.Adagrad))
    with foreprop.parallelize(model, optimizer, world=worlds(1)[0]) as session:
        train_classifier(model, optimizer, words_of(0))
        session.save_tables(tmp_path)
        before = session.rows(NAME, torch.arange(50))
    (file,) = tmp_path.glob("*.pt")
    assert file.stat().st_size < 50_000
    with foreprop.parallelize(model, optimizer, world=worlds(1)[0]) as session:
        session.load_tables(tmp_path)
        assert torch.equal(session.rows(NAME, torch.arange(50)), before)


def test_files_of_many_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foreprop.features.tables.parts._KEPT_ELEMS", 12)
    monkeypatch.setattr("foreprop.features.tables.remotetables._PARTS_IN_A_FILE", 3)
    test_files_go_on_where_they_were(torch.optim.Adagrad, "p2p", tmp_path)
    assert len(list((tmp_path / "tables").glob("*.pt"))) > 3
    assert not list((tmp_path / "tables").glob("*.part"))


def test_files_that_do_not_fit_are_an_error_on_all_ranks(tmp_path: Path) -> None:
    def work(world: World, load: Path, **settings: Any) -> str:
        build = with_optimizer(remote(Words), torch.optim.Adagrad)
        model, optimizer = build_seeded(build, world.rank)
        with foreprop.parallelize(model, optimizer, world=world, **settings) as session:
            if world.rank == 0 and not load.exists():
                session.save_tables(load)
            train_classifier(model, optimizer, words_of(world.rank, 1))
            with pytest.raises(ConfigError) as raised:
                session.load_tables(load if settings else load / "none")
            train_classifier(model, optimizer, words_of(world.rank, 1))  # nothing has happened
        return str(raised.value)

    folder = tmp_path / "tables"
    for told in run_cluster(2, lambda world: work(world, folder)):
        assert "has no complete tables, as session.save_tables() writes them" in told
    for told in run_cluster(2, lambda world: work(world, folder, table_seed=5)):
        assert "rows begin as of table.weight is" in told


# state_dict().
@pytest.mark.parametrize("whole", ["all", "rank0", "none"])
def test_who_gets_the_whole_table(whole: str) -> None:
    def work(world: World) -> list[torch.Tensor]:
        model, optimizer = build_seeded(with_optimizer(remote(Words)), world.rank)
        with foreprop.parallelize(model, optimizer, world=world, whole_tables=whole) as session:
            train_classifier(model, optimizer, words_of(world.rank))
            part: Any = model.table
            found = [model.state_dict()[NAME], part.state_dict()["weight"]]
            found.append(session.master_state_dict()[NAME])
            assert 0 not in optimizer.state_dict()["state"]  # it is in save_tables()'s files
            assert found[0].is_meta or torch.equal(found[0], found[1])
            return found

    wanted = run_plain(with_optimizer(begun(Words)), train_classifier, merge(ranks(2))).model
    for rank, found in enumerate(run_cluster(2, work)):
        for table in found:
            assert table.shape == (ROWS, 6)
            assert table.is_meta == (whole == "none" or (whole == "rank0" and rank == 1))
            if not table.is_meta:
                torch.testing.assert_close(table, wanted[NAME], rtol=2e-4, atol=2e-5)


def test_a_state_dict_without_a_choice_is_an_error() -> None:
    build = with_optimizer(remote(Words), torch.optim.Adagrad)
    model, optimizer = build_seeded(build)
    with foreprop.parallelize(model, optimizer, world=worlds(1)[0], ema=0.9) as session:
        train_classifier(model, optimizer, words_of(0))
        for ask in (
            model.state_dict,
            optimizer.state_dict,
            session.ema_state_dict,
            session.master_state_dict,
        ):
            with pytest.raises(ConfigError, match=r"table\.weight.*whole_tables='all'.*save_tab"):
                ask()
        train_classifier(model, optimizer, words_of(0))


def test_a_state_dict_without_the_table_loads_and_leaves_it_alone() -> None:
    build = with_optimizer(remote(Words), torch.optim.Adagrad)
    model, optimizer = build_seeded(build)
    with foreprop.parallelize(
        model, optimizer, world=worlds(1)[0], whole_tables="none", ema=0.5
    ) as session:
        train_classifier(model, optimizer, words_of(0))
        saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
        averages = session.ema_state_dict()
        buffer = io.BytesIO()
        torch.save(saved[0], buffer)
        assert buffer.tell() < 10_000
        train_classifier(model, optimizer, words_of(1))
        before = session.rows(NAME, torch.arange(ROWS))
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        session.load_ema_state_dict(averages)
        assert torch.equal(session.rows(NAME, torch.arange(ROWS)), before)
        assert torch.equal(model.out.weight, saved[0]["out.weight"])  # type: ignore[union-attr, arg-type]
        train_classifier(model, optimizer, words_of(1))
        with pytest.raises(ConfigError, match=r"values for table\.weight.*load_tables"):
            model.load_state_dict({**saved[0], NAME: before})
        with pytest.raises(ConfigError, match=r"have values for table\.weight.*load_tables"):
            session.load_ema_state_dict({**averages, NAME: before})


# What a user sees of it, and wrong use.
def test_the_parameter_stays_on_the_meta_device() -> None:
    model: Any
    model, optimizer = build_seeded(with_optimizer(remote(Words)))
    parameter = model.table.weight
    with foreprop.parallelize(model, optimizer, world=worlds(1)[0], whole_tables="none"):
        train_classifier(model, optimizer, words_of(0))
        assert model.table.weight is parameter
        assert isinstance(parameter, nn.Parameter)
        assert parameter.is_meta
        assert parameter.shape == (ROWS, 6)
        assert "meta" in repr(parameter)
        assert sum(p.numel() for p in model.parameters()) == ROWS * 6 + 7 * CLASSES
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert type(copied.table.weight) is nn.Parameter
            assert copied.table.weight.is_meta
            assert not copied.table._state_dict_pre_hooks or copied.state_dict()
    assert type(parameter) is nn.Parameter
    assert parameter.grad is None


def test_a_row_that_is_not_there_is_named() -> None:
    model, optimizer = build_seeded(with_optimizer(remote(Words)))
    with foreprop.parallelize(model, optimizer, world=worlds(1)[0]) as session:
        for bad in (ROWS, -1):
            with pytest.raises(IndexError, match=rf"row {bad} of table\.weight is looked up"):
                model(torch.tensor([[3, bad]]))
        train_classifier(model, optimizer, words_of(0))
        assert session.stats()["steps"] == 4


def test_other_uses_are_an_error() -> None:
    model: Any
    model, optimizer = build_seeded(with_optimizer(remote(Words)))
    with foreprop.parallelize(model, optimizer, world=worlds(1)[0]):
        weight, words = model.table.weight, torch.tensor([[1]])
        for use in (
            lambda: F.linear(torch.ones(2, 6), weight),
            lambda: weight.sum(),
            lambda: weight[3],
            lambda: weight.mul_(2),
            lambda: torch.cat([weight, weight]),
            lambda: nn.init.zeros_(weight),
            lambda: torch.embedding(weight, words),
            lambda: model.to("cpu"),
        ):
            with pytest.raises(ConfigError, match=r"table\.weight is on the meta device and its"):
                use()
        with pytest.raises(ConfigError, match=r"max_norm is 1\.0 in a look-up of table\.weight"):
            F.embedding(words, weight, max_norm=1.0)
        with pytest.raises(ConfigError, match="scale_grad_by_freq is True"):
            F.embedding(words, weight, scale_grad_by_freq=True)
        train_classifier(model, optimizer, words_of(0))


def test_use_between_backward_and_step_is_an_error() -> None:
    model, optimizer = build_seeded(with_optimizer(remote(Words)))
    batches = words_of(0)
    with foreprop.parallelize(model, optimizer, world=worlds(1)[0]) as session:
        train_classifier(model, optimizer, batches)
        optimizer.zero_grad()
        F.cross_entropy(model(batches[0][0]), batches[0][1]).backward()
        with pytest.raises(TrainingLoopError, match=r"table\.weight is used between"):
            session.set_rows(NAME, torch.tensor([1]), torch.ones(1, 6))
        with pytest.raises(TrainingLoopError, match="is used between"):
            model(batches[0][0])
        optimizer.step()


def _refused(build: Build, match: str, **settings: Any) -> None:
    model, optimizer = build_seeded(build)
    with pytest.raises(ConfigError, match=match):
        foreprop.parallelize(model, optimizer, world=worlds(1)[0], **settings)
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


class DenseOnMeta(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(3, 3, device="meta")
        self.norm = nn.BatchNorm1d(3)


class BufferOnMeta(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(3, 3)
        self.register_buffer("mean", torch.empty(3, device="meta"))


def _without_the_table() -> tuple[nn.Module, torch.optim.Optimizer]:
    model: Any = remote(Words)()
    return model, torch.optim.SGD(model.out.parameters(), lr=0.1)


def test_what_is_refused() -> None:
    todo = r"where only the weights of embeddings may be .*module\.to_empty\(device='cpu'\)"
    _refused(
        with_optimizer(DenseOnMeta),
        rf"out\.weight, parameter out\.bias are on the meta device, {todo}",
    )
    _refused(with_optimizer(BufferOnMeta), rf"buffer mean is on the meta device, {todo}")
    _refused(_without_the_table, rf"parameter table\.weight is on the meta device, {todo}")
    dense = remote(lambda: Words(sparse=False))
    _refused(with_optimizer(dense), r"parameter table\.weight .* have sparse=True")
    words = remote(Words)
    _refused(with_optimizer(words), "any architecture but 'ring'", architecture="ring")
    _refused(with_optimizer(words), r"table\.weight is on.*, and", dense_parameters="*")
    _refused(with_optimizer(words, torch.optim.Adam), "optimizer is Adam, which cannot be used")
    _refused(with_optimizer(words, momentum=0.9), "momentum of parameter group 0")
    _refused(with_optimizer(words), r"table_init has 'normal\(1\)'", table_init="normal(1)")


class TwoTables(nn.Module):
    def __init__(self, rows: int = ROWS, *, sparse: bool = True, device: str = "meta") -> None:
        super().__init__()
        options: Any = {"sparse": sparse, "device": device}
        self.first = nn.EmbeddingBag(rows, CLASSES, **options)
        self.second = nn.EmbeddingBag(rows, CLASSES, **options)


def _with_options() -> nn.Module:
    model = TwoTables(device="cpu")
    model.first.max_norm, model.second.max_norm = 1.0, 2.0
    model.second.scale_grad_by_freq = True
    return model


def test_all_tables_that_are_refused_alike_are_named() -> None:
    both = r"parameter first\.weight, parameter second\.weight are on the meta device"
    _refused(with_optimizer(lambda: TwoTables(sparse=False)), both)
    _refused(with_optimizer(TwoTables), both, architecture="ring")
    many = r"parameter 0\.bias, .* parameter 9\.bias and 4 more are on the meta device"
    _refused(with_optimizer(lambda: nn.Sequential(*(DenseOnMeta().out for _ in range(12)))), many)
    both = r"sparse gradients of first\.weight, second\.weight: it moves rows"
    _refused(with_optimizer(TwoTables, torch.optim.Adam), both)
    dense: Any = {"sparse_parameters": "*"}
    _refused(with_optimizer(lambda: TwoTables(sparse=False), torch.optim.Adam), both, **dense)
    _refused(
        with_optimizer(_with_options),
        r"max_norm=1\.0 of first\.weight, max_norm=2\.0 of second\.weight,"
        r" scale_grad_by_freq=True of second\.weight, which cannot .* name first\.weight,"
        r" second\.weight in dense_parameters",
    )


def test_all_tables_that_nobody_gets_are_named(tmp_path: Path) -> None:
    """And all that do not fit a folder."""
    model, optimizer = build_seeded(with_optimizer(TwoTables))
    with foreprop.parallelize(model, optimizer, world=worlds(1)[0]) as session:
        both = rf"the rows of first\.weight \({ROWS} rows\), second\.weight \({ROWS} rows\): say"
        with pytest.raises(ConfigError, match=both):
            model.state_dict()
        session.save_tables(tmp_path / "tables")
    model, optimizer = build_seeded(with_optimizer(lambda: TwoTables(7)))
    with foreprop.parallelize(model, optimizer, world=worlds(1)[0]) as session:
        both = r"do not fit: shape of first\.weight is .*; shape of second\.weight is "
        with pytest.raises(ConfigError, match=both):
            session.load_tables(tmp_path / "tables")


def test_ranks_that_differ_in_it_are_told() -> None:
    def work(world: World) -> None:
        model, optimizer = build_seeded(with_optimizer(remote(Words)))
        seed = 3 if world.rank else 0
        settings: dict[str, Any] = {"join_timeout_s": 10, "table_seed": seed}
        with foreprop.parallelize(model, optimizer, world=world, **settings):
            pass

    with pytest.raises(ForepropError, match=r"parameters\[0\] \(table\.weight\)\.init\.key: "):
        run_cluster(2, work)


def test_a_session_without_remote_tables() -> None:
    model, optimizer = build_seeded(with_optimizer(Words))
    with (
        foreprop.parallelize(model, optimizer, world=worlds(1)[0]) as session,
        pytest.raises(ConfigError, match="there are no remote tables"),
    ):
        session.save_tables("nowhere")


def test_a_broken_file_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    def work(world: World, broken: Callable[[Path], object]) -> str:
        model, optimizer = build_seeded(with_optimizer(remote(Words)), world.rank)
        with foreprop.parallelize(model, optimizer, world=world) as session:
            if world.rank == 0:
                train = tmp_path / "tables"
                session.save_tables(train)
                (file,) = train.glob("*.pt")
                broken(file)
            with pytest.raises(ConfigError) as raised:
                session.load_tables(tmp_path / "tables")
        return str(raised.value)

    for told in run_cluster(2, lambda world: work(world, Path.unlink)):
        assert re.search(r"are not complete: table-0-0-\w{8}\.pt is missing", told)
    for told in run_cluster(2, lambda world: work(world, lambda file: file.write_text("no"))):
        assert re.search(r"table-0-0-\w{8}\.pt cannot be read as a part of tables", told)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # dynamo looks at it
def test_compiled_code_around_it() -> None:
    """Look-ups are left to ordinary code; without that it is an error, which says so."""
    model: Any
    model, optimizer = build_seeded(with_optimizer(remote(Words)))
    with foreprop.parallelize(model, optimizer, world=worlds(1)[0], whole_tables="all"):
        with pytest.raises(Exception, match=r"table.forward = torch.compiler.disable"):
            train_classifier(torch.compile(model, backend="eager"), optimizer, words_of(0))
        torch.compiler.reset()
        model.table.forward = torch.compiler.disable(model.table.forward)
        train_classifier(torch.compile(model, backend="eager"), optimizer, words_of(0))
        got = copy.deepcopy(dict(model.state_dict()))
    torch.compiler.reset()
    wanted = run_plain(with_optimizer(begun(Words)), train_classifier, words_of(0)).model
    check_close(got, wanted)
