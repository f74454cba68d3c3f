"""What a training loop must not do where servers update, and what to do instead.

Servers update as soon as all ranks have sent their gradients, so some loops that plain PyTorch
allows would silently give other results. Here are the errors that they get. Where another optimizer
has the parameter, too, its step may have been meant: then the error says so.
"""

from __future__ import annotations

import gc

import torch

from foreprop.errors import TrainingLoopError
from foreprop.params.parameter import Parameter

_EDIT_HINT = (
    "Set parallelize(..., update='workers'): then every worker applies the optimizer, and gradients"
    " may be read, clipped and edited as with DDP. Or leave it to servers, as staleness and"
    " backup_workers need it: by clip_grad_norm=, clip_grad_value=, scaler=."
)
_ANY_NUMBER_HINT = (
    "Set parallelize(..., update='workers'): then every worker applies the optimizer, and backward"
    " passes may vary, and steps be left out, as with DDP."
)
_CLIP_HINT = f"Servers update it as soon as all ranks have sent theirs. {_EDIT_HINT}"


def read_before_step(owner: Parameter, step: int, *, in_place: bool) -> TrainingLoopError:
    return TrainingLoopError(
        f"the gradient of {owner.name} is {'edited' if in_place else 'read'} between backward() and"
        f" step(), in step {step}, but servers update it as soon as all ranks have sent theirs."
        f"{_another_optimizer(owner)} {_EDIT_HINT}"
    )


def changed_while_sent(name: str) -> TrainingLoopError:
    return TrainingLoopError(
        f"the gradient of {name} was changed while it was being sent. Use"
        " optimizer.zero_grad() (which knows), or zero_grad(set_to_none=True)."
    )


def another_pass(name: str, passes: int) -> TrainingLoopError:
    return TrainingLoopError(
        f"{name} received another gradient after {passes} backward"
        " pass(es), the number of the first steps: servers have been sent those already."
        f" {_ANY_NUMBER_HINT} Or set backward_passes=N to the largest number: fewer are"
        " sent at step()."
    )


def step_left_out(owner: Parameter, step: int) -> TrainingLoopError:
    return TrainingLoopError(
        f"the gradient of {owner.name} was pushed in step {step}, then discarded, and"
        f" optimizer.step() was never called.{_another_optimizer(owner)} {_ANY_NUMBER_HINT} Or"
        " decide before backward() whether to make the step. If some passes are always discarded"
        " (a GAN's generator's, in its discriminator), they must be so from the first two steps on."
    )


def discarded_after_push(name: str) -> TrainingLoopError:
    return TrainingLoopError(
        f"the gradient of {name} was discarded or replaced between backward() and"
        f" step(), after it had been pushed. {_CLIP_HINT}"
    )


def replaced(name: str) -> TrainingLoopError:
    return TrainingLoopError(
        f"the gradient of {name} was replaced between backward() and step(). {_CLIP_HINT}"
    )


def edited(name: str) -> TrainingLoopError:
    return TrainingLoopError(
        f"the gradient of {name} was edited in place between backward() and step(). {_CLIP_HINT}"
    )


def used_before_step(owner: Parameter, step: int) -> TrainingLoopError:
    own, _ = _optimizers(owner)
    whose = f", of the {own} that parallelize() was given" if own else ""
    return TrainingLoopError(
        f"{owner.name} is used between backward() and optimizer.step(), in step"
        f" {step}: servers have been sent its gradient, and may"
        f" replace its value at any moment. Call optimizer.step() first{whose}."
        f"{_another_optimizer(owner)} If there are more"
        " backward passes here than in the first step, or a step was left out:"
        f" {_ANY_NUMBER_HINT}"
    )


def _another_optimizer(owner: Parameter) -> str:
    own, other = _optimizers(owner)
    if not own or not other:
        return ""
    return (
        f" Another optimizer has {owner.name}, too ({other}), whose step() makes none here:"
        f" step the one that parallelize() was given ({own}), or give it the other."
    )


def _optimizers(owner: Parameter) -> tuple[str, str]:
    # the classes of the session's and of another one that have the parameter, or ""
    own = other = ""
    for one in gc.get_objects():
        if issubclass(type(one), torch.optim.Optimizer):
            groups = vars(one).get("param_groups", ())
            if any(p is owner.parameter for group in groups for p in group["params"]):
                if "zero_grad" in vars(one):  # a session has put it there
                    own = type(one).__name__
                else:
                    other = type(one).__name__
    return own, other


def changed_while_pending(name: str) -> TrainingLoopError:
    return TrainingLoopError(
        f"{name} is changed by hand while its update is pending: the update would"
        " overwrite the change. Call session.flush() after optimizer.step(), then change"
        " it, on every rank alike; or set parallelize(..., update='workers'), with which"
        " the update is made first."
    )


UPDATED_SYMPTOM = "modified by an inplace operation"
"""What PyTorch says, among other things, of a value that an update has replaced."""
UPDATED_ADVICE = (
    "foreprop: if the modified tensor is a parameter, this backward pass needs a value that the"
    " parameter's update replaces. Run a forward pass of its own for each backward pass after"
    " optimizer.step() (no retain_graph=True across steps). If one step has more backward passes"
    " than the first had, set parallelize(..., update='workers'), or backward_passes=N to the"
    " largest number. Give a use that takes no gradient a copy of its own:"
    " parameter.detach().clone() instead of parameter.detach()."
)


def add_advice(error: RuntimeError) -> None:
    """Say of autograd's own error, once, that it may need a parameter that has been updated."""
    if UPDATED_SYMPTOM in str(error) and UPDATED_ADVICE not in getattr(error, "__notes__", ()):
        error.add_note(UPDATED_ADVICE)
