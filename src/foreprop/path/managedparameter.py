"""What a session, the parameters that it manages, and their engines ask of each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from foreprop.cluster.world import World
from foreprop.core.manifest import ParameterInfo
from foreprop.core.norm import SquareSum
from foreprop.path.memory import Memory

if TYPE_CHECKING:
    from foreprop.path.stalereaders import StaleReaders


class Engine(Protocol):
    """One rank's part in the synchronisation of parameters, by the engine's number and step."""

    def push(self, parameter: int, step: int, *, flags: int = 0, with_value: bool = False) -> None:
        """A parameter's gradient may be taken, or there is none in this step. Any thread."""

    @property
    def is_ahead(self) -> bool:
        """Whether averages come so late that room for them need not be kept until then."""

    def is_complete(self, parameter: int) -> bool: ...
    def wait(self, parameter: int, step: int) -> None:
        """Block until the parameter's update is in; raises what went wrong meanwhile."""

    def publish_blob(self, which: int, step: int, data: bytes) -> None:
        """Rank 0: leave bytes for whoever asks."""

    def fetch_blob(self, which: int, step: int) -> memoryview:
        """Rank 0's bytes of this step; blocks until they are there."""


class Watched(Protocol):
    """A parameter as whoever looks at a step sees it."""

    index: int
    name: str
    parameter: torch.nn.Parameter
    counts_rows: bool
    touched_rows: int

    def watch(self) -> None:
        """Report the next differentiable use as the first."""

    def unwatch(self) -> None:
        """Nobody asks any more."""


class ManagedParameter(Watched, Protocol):
    """A parameter as its session sees it: dense, averaged, held by rows, or remote."""

    # What the engine reads and writes.
    @property
    def values(self) -> memoryview: ...
    def take_gradient(self, start_bytes: int, stop_bytes: int) -> Any: ...
    def sent_gradient(self, start_bytes: int, stop_bytes: int) -> memoryview | None: ...
    @property
    def landed(self) -> memoryview: ...
    def land_average(self, gradient: torch.Tensor) -> None: ...

    # The start.
    def before_offering(self) -> None:
        """Rank 0: the values are about to be read."""

    def receive_initial_value(self) -> None:
        """Other ranks: block until rank 0's values are here."""

    # A step.
    @property
    def left(self) -> bool:
        """Whether the coming step's gradient has been sent."""

    def gradient_discarded(self, *, dropped: bool) -> None:
        """`optimizer.zero_grad()`: what has been accumulated and not sent does not count.

        ``dropped``: there is no ``p.grad`` any more; who holds the tensor still waits for it.
        """

    def replace_busy_gradient(self) -> None:
        """`zero_grad(set_to_none=False)`: zeros in new memory while the old is being sent."""

    def finish_step(self, step: int) -> None:
        """`optimizer.step()`: send what has not been sent; check what has."""

    # Its value.
    def check_stepped(self) -> None:
        """Raise if the gradient of a step has been sent that has not been made."""

    def settle(self) -> None:
        """Wait for the pending update, if there is one, and make it visible."""

    def settle_whole(self) -> None:
        """Make every element show the last step's result."""

    def settle_if_stepped(self) -> None:
        """Like `settle`, but leaves alone what still belongs to the coming step."""

    def detach(self) -> None:
        """The session is over: the parameter becomes an ordinary one, whatever is pending."""


class FirstUses(Protocol):
    """Who is told of parameters' first uses."""

    def first_use_begins(self, parameter: Watched) -> None:
        """An operation with a watched parameter begins; `is_first_use` follows, with its result."""

    def is_first_use(self, parameter: Watched, result: Any) -> bool:
        """Whether an operation's result makes this the parameter's first use; notes the order."""


class SessionState(FirstUses, Protocol):
    """What a parameter needs to know of its session."""

    infos: Sequence[ParameterInfo]
    """What the parameters were at `parallelize`, by number."""

    every_parameter: bool
    """Whether each step needs word of every parameter, also of one without gradients."""

    just_frozen: frozenset[int]
    """By number, what has been frozen since the last step: the others still wait for it."""

    world: World
    completed: int
    """Steps that `optimizer.step()` has ended."""

    leaves_rows: bool
    """Whether nobody wants all rows of a table now."""

    reduces_by_kind: bool
    """Whether other things are made of sparse gradients than of dense ones."""

    keeps_averages: bool
    """Whether averages stay as they land, and gradients as they leave: others may need them."""

    stale_readers: StaleReaders | None
    """Told about what is pending, with ``check_stale``."""

    fixed_passes: int | None
    """Backward passes per step as configured; None: to be learned."""

    @property
    def eager(self) -> bool:
        """Whether gradients are pushed during the backward pass, not only at step()."""

    def engine_of(self, parameter: int) -> tuple[Engine, int]:
        """Who synchronises it, and its number there."""

    def memory_of(self, parameter: torch.Tensor) -> Memory:
        """Where the parameter's bytes are for the engine."""

    def begin_pushing(self) -> None:
        """Called before a step's pushes."""

    def check_layout(self, parameter: int, layout: torch.layout) -> None:
        """Raise `ConfigError` if a gradient of this layout cannot be taken."""

    def gradient_ready(self, parameter: Watched) -> None:
        """Autograd has just computed a gradient."""

    def aggregated_gradient(self, parameter: int) -> torch.Tensor:
        """What the last update of the parameter was made with, flat, from who made it."""

    def gradients_read(self) -> None:
        """Somebody reads or edits a gradient that is this rank's own: have all averaged."""

    def square_sums(self, round_: int) -> Sequence[SquareSum]:
        """By parameter, of a round's averages; blocks until the servers have told them."""


class Pusher(Watched, Protocol):
    """The parameter whose gradient it is."""

    def check_gradient(self, gradient: torch.Tensor) -> None:
        """Raise `ConfigError` if it cannot be taken."""

    def push(self, gradient: torch.Tensor | None, step: int) -> None:
        """Hand the gradient, or word that there is none, to the engine."""

    def settle(self) -> None:
        """Wait for the update of the step before."""

    def gradient_follows(self, held: torch.Tensor) -> None:
        """There is another gradient now; somebody holds the last one, and may look at it later."""

    def read_gradient(self, *, in_place: bool) -> None:
        """Somebody reads or edits ``p.grad``."""
