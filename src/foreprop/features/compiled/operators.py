"""Two operators that stand in compiled graphs: a parameter is about to be read, a gradient is done.

Both say that they write to the parameter. So no compiler moves a read of it over them: neither a
forward pass's reads to before the wait, nor a backward pass's to after the gradient has left, from
when on new values may land. The second says so of the gradient, too, where its average may land.
The tensor ``after`` that the first is given ties it to its place between the computations.

What they do is up to the region that runs the graph (`running`). Outside of one they do nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch


class Running(threading.local):
    """The graphs that this thread runs, as `compiled.regions` runs them; None outside of any."""

    forward: Any = None
    """Has `is_read(parameter)`: the next operation of the graph reads it."""
    backward: Any = None
    """Has `is_done(output, gradient)`: this output is a gradient, and computed."""


running = Running()

_library: Any = torch.library.Library("foreprop", "DEF")  # type: ignore[no-untyped-call]
for _schema in (
    "await_values(Tensor(a!)[] parameters, Tensor? after) -> ()",
    "gradient_done(Tensor(a!)[] readers, Tensor(b!) gradient, int output) -> ()",
):
    _library.define(_schema, tags=(torch.Tag.flexible_layout,))  # nothing is copied for them


def _await_values(parameters: Sequence[torch.Tensor], after: torch.Tensor | None) -> None:
    if (forward := running.forward) is not None:
        for parameter in parameters:
            forward.is_read(parameter)


def _gradient_done(readers: Sequence[torch.Tensor], gradient: torch.Tensor, output: int) -> None:
    if (backward := running.backward) is not None:
        backward.is_done(output, gradient)


_library.impl("await_values", _await_values, "CompositeExplicitAutograd")
_library.impl("gradient_done", _gradient_done, "CompositeExplicitAutograd")
for _name in ("await_values", "gradient_done"):  # while a graph is traced they do nothing
    torch.library.register_fake(f"foreprop::{_name}", lambda *_: None, lib=_library)

AWAIT_VALUES: Any = torch.ops.foreprop.await_values.default
GRADIENT_DONE: Any = torch.ops.foreprop.gradient_done.default
