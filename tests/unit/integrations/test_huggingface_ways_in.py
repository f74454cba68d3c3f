"""What `foreprop.integrations` uses of accelerate and transformers is still there, and how it is.

A failure here says which private name has moved; the docstrings of integrations/accelerate.py and
trainer.py say what it is used for.
"""

from __future__ import annotations

import gc
import inspect
from typing import Any

import pytest
import torch
from torch import nn

from foreprop.errors import ConfigError, TrainingLoopError
from foreprop.params.modelhooks import bare_optimizer

accelerate = pytest.importorskip("accelerate", reason="needs pip install foreprop[accelerate]")

from accelerate.optimizer import AcceleratedOptimizer  # noqa: E402
from accelerate.state import AcceleratorState, PartialState  # noqa: E402

from foreprop.integrations.accelerate import ForepropAccelerator  # noqa: E402


@pytest.fixture(autouse=True)
def _no_state_of_accelerate() -> Any:
    """accelerate keeps one state for the process."""
    gc.freeze()  # to free memory it collects garbage: of what the test makes, not of all
    yield
    AcceleratorState._reset_state(True)
    PartialState._reset_state()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_prepare_model_leaves_out_ddp_in_evaluation_mode() -> None:
    signature = inspect.signature(accelerate.Accelerator.prepare_model)
    assert list(signature.parameters) == ["self", "model", "device_placement", "evaluation_mode"]
    source = inspect.getsource(accelerate.Accelerator.prepare_model)
    assert "if not evaluation_mode:" in source
    assert source.index("if not evaluation_mode:") < source.index("DistributedDataParallel(")


def test_prepare_calls_the_methods_that_are_replaced() -> None:
    called = []

    class Noted(accelerate.Accelerator):  # type: ignore[misc]
        def prepare_model(self, *arguments: Any, **options: Any) -> Any:
            called.append("model")
            return super().prepare_model(*arguments, **options)

        def prepare_optimizer(self, *arguments: Any, **options: Any) -> Any:
            called.append("optimizer")
            return super().prepare_optimizer(*arguments, **options)

    model = nn.Linear(2, 1)
    Noted(cpu=True).prepare(sgd(model), model)
    assert called == ["optimizer", "model"]


def test_an_accelerator_keeps_what_it_has_prepared() -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    model = nn.Linear(2, 1)
    _, optimizer = accelerator.prepare(model, sgd(model))
    assert accelerator._optimizers == [optimizer]
    accelerator.free_memory()
    assert accelerator._optimizers == []


def test_an_optimizer_with_a_scaler_takes_its_step_again_when_its_state_is_restored() -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu")
    model = nn.Linear(2, 1)
    inner = sgd(model)
    outer = accelerator.prepare(inner)
    assert type(outer) is AcceleratedOptimizer
    assert bare_optimizer(outer) is inner
    made = []
    inner.step = lambda *_: made.append("ours")  # as a session does
    accelerator.backward(model(torch.ones(1, 2)).sum())
    outer.step()
    assert made == ["ours"]
    assert not outer.step_was_skipped


def test_transformers_makes_its_accelerator_where_it_is_taken_over() -> None:
    trainer = pytest.importorskip("transformers.trainer", reason="needs foreprop[huggingface]")
    source = inspect.getsource(trainer.Trainer.create_accelerator_and_postprocess)
    assert "self.accelerator = Accelerator(" in source
    assert "self.create_accelerator_and_postprocess()" in inspect.getsource(
        trainer.Trainer.__init__
    )
    whole = inspect.getsource(trainer.Trainer)
    assert "self.accelerator.prepare(self.model, self.optimizer)" in whole
    assert 'logs["loss"] = ' in inspect.getsource(trainer.Trainer._maybe_log_save_evaluate)


# What is refused, and what a world of one does.
def test_a_communication_hook_is_refused() -> None:
    kwargs = accelerate.DistributedDataParallelKwargs(
        comm_hook=accelerate.utils.DDPCommunicationHookType.FP16
    )
    with pytest.raises(ConfigError, match="comm_hook fp16"):
        ForepropAccelerator(cpu=True, kwargs_handlers=[kwargs])


def test_uneven_inputs_are_refused() -> None:
    accelerator = ForepropAccelerator(cpu=True)
    with accelerator.join_uneven_inputs([]):
        pass
    with (
        pytest.raises(ConfigError, match="equally many"),
        accelerator.join_uneven_inputs([], even_batches=False),
    ):
        pass


def test_somebody_elses_accelerator_is_not_taken_over() -> None:
    class Own(accelerate.Accelerator):  # type: ignore[misc]
        pass

    with pytest.raises(ConfigError, match="is a Own"):
        ForepropAccelerator.taking_over(Own(cpu=True))


def test_another_clip_than_the_servers_is_refused() -> None:
    accelerator = ForepropAccelerator(cpu=True, foreprop={"clip_grad_norm": 0.5})
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, sgd(model))
    accelerator.backward(model(torch.ones(1, 2)).sum())
    with pytest.raises(ConfigError, match=r"max_norm=1\.0.*clip_grad_norm=0\.5"):
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
    assert accelerator.clip_grad_norm_(model.parameters(), 0.5).isnan()
    optimizer.step()
    assert float(accelerator.clip_grad_norm_(model.parameters(), 0.5)) == pytest.approx(3**0.5)
    accelerator.free_memory()
    assert accelerator.sessions == ()


def test_each_optimizer_gets_the_model_that_it_trains() -> None:
    accelerator = ForepropAccelerator(cpu=True)
    one, other = nn.Linear(2, 1), nn.Linear(3, 1)
    accelerator.prepare(sgd(other))
    assert accelerator.sessions == ()
    accelerator.prepare(one, other, sgd(one))
    assert len(accelerator.sessions) == 2
    accelerator.end_training()
    assert accelerator.sessions == ()


def test_a_model_without_its_optimizer_is_refused_when_it_gets_gradients() -> None:
    class Several(ForepropAccelerator):
        use_distributed = True

    accelerator = Several(cpu=True)
    frozen = nn.Linear(2, 2)
    model, _ = accelerator.prepare(nn.Linear(2, 1), frozen)
    with torch.no_grad():
        seen = frozen(torch.ones(1, 2))
    with pytest.raises(TrainingLoopError, match="gradient of weight, which no session averages"):
        accelerator.backward(model(seen).sum())


def test_what_is_prepared_twice_has_one_session() -> None:
    accelerator = ForepropAccelerator(cpu=True)
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, sgd(model))
    assert accelerator.prepare(model, optimizer) == (model, optimizer)
    assert len(accelerator.sessions) == 1
    accelerator.free_memory()
