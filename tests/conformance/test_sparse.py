"""Embeddings with sparse gradients: held row by row, and the same training as plain PyTorch's."""

from __future__ import annotations

import copy
import io
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import foreprop
from foreprop.engine.world import World
from foreprop.errors import ConfigError, TrainingLoopError
from foreprop.features.tables.exchange import RowExchange
from foreprop.features.tables.rowparameter import TableRows
from tests.cluster import run_cluster, worlds
from tests.conformance.matrices import few
from tests.conformance.parity import (
    Batch,
    build_seeded,
    by_servers,
    check_close,
    check_same_bits,
    check_world_of_one,
    check_world_of_two,
    run_foreprop,
    run_plain,
    seeded,
    servers_only,
    train_classifier,
)
from tests.conformance.sparse_models import (
    CLASSES,
    ROWS,
    SERVED,
    Bags,
    Pairs,
    Two,
    Words,
    ranks,
    with_optimizer,
    words_of,
)
from tests.tiers import long_cases

pytestmark = servers_only  # each test names the architecture that it needs


# The same training.
@pytest.mark.parametrize(
    ("kind", "architecture"),
    few(
        [
            (Words, torch.optim.Adagrad),
            (Pairs, torch.optim.SparseAdam),  # which takes no dense gradients
            (Bags, torch.optim.SparseAdam),
            *long_cases((Bags, torch.optim.Adagrad), (Pairs, torch.optim.Adagrad)),
        ],
        SERVED,
    ),
)
def test_a_world_of_one_has_the_same_bits(kind: Any, architecture: str) -> None:
    batches = words_of(0)
    check_world_of_one(with_optimizer(*kind), train_classifier, batches, architecture=architecture)


@pytest.mark.parametrize("architecture", ["p2p", *long_cases("hybrid")])
def test_sgd_has_the_same_bits_where_no_row_comes_twice(architecture: str) -> None:
    """Where one does, torch's SGD adds its gradients to the row one by one, we their sum."""
    batches = words_of(0, once=True)
    check_world_of_one(with_optimizer(Words), train_classifier, batches, architecture=architecture)


@pytest.mark.parametrize(
    ("make", "cls", "architecture"),
    few(
        [Words, *long_cases(Bags, Pairs)],
        [torch.optim.SGD, torch.optim.Adagrad],
        [*SERVED, "ring"],
    ),
)
def test_three_ranks_train_as_one_process_with_all_the_data(
    make: Callable[[], nn.Module], cls: type[torch.optim.Optimizer], architecture: str
) -> None:
    build = with_optimizer(make, cls)
    check_world_of_two(build, train_classifier, ranks(3), architecture=architecture)


def test_several_servers_and_parts_have_the_same_bits() -> None:
    """Many parts per push and pull, and shards of uneven size."""
    build = with_optimizer(Words, torch.optim.Adagrad)
    wanted = run_foreprop(build, train_classifier, ranks(2))[0]
    for servers, elems in ((1, 12), (3, 7), (2, 10_000)):
        got = run_foreprop(
            build, train_classifier, ranks(2), servers_per_node=servers, slice_elems=elems
        )
        for trained in got:
            check_same_bits(trained.model, wanted.model)


@pytest.mark.parametrize("preset", ["kvstore", "tensorflow", *long_cases("slicing", "wfbp")])
def test_every_preset(preset: str) -> None:
    build = with_optimizer(Words, torch.optim.Adagrad)
    check_world_of_two(build, train_classifier, ranks(2), preset=preset)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, *long_cases(torch.float64)]
)  # torch has no sparse float16
def test_other_types(dtype: torch.dtype) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Pairs().to(dtype)
        return model, torch.optim.Adagrad(model.parameters(), lr=0.3)

    check_world_of_one(build, train_classifier, words_of(0))
    first, second = run_foreprop(build, train_classifier, ranks(2))
    check_same_bits(first.model, second.model)


def test_the_padding_row_stays() -> None:
    build = with_optimizer(lambda: Words(padding_idx=0))
    check_world_of_two(build, train_classifier, ranks(2))


@pytest.mark.parametrize("architecture", ["hybrid", *long_cases("p2p")])
def test_a_rank_without_look_ups(architecture: str) -> None:
    """Its gradient counts as zeros, in a step that the other ranks make with theirs."""

    def loop(model: Any, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]) -> None:
        for words, labels in batches:
            optimizer.zero_grad()
            if len(words):
                F.cross_entropy(model(words), labels).backward()
            optimizer.step()

    build = with_optimizer(Words)
    by_rank = ranks(2)
    by_rank[1][1] = (torch.empty(0, 4, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
    first, second = run_foreprop(build, loop, by_rank, architecture=architecture)
    check_same_bits(first.model, second.model)

    def halved(model: Any, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]) -> None:
        for number, (words, labels) in enumerate(batches):
            optimizer.zero_grad()
            share = 0.5 if number == 1 else 1.0
            (share * F.cross_entropy(model(words), labels)).backward()
            optimizer.step()

    merged = [
        tuple(torch.cat([a, b]) for a, b in zip(*pair, strict=True))
        for pair in zip(*by_rank, strict=True)
    ]
    check_close(first.model, run_plain(build, halved, merged).model)


def test_accumulated_gradients() -> None:
    def loop(model: Any, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]) -> None:
        for first, second in zip(batches[::2], batches[1::2], strict=True):
            optimizer.zero_grad()
            for words, labels in (first, second):
                F.cross_entropy(model(words), labels).backward()
            optimizer.step()

    build = with_optimizer(Words, torch.optim.Adagrad)
    check_world_of_one(build, loop, words_of(0, 6))
    check_world_of_two(build, loop, [words_of(seed, 6) for seed in range(2)])


def test_only_the_batch_s_rows_cross_the_network() -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5000, 16, sparse=True)

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return self.table(words).mean(1)[:, :CLASSES]

    def work(world: World) -> dict[str, Any]:
        model, optimizer = build_seeded(with_optimizer(Large), world.rank)
        with foreprop.parallelize(model, optimizer, world=world) as session:
            train_classifier(model, optimizer, words_of(world.rank))
            return session.stats()

    table_bytes, rows_bytes = 5000 * 16 * 4, 4 * 20 * (16 * 4 + 4)
    for stats in run_cluster(2, work):
        assert 0 < stats["pushed_bytes"] < rows_bytes + 200
        assert 0 < stats["reply_bytes"] < rows_bytes < table_bytes / 10


# What a user sees of the table.
def _use_and_compare(use: Callable[[nn.Module], torch.Tensor]) -> None:
    """``use`` sees the last step's table on every rank, whatever it is."""

    def loop(model: Any, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]) -> Any:
        seen = []
        for batch in batches:
            train_classifier(model, optimizer, [batch])
            seen.append(use(model).clone())
        return torch.stack(seen)

    build = with_optimizer(Words)
    by_rank = ranks(2)
    results = [trained.result for trained in run_foreprop(build, loop, by_rank)]
    merged = [
        tuple(torch.cat([a, b]) for a, b in zip(*pair, strict=True))
        for pair in zip(*by_rank, strict=True)
    ]
    wanted = run_plain(build, loop, merged).result
    assert torch.equal(results[0], results[1])
    torch.testing.assert_close(results[0], wanted, rtol=2e-4, atol=2e-5)


def _saved(model: nn.Module) -> torch.Tensor:
    data = io.BytesIO()
    torch.save(model, data)
    data.seek(0)
    loaded: Any = torch.load(data, weights_only=False)
    return loaded.table.weight.detach()


USES: dict[str, Callable[[Any], torch.Tensor]] = {
    "state_dict": lambda model: model.state_dict()["table.weight"],
    "index": lambda model: model.table.weight[7].detach(),
    "data": lambda model: model.table.weight.data,
    "copy": lambda model: copy.deepcopy(model).table.weight.detach(),
    "linear": lambda model: F.linear(torch.ones(2, 6), model.table.weight).detach(),
    "module": lambda model: model.table(torch.tensor([3, 3, 39])).detach(),
    "save": _saved,
}
ALIKE: dict[str, Callable[[Any], torch.Tensor]] = {
    "sum": lambda model: model.table.weight.detach().sum(),
    "F.embedding": lambda model: F.embedding(torch.tensor([[5]]), model.table.weight).detach(),
    "bag": lambda model: F.embedding_bag(torch.tensor([[5, 6]]), model.table.weight).detach(),
    "torch.embedding": lambda model: torch.embedding(
        model.table.weight, torch.tensor([5, 6])
    ).detach(),
}


@pytest.mark.parametrize("use", [*USES, *long_cases(*ALIKE)])
def test_no_use_sees_a_stale_row(use: str) -> None:
    _use_and_compare({**USES, **ALIKE}[use])


def test_rows_out_of_range_are_torch_s_error() -> None:
    model, optimizer = build_seeded(with_optimizer(Words))
    with foreprop.parallelize(model, optimizer, world=worlds(1)[0]) as session:
        for bad in (ROWS, -1):
            with pytest.raises(IndexError):
                model(torch.tensor([[bad]]))
        train_classifier(model, optimizer, words_of(0))
        assert session.stats()["steps"] == 4


def test_after_the_session_it_is_an_ordinary_parameter_with_all_rows() -> None:
    def work(world: World) -> torch.Tensor:
        model, optimizer = build_seeded(with_optimizer(Words), world.rank)
        with foreprop.parallelize(model, optimizer, world=world):
            train_classifier(model, optimizer, words_of(world.rank))
        weight: Any = model.table.weight
        assert type(weight) is nn.Parameter
        train_classifier(model, optimizer, words_of(9, 1))  # alone, and as it always was
        return weight.detach()

    first, second = run_cluster(2, work)
    assert torch.equal(first, second)


def test_a_flush_is_no_change_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """After which rank 0 would send the whole table."""
    sent: list[int] = []
    send = RowExchange.send_row_values

    def spy(self: RowExchange, parameter: int, step: int, table: torch.Tensor) -> None:
        sent.append(step)
        send(self, parameter, step, table)

    monkeypatch.setattr(RowExchange, "send_row_values", spy)
    model, optimizer = build_seeded(with_optimizer(Words))
    with foreprop.parallelize(model, optimizer, world=worlds(1)[0]) as session:
        for batch in words_of(0):
            train_classifier(model, optimizer, [batch])
            session.flush()
    assert sent == [0]


# Changes by hand, and checkpoints.
@pytest.mark.parametrize("architecture", SERVED)
def test_changed_by_hand_on_every_rank(architecture: str) -> None:
    def loop(model: Any, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]) -> None:
        for number, batch in enumerate(batches):
            if number == 2:
                with torch.no_grad():
                    model.table.weight.mul_(0.5)
                    model.table.weight[3] = 1.0
            if number == 3:
                model.table.weight.data[4] = 2.0  # leaves no trace
            train_classifier(model, optimizer, [batch])

    build = with_optimizer(Words, torch.optim.Adagrad)
    check_world_of_one(build, loop, words_of(0), architecture=architecture)
    check_world_of_two(build, loop, ranks(2), architecture=architecture)


def test_changed_by_hand_on_one_rank_is_an_error() -> None:
    def work(world: World) -> None:
        model, optimizer = build_seeded(with_optimizer(Words), world.rank)
        with foreprop.parallelize(model, optimizer, world=world):
            batches = words_of(world.rank)
            train_classifier(model, optimizer, batches[:1])
            if world.rank == 1:
                with torch.no_grad():
                    model.table.weight[0] = 0.0  # type: ignore[union-attr, operator]
            train_classifier(model, optimizer, batches[1:])

    with pytest.raises(TrainingLoopError, match=r"table\.weight was changed by hand.*\[1\]"):
        run_cluster(2, work)


@pytest.mark.parametrize(
    ("cls", "architecture"), few([torch.optim.Adagrad, torch.optim.SparseAdam], SERVED)
)
def test_a_checkpoint_goes_on_where_it_was(
    cls: type[torch.optim.Optimizer], architecture: str
) -> None:
    """Saved in the middle by every rank, loaded into a new session: the same bits as without."""
    build = with_optimizer(Pairs, cls)

    def work(world: World) -> list[dict[str, Any]]:
        model, optimizer = build_seeded(build, world.rank)
        batches = words_of(world.rank, 6)
        with foreprop.parallelize(model, optimizer, world=world, architecture=architecture):
            train_classifier(model, optimizer, batches[:3])
            saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
            train_classifier(model, optimizer, batches[3:])
            wanted = copy.deepcopy(model.state_dict())
        model, optimizer = build_seeded(build, world.rank + 5)
        with foreprop.parallelize(model, optimizer, world=world, architecture=architecture):
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            train_classifier(model, optimizer, batches[3:])
            return [wanted, copy.deepcopy(model.state_dict())]

    for wanted, got in run_cluster(2, work):
        check_same_bits(got, wanted)


@pytest.mark.parametrize("architecture", SERVED)
def test_a_checkpoint_takes_nothing_from_workers_that_update(architecture: str) -> None:
    """Who reads gradients has the workers update the dense parameters: they keep their state."""

    def train(world: World, *, saves: bool) -> dict[str, Any]:
        model, optimizer = build_seeded(with_optimizer(Words, torch.optim.Adagrad), world.rank)
        with foreprop.parallelize(model, optimizer, world=world, architecture=architecture):
            for words, labels in words_of(world.rank):
                optimizer.zero_grad()
                F.cross_entropy(model(words), labels).backward()
                model.out.weight.grad.mul_(0.5)
                optimizer.step()
                if saves:
                    optimizer.state_dict()
            return copy.deepcopy(model.state_dict())

    def work(world: World) -> None:
        check_same_bits(train(world, saves=True), train(world, saves=False))

    run_cluster(2, work)


def test_a_state_that_is_loaded_counts_from_the_next_step_on() -> None:
    """Rank 0 loads it while the last step's gradient of the other rank is not there yet."""

    def loop(model: Any, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]) -> None:
        train_classifier(model, optimizer, batches[:1])
        saved = copy.deepcopy(optimizer.state_dict())
        saved["state"][0]["sum"] += 100.0
        if threading.current_thread().name == "rank-1":
            time.sleep(0.5)
        train_classifier(model, optimizer, batches[1:2])
        optimizer.load_state_dict(saved)
        train_classifier(model, optimizer, batches[2:])

    check_world_of_two(with_optimizer(Pairs, torch.optim.Adagrad), loop, ranks(2))


def test_two_optimizers_for_one_model() -> None:
    """SparseAdam for the table, Adam for the rest, each with a session of its own."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.Optimizer]:
        with seeded():
            model = Words()
        dense = torch.optim.Adam(model.out.parameters(), lr=0.1)
        return model, torch.optim.SparseAdam(model.table.parameters(), lr=0.1), dense

    def loop(model: nn.Module, optimizers: Sequence[Any], batches: Sequence[Batch]) -> None:
        for words, labels in batches:
            for optimizer in optimizers:
                optimizer.zero_grad()
            F.cross_entropy(model(words), labels).backward()
            for optimizer in optimizers:
                optimizer.step()

    plain, *own = build()
    loop(plain, own, words_of(0))
    model, *optimizers = build()
    (world,) = worlds(1)
    with (
        foreprop.parallelize(model, optimizers[0], world=world),
        foreprop.parallelize(model, optimizers[1], world=world),
    ):
        loop(model, optimizers, words_of(0))
        check_same_bits(model.state_dict(), plain.state_dict())


# Prefetching.
@pytest.mark.parametrize("workers", [0, *long_cases(1)])
def test_shard_prefetches_the_next_batch_s_rows(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    landed: list[int] = []
    prefetch = TableRows.prefetch

    def spy(self: TableRows) -> None:
        prefetch(self)
        landed.extend(len(pull.numbers) for pull in self._prefetch.pulls)

    monkeypatch.setattr(TableRows, "prefetch", spy)
    words = torch.arange(ROWS).view(10, 4).repeat(2, 1)
    loader = DataLoader(
        TensorDataset(words, torch.zeros(20, dtype=torch.int64)), batch_size=2, num_workers=workers
    )
    (world,) = worlds(1)
    model, optimizer = build_seeded(with_optimizer(Words))
    plain, plain_optimizer = build_seeded(with_optimizer(Words))
    with foreprop.parallelize(model, optimizer, world=world):
        # a world of one is not sharded: as in a larger one, through its loader
        from foreprop.features.tables.lookahead import lookahead

        train_classifier(model, optimizer, lookahead.follow(iter(loader)))  # type: ignore[arg-type]
        train_classifier(plain, plain_optimizer, loader)  # type: ignore[arg-type]
        check_same_bits(model.state_dict(), plain.state_dict())
    assert landed == [8] * 9  # the last batch has no successor


def test_nothing_is_read_ahead_without_a_table() -> None:
    from foreprop.features.tables.lookahead import Lookahead

    read: list[int] = []

    def batches() -> Any:
        for number in range(3):
            read.append(number)
            yield number

    ahead = Lookahead()
    for number in ahead.follow(batches()):
        assert read[-1] == number
    ahead.users = 1
    read.clear()
    seen = []
    for number in ahead.follow(batches()):
        seen.append((number, ahead.current, ahead.upcoming, len(read)))
    assert seen == [(0, 0, 1, 2), (1, 1, 2, 3), (2, 2, None, 3)]


# Held whole, and refusals.
def test_dense_parameters_are_held_whole() -> None:
    build = with_optimizer(Words)
    trained = check_world_of_two(
        build, train_classifier, ranks(2), dense_parameters="nothing, tab*.weight"
    )
    table_bytes = ROWS * 6 * 4
    assert trained[0].stats["pushed_bytes"] >= 4 * table_bytes


def _refused(
    model: nn.Module, optimizer: torch.optim.Optimizer, match: str, **settings: Any
) -> None:
    with pytest.raises(ConfigError, match=match):
        foreprop.parallelize(model, optimizer, world=worlds(1)[0], **settings)
    train = getattr(model, "table", None)
    assert train is None or type(train.weight) is nn.Parameter


def test_optimizers_that_move_untouched_rows() -> None:
    model = Words()
    adam = torch.optim.Adam(model.parameters())
    _refused(model, adam, r"optimizer is Adam, .* sparse gradients of table\.weight.*SparseAdam")
    for name in ("momentum", "weight_decay"):
        sgd = torch.optim.SGD(model.parameters(), **{"lr": 0.1, name: 0.5})
        for architecture in ("p2p", "hybrid", "ring"):
            _refused(model, sgd, f"{name} of parameter group 0 is 0.5", architecture=architecture)


def test_momentum_for_the_other_parameters() -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Words()
        groups = [
            {"params": model.table.parameters(), "momentum": 0.0},
            {"params": model.out.parameters()},
        ]
        return model, torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    check_world_of_one(build, train_classifier, words_of(0, once=True))


def test_max_norm() -> None:
    model = Words(max_norm=1.0)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    _refused(model, sgd, r"max_norm=1\.0.*dense_parameters")


def test_a_dense_gradient_of_a_table() -> None:
    """Tied to a linear layer, a table has gradients everywhere."""
    model, optimizer = build_seeded(with_optimizer(Words))
    session = foreprop.parallelize(model, optimizer, world=worlds(1)[0])
    weight: Any = model.table.weight
    loss = F.linear(torch.ones(2, 6), weight).sum()
    with pytest.raises(ConfigError, match=r"gradient of table\.weight is dense.*dense_parameters"):
        loss.backward()
    session.close()


@by_servers
def test_a_sparse_gradient_of_which_no_module_told() -> None:
    """``F.embedding(sparse=True)`` with a parameter of one's own: held whole."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(ROWS, CLASSES))

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return F.embedding(words, self.table, sparse=True).sum(1)

    check_world_of_two(with_optimizer(Own, torch.optim.Adagrad), train_classifier, ranks(2))
    model, optimizer = build_seeded(with_optimizer(Own, torch.optim.Adam))
    session = foreprop.parallelize(model, optimizer, world=worlds(1)[0])
    with pytest.raises(ConfigError, match=r"optimizer is Adam, .* sparse gradients of table"):
        train_classifier(model, optimizer, words_of(0))
    session.close()


# Chosen by measurement.


@pytest.mark.usefixtures("told_links")
@pytest.mark.parametrize(
    "sparse", [(False, True), *long_cases((True, True), (True, False), (False, False))]
)
@pytest.mark.parametrize("cls", [torch.optim.Adagrad, *long_cases(torch.optim.SGD)])
def test_auto_chooses_by_the_share_of_touched_rows(
    cls: type[torch.optim.Optimizer], sparse: tuple[bool, bool], capfd: pytest.CaptureFixture[str]
) -> None:
    build = with_optimizer(lambda: Two(sparse=sparse), cls, lr=0.05)
    by_rank = [words_of(seed, 8) for seed in range(3)]
    kinds: dict[str, list[str]] = {}

    def loop(model: Any, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]) -> None:
        train_classifier(model, optimizer, batches[:5])
        for name in ("large", "small"):
            module = getattr(model, name)
            kinds.setdefault(name, []).append(f"{module.sparse} {module.weight.grad.layout}")
        train_classifier(model, optimizer, batches[5:])

    ours = run_foreprop(build, loop, by_rank, architecture="auto")
    for name in ours[0].model:
        if "running" not in name:  # local while training
            assert torch.equal(ours[1].model[name], ours[0].model[name]), name
    wanted = run_foreprop(build, train_classifier, by_rank, architecture="ring")[0]
    check_close(ours[0].model, wanted.model, skip="running")
    check_close(_tensors(ours[0].optimizer), _tensors(wanted.optimizer))
    assert ours[0].stats["steps"] == 8
    assert set(kinds["large"]) == {"True torch.sparse_coo"}
    assert set(kinds["small"]) == {"True torch.sparse_coo" if sparse[1] else "False torch.strided"}
    told = capfd.readouterr().err
    assert told.count("embeddings, with bytes") == 1
    (large,) = [line for line in told.splitlines() if line.startswith("large.weight")]
    (small,) = [line for line in told.splitlines() if line.startswith("small.weight")]
    assert "servers, by rows" in large
    assert "1.0000  all-reduce" in small


def _tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {
        f"{number} {name}": torch.as_tensor(value)
        for number, own in sorted(state["state"].items())
        for name, value in own.items()
        if value is not None
    }


def test_auto_alone_is_as_ever() -> None:
    build = with_optimizer(lambda: Two(sparse=(True, False)), torch.optim.Adagrad)
    check_world_of_one(build, train_classifier, words_of(0), architecture="auto")


@pytest.mark.usefixtures("told_links")
def test_auto_leaves_alone_what_an_optimizer_moves_without_gradients() -> None:
    build = with_optimizer(lambda: Words(sparse=False), torch.optim.Adam, lr=0.01)
    check_world_of_two(build, train_classifier, ranks(2), architecture="auto")


def test_sparse_parameters_by_name() -> None:
    build = with_optimizer(lambda: Words(sparse=False))
    trained = check_world_of_two(
        build, train_classifier, ranks(2), sparse_parameters="table.*, other"
    )
    assert trained[0].stats["pushed_bytes"] < 4 * (20 * (6 * 4 + 4) + 64 + 84)
    model = Words(sparse=False)
    adam = torch.optim.Adam(model.parameters())
    _refused(model, adam, "optimizer is Adam", sparse_parameters="table.weight")
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    _refused(model, sgd, "no servers", sparse_parameters="*", architecture="ring")
    assert model.table.sparse is False


# After the sum.
@pytest.mark.parametrize(
    ("architecture", "settings"), few(SERVED, [{"reduction": "sum"}, {"clip_grad_value": 0.002}])
)
def test_the_sum_and_the_clipping_of_elements(architecture: str, settings: dict[str, Any]) -> None:
    def loop(model: Any, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]) -> None:
        for words, labels in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(words), labels).backward()
            optimizer.step()

    def plain(model: Any, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]) -> None:
        for words, labels in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(words), labels)
            (2 * loss if "reduction" in settings else loss).backward()
            if "clip_grad_value" in settings:
                torch.nn.utils.clip_grad_value_(model.parameters(), settings["clip_grad_value"])
            optimizer.step()

    by_rank = ranks(2)
    ours = run_foreprop(with_optimizer(Words), loop, by_rank, architecture=architecture, **settings)
    merged = [
        tuple(torch.cat([a, b]) for a, b in zip(*pair, strict=True))
        for pair in zip(*by_rank, strict=True)
    ]
    wanted = run_plain(with_optimizer(lambda: Words(sparse=False)), plain, merged)
    check_same_bits(ours[1].model, ours[0].model)
    check_close(ours[0].model, wanted.model)


@pytest.mark.parametrize("whole", ["all", "rank0", "none"])
def test_who_gets_whole_tables(whole: str) -> None:
    """In state_dict() and close(); every other use still sees every row."""

    def work(world: World) -> list[torch.Tensor]:
        model: Any
        model, optimizer = build_seeded(with_optimizer(Words), world.rank)
        with foreprop.parallelize(model, optimizer, world=world, whole_tables=whole):
            train_classifier(model, optimizer, words_of(world.rank))
            saved = model.state_dict()["table.weight"].clone()
            copied = copy.deepcopy(model).state_dict()["table.weight"]
            train_classifier(model, optimizer, words_of(world.rank, 1))
            seen = model.table.weight.detach().clone()
            train_classifier(model, optimizer, words_of(world.rank, 1))
        return [saved, copied, seen, model.table.weight.detach()]

    first, second = run_cluster(2, work)
    equal = [torch.equal(a, b) for a, b in zip(first, second, strict=True)]
    assert equal == [whole == "all", True, True, whole != "rank0"]  # none: both as of "seen"
    assert torch.equal(first[0], first[1]) == (whole != "none")
