"""Training loops: accumulation, GANs, evaluation in the middle, several models (issue point 5)."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import foreprop
from foreprop.config import Config
from foreprop.core.wire import Kind, decode_header, sealed
from foreprop.engine.world import World
from foreprop.errors import TrainingLoopError
from tests.cluster import run_cluster, worlds
from tests.conformance.parity import (
    Batch,
    batches_of,
    build_seeded,
    by_servers,
    check_both,
    check_close,
    check_same_bits,
    check_world_of_one,
    check_world_of_two,
    make_batches,
    run_foreprop,
    seeded,
    servers_only,
    small_model,
    train_classifier,
    with_sgd,
)
from tests.tiers import long_cases


# Gradient accumulation.
def _accumulate(passes: Sequence[int]) -> Any:
    """A loop whose steps have so many backward passes, in turn."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]) -> None:
        rest = iter(batches)
        for count in passes:
            optimizer.zero_grad()
            for _ in range(count):
                x, y = next(rest)
                (F.cross_entropy(model(x), y) / count).backward()
            optimizer.step()

    return loop


@pytest.mark.parametrize("passes", [2, 3])
def test_gradient_accumulation(passes: int) -> None:
    check_both(with_sgd(), _accumulate([passes] * 3), batches_of(2, count=9))


@servers_only
def test_a_pass_adds_to_a_gradient_that_is_just_being_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its checksum has been made, and its bytes leave afterwards: it is asked for again."""
    wanted = run_foreprop(with_sgd(), _accumulate([2, 2]), batches_of(2, count=4))
    added, waited = threading.Barrier(2), []
    open_gate = threading.Event()

    def seal(header: bytes, payload: Any, checksum: Any) -> bytes:
        done = sealed(header, payload, checksum)
        if decode_header(done).kind == Kind.PUSH and not open_gate.is_set():
            waited.append(open_gate.wait(60))
        return done

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]) -> None:
        for number, (x, y) in enumerate(batches):
            (F.cross_entropy(model(x), y) / 2).backward()
            if number % 2:
                if added.wait(60) == 0:
                    open_gate.set()
                optimizer.step()
                optimizer.zero_grad()

    monkeypatch.setattr("foreprop.engine.connection.sealed", seal)
    by_python = run_foreprop(with_sgd(), loop, batches_of(2, count=4), plane="python")
    for got, plain in zip(by_python, wanted, strict=True):
        check_same_bits(got.model, plain.model)
    assert waited
    assert all(waited)


def test_fewer_passes_are_flushed_at_step() -> None:
    check_both(with_sgd(), _accumulate([3, 3, 1, 3, 2]), batches_of(2, count=12))


def test_more_passes_are_an_error() -> None:
    model, optimizer = build_seeded(with_sgd())
    with (
        pytest.raises(TrainingLoopError, match="update='workers'"),
        foreprop.parallelize(model, optimizer, world=worlds(1)[0], update="servers"),
    ):
        _accumulate([2, 2, 3])(model, optimizer, make_batches(7))


def test_backward_passes_can_be_set() -> None:
    loop = _accumulate([1, 2, 3, 1, 3])
    check_world_of_one(with_sgd(), loop, make_batches(10), backward_passes=3)
    check_world_of_two(with_sgd(), loop, batches_of(2, count=10), backward_passes=3)


def test_several_losses_with_retain_graph() -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]) -> None:
        for x, y in batches:
            optimizer.zero_grad()
            scores = model(x)
            F.cross_entropy(scores, y).backward(retain_graph=True)
            scores.square().mean().backward()
            optimizer.step()

    check_both(with_sgd(), loop, batches_of(2))


def test_create_graph_and_gradient_penalty() -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]) -> None:
        for x, y in batches:
            optimizer.zero_grad()
            x = x.clone().requires_grad_()
            loss = F.cross_entropy(model(x), y, reduction="sum")
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            ((loss + slope.square().sum()) / len(y)).backward()
            optimizer.step()

    check_both(with_sgd(), loop, batches_of(2))


@servers_only
def test_a_gradient_may_be_written_to_as_soon_as_its_reply_is_in() -> None:
    """Also if the sending thread has not yet noticed that its last frame has left."""
    delayed: list[int] = []

    def delay(stream: Any) -> None:
        send = stream.send

        def send_and_linger(header: bytes, payload: memoryview) -> None:
            send(header, payload)
            delayed.append(len(payload))
            time.sleep(0.02)

        stream.send = send_and_linger

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for x, y in make_batches(4):
            F.cross_entropy(model(x), y).backward()  # in place into the gradient of before
            optimizer.step()

    plain, plain_optimizer = build_seeded(with_sgd(lr=0.01))
    train(plain, plain_optimizer)
    model, optimizer = build_seeded(with_sgd(lr=0.01))
    alone: dict[str, Any] = {"slice_elems": 28}  # one for each parameter: too small to be shared
    alone["plane"] = "python"  # which can be delayed
    with foreprop.parallelize(model, optimizer, world=worlds(1)[0], **alone) as session:
        for stream in session._training.backends.engines[0]._streams:
            delay(stream)
        train(model, optimizer)
        check_same_bits(model.state_dict(), plain.state_dict())
    assert len(delayed) >= 4 * 6


# Evaluation in the middle.
@pytest.mark.parametrize("with_grad", [False, True])
@pytest.mark.parametrize("every", [1, 2])
def test_evaluation_between_steps(with_grad: bool, every: int) -> None:
    def loop(
        model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]
    ) -> list[float]:
        scores = []
        for number, batch in enumerate(batches):
            train_classifier(model, optimizer, [batch])
            if number % every == 0:
                model.eval()
                with torch.set_grad_enabled(with_grad):
                    scores.append(model(batch[0]).detach().sum().item())
                model.train()
        return scores

    check_both(with_sgd(), loop, batches_of(2, count=5))


def test_evaluation_before_training() -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]) -> float:
        with torch.no_grad():
            score = model(batches[0][0]).sum().item()
        train_classifier(model, optimizer, batches)
        return score

    check_both(with_sgd(), loop, batches_of(2))


def test_a_backward_pass_before_training_that_is_thrown_away() -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]) -> None:
        F.cross_entropy(model(batches[0][0]), batches[0][1]).backward()
        train_classifier(model, optimizer, batches)

    check_both(with_sgd(), loop, batches_of(2, count=5))


def test_ema_of_the_parameters() -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]) -> float:
        average = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        for batch in batches:
            train_classifier(model, optimizer, [batch])
            average.update_parameters(model)
        return sum(p.sum().item() for p in average.parameters())

    check_world_of_one(with_sgd(), loop, make_batches())


def test_two_optimizers_for_one_model() -> None:
    def train(model: Any, first: Any, second: Any, batches: Sequence[Batch]) -> None:
        for x, y in batches:
            first.zero_grad()
            second.zero_grad()
            F.cross_entropy(model(x), y).backward()
            first.step()
            second.step()

    def build() -> tuple[Any, Any, Any]:
        with seeded():
            model = small_model()
        first = torch.optim.SGD(model[:2].parameters(), lr=0.1, momentum=0.9)
        return model, first, torch.optim.Adam(model[2:].parameters(), lr=0.01)

    by_rank = batches_of(2)
    plain, plain_first, plain_second = build()
    train(plain, plain_first, plain_second, by_rank[0])
    model, first, second = build()
    world = worlds(1)[0]
    with (
        foreprop.parallelize(model, first, world=world),
        foreprop.parallelize(model, second, world=world),
    ):
        train(model, first, second, by_rank[0])
        check_same_bits(model.state_dict(), plain.state_dict())

    models = [build() for _ in range(2)]

    def work(world: World) -> dict[str, torch.Tensor]:
        model, first, second = models[world.rank]
        with (
            foreprop.parallelize(model, first, world=world),
            foreprop.parallelize(model, second, world=world),
        ):
            train(model, first, second, by_rank[world.rank])
            return {k: v.clone() for k, v in model.state_dict().items()}

    results = run_cluster(2, work)
    check_same_bits(results[1], results[0])


def test_each_of_two_optimizers_for_one_model_is_clipped() -> None:
    """The norm of one's gradients does not wait for those of the other's parameters."""

    def build() -> tuple[Any, list[Any]]:
        with seeded():
            model = nn.ModuleList([small_model(), small_model()])
        return model, [torch.optim.SGD(part.parameters(), lr=0.1) for part in model]

    def train(model: Any, optimizers: Any, batches: Sequence[Sequence[Batch]]) -> Any:
        for together in zip(*batches, strict=True):
            for part, optimizer in zip(model, optimizers, strict=True):
                optimizer.zero_grad()
                losses = [F.cross_entropy(part(x), y) for x, y in together]
                (sum(losses) / len(losses)).backward()
                nn.utils.clip_grad_norm_(part.parameters(), 0.1)
                optimizer.step()
        return [value.detach().clone() for value in model.parameters()]

    by_rank = batches_of(2)

    def work(world: World) -> Any:
        model, optimizers = build()
        with (
            foreprop.parallelize(model, optimizers[0], world=world, update="workers"),
            foreprop.parallelize(model, optimizers[1], world=world, update="workers"),
        ):
            return train(model, optimizers, [by_rank[world.rank]])

    expected = train(*build(), by_rank)
    for found in run_cluster(2, work):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


# GANs, as in PyTorch's DCGAN tutorial.
class _Nets:
    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.netG = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 5))
        self.netD = nn.Sequential(nn.Linear(5, 6), nn.LeakyReLU(0.2), nn.Linear(6, 1))
        self.optD = torch.optim.Adam(self.netD.parameters(), lr=0.01, betas=(0.5, 0.999))
        self.optG = torch.optim.Adam(self.netG.parameters(), lr=0.01, betas=(0.5, 0.999))


def _noise(batches: Sequence[Batch]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(len(x), 3, generator=generator) for x, *_ in batches]


def _loss(scores: torch.Tensor, label: float) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, label))


def _tutorial(nets: _Nets, batches: Sequence[Batch]) -> None:
    for (real, _), noise in zip(batches, _noise(batches), strict=True):
        nets.netD.zero_grad()
        _loss(nets.netD(real), 1.0).backward()
        fake = nets.netG(noise)
        _loss(nets.netD(fake.detach()), 0.0).backward()
        nets.optD.step()
        nets.netG.zero_grad()
        _loss(nets.netD(fake), 1.0).backward()
        nets.optG.step()


def _combined(nets: _Nets, batches: Sequence[Batch]) -> None:
    for (real, _), noise in zip(batches, _noise(batches), strict=True):
        nets.netD.zero_grad()
        fake = nets.netG(noise)
        (_loss(nets.netD(real), 1.0) + _loss(nets.netD(fake.detach()), 0.0)).backward()
        nets.optD.step()
        nets.netG.zero_grad()
        _loss(nets.netD(fake), 1.0).backward()
        nets.optG.step()


def _zeroed_after_step(nets: _Nets, batches: Sequence[Batch]) -> None:
    for (real, _), noise in zip(batches, _noise(batches), strict=True):
        fake = nets.netG(noise)
        (_loss(nets.netD(real), 1.0) + _loss(nets.netD(fake.detach()), 0.0)).backward()
        nets.optD.step()
        nets.optD.zero_grad()
        _loss(nets.netD(fake), 1.0).backward()
        nets.optG.step()
        nets.optG.zero_grad()
        nets.optD.zero_grad()


def _generator_first(nets: _Nets, batches: Sequence[Batch]) -> None:
    for (real, _), noise in zip(batches, _noise(batches), strict=True):
        nets.optG.zero_grad()
        fake = nets.netG(noise)
        _loss(nets.netD(fake), 1.0).backward()
        nets.optG.step()
        nets.optD.zero_grad()
        (_loss(nets.netD(real), 1.0) + _loss(nets.netD(fake.detach()), 0.0)).backward()
        nets.optD.step()


def _frozen_discriminator(nets: _Nets, batches: Sequence[Batch]) -> None:
    for (real, _), noise in zip(batches, _noise(batches), strict=True):
        fake = nets.netG(noise)
        nets.netD.requires_grad_(True)
        nets.optD.zero_grad()
        _loss(nets.netD(real), 1.0).backward()
        _loss(nets.netD(fake.detach()), 0.0).backward()
        nets.optD.step()
        nets.netD.requires_grad_(False)
        nets.optG.zero_grad()
        _loss(nets.netD(fake), 1.0).backward()
        nets.optG.step()


def _critic_more_often(nets: _Nets, batches: Sequence[Batch]) -> None:
    for number, ((real, _), noise) in enumerate(zip(batches, _noise(batches), strict=True)):
        nets.optD.zero_grad()
        (nets.netD(nets.netG(noise).detach()).mean() - nets.netD(real).mean()).backward()
        nets.optD.step()
        for parameter in nets.netD.parameters():
            parameter.data.clamp_(-0.1, 0.1)
        if number % 3 == 0:
            nets.optG.zero_grad()
            (-nets.netD(nets.netG(noise)).mean()).backward()
            nets.optG.step()


GANS = [
    _tutorial,
    _combined,
    _zeroed_after_step,
    _generator_first,
    _frozen_discriminator,
    _critic_more_often,
]


def _train_gan(nets: _Nets, loop: Any, batches: Sequence[Batch], world: World) -> tuple[Any, ...]:
    """(both models' state, the discriminator's totals, whether it was pushed early)"""
    with (
        foreprop.parallelize(nets.netD, nets.optD, world=world) as first,
        foreprop.parallelize(nets.netG, nets.optG, world=world) as second,
    ):
        loop(nets, batches)
        state = {
            **{f"D.{k}": v.clone() for k, v in nets.netD.state_dict().items()},
            **{f"G.{k}": v.clone() for k, v in nets.netG.state_dict().items()},
        }
    return state, first.stats(), second.stats()  # an answer may come before its push is counted


def _plain_gan(loop: Any, batches: Sequence[Batch]) -> dict[str, torch.Tensor]:
    nets = _Nets()
    loop(nets, batches)
    return {
        **{f"D.{k}": v for k, v in nets.netD.state_dict().items()},
        **{f"G.{k}": v for k, v in nets.netG.state_dict().items()},
    }


@by_servers
@pytest.mark.parametrize("loop", GANS, ids=lambda loop: loop.__name__.strip("_"))
def test_gan(loop: Any) -> None:
    steps = 6
    batches = make_batches(steps)
    nets = _Nets()
    state, discriminator, generator = _train_gan(nets, loop, batches, worlds(1)[0])
    check_same_bits(state, _plain_gan(loop, batches))
    # what zero_grad() threw away was never sent: one push per parameter and step, no more
    assert discriminator["steps"] == steps
    ring = Config.resolve().architecture == "ring"
    assert discriminator["pushes"] == (1 if ring else 4) * steps  # in one, they share a chunk
    size_bytes = 4 * sum(p.numel() for p in nets.netD.parameters())
    assert discriminator["pushed_bytes"] == size_bytes * steps
    assert generator["pushes"] == (1 if ring else 6) * generator["steps"]


@pytest.mark.parametrize(
    "loop",
    [_tutorial, _critic_more_often, *long_cases(*GANS[1:-1])],
)
def test_gan_on_two_workers(loop: Any) -> None:
    by_rank = batches_of(2, count=5)
    nets = [_Nets(seed) for seed in range(2)]

    def work(world: World) -> tuple[Any, ...]:
        return _train_gan(nets[world.rank], loop, by_rank[world.rank], world)

    (state, _, _), (other, _, _) = run_cluster(2, work)
    # buffers are those of the last step, and this loop uses the generator more often
    skip = "G.1." if loop is _critic_more_often else "\0"
    check_same_bits(other, state, skip=skip)


@pytest.mark.parametrize("loop", [_tutorial, _combined, _zeroed_after_step, _generator_first])
def test_gan_gradients_are_pushed_during_the_backward_pass(loop: Any) -> None:
    """From the third step on: not only at step(), or there would be nothing to overlap."""
    nets = _Nets()
    early: list[bool] = []
    (world,) = worlds(1)
    with (
        foreprop.parallelize(nets.netD, nets.optD, world=world) as first,
        foreprop.parallelize(nets.netG, nets.optG, world=world),
    ):
        handle = nets.optD.register_step_pre_hook(
            lambda *_: early.append(all(p.gradient.left for p in first._training.parameters))
        )
        loop(nets, make_batches(5))
        handle.remove()
    assert early[2:] == [True] * 3


def test_classifier_gradients_are_pushed_during_the_backward_pass() -> None:
    model, optimizer = build_seeded(with_sgd())
    early: list[bool] = []
    with foreprop.parallelize(model, optimizer, world=worlds(1)[0]) as session:
        handle = optimizer.register_step_pre_hook(
            lambda *_: early.append(all(p.gradient.left for p in session._training.parameters))
        )
        train_classifier(model, optimizer, make_batches(4))
        handle.remove()
    assert early == [True, True, True, True]


def test_two_independent_models() -> None:
    by_rank = batches_of(2)

    def train(pairs: Sequence[tuple[Any, Any]], batches: Sequence[Batch]) -> None:
        for batch in batches:
            for model, optimizer in pairs:
                train_classifier(model, optimizer, [batch])

    def pairs_of() -> list[tuple[Any, Any]]:
        return [build_seeded(with_sgd()), build_seeded(with_sgd(lr=0.05), seed=1)]

    plain = pairs_of()
    train(
        plain,
        [tuple(torch.cat(p) for p in zip(*s, strict=True)) for s in zip(*by_rank, strict=True)],
    )

    def work(world: World) -> list[dict[str, torch.Tensor]]:
        pairs = pairs_of()
        with (
            foreprop.parallelize(*pairs[0], world=world),
            foreprop.parallelize(*pairs[1], world=world, preset="kvstore"),
        ):
            train(pairs, by_rank[world.rank])
            return [{k: v.clone() for k, v in m.state_dict().items()} for m, _ in pairs]

    results = run_cluster(2, work)
    for got, other, (wanted, _) in zip(*results, plain, strict=True):
        check_same_bits(other, got)
        check_close(got, wanted.state_dict())
