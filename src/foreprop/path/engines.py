"""What a session and its parameters ask of an engine: of servers, of collectives, or of both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from foreprop.core.manifest import ParameterInfo
from foreprop.path.progress import Counters, Progress


class Engine(Protocol):
    """One rank's part in the synchronisation of parameters, by number and step."""

    @property
    def parameters(self) -> Sequence[ParameterInfo]: ...
    @property
    def progress(self) -> Progress: ...
    @property
    def counters(self) -> Counters: ...
    @property
    def every_parameter(self) -> bool:
        """Whether each step needs word of every parameter, also of one without gradients."""

    @property
    def is_rank_zero(self) -> bool: ...
    @property
    def failed(self) -> bool: ...
    @property
    def queue_depth(self) -> int: ...

    def push(self, parameter: int, step: int, *, flags: int = 0, with_value: bool = False) -> None:
        """A parameter's gradient may be taken, or there is none in this step. Any thread."""

    def is_complete(self, parameter: int) -> bool: ...
    def wait(self, parameter: int, step: int) -> None:
        """Block until the parameter's update is in; raises what went wrong meanwhile."""

    def grad_norm(self, step: int) -> float | None:
        """The global gradient norm before clipping; blocks until it is known, None if it is not
        needed.
        """

    def start_step(self) -> None:
        """The next forward pass begins."""

    def end_step(self, step: int) -> None:
        """All parameters of a step have been pushed."""

    def learn_priorities(self, order: Sequence[int]) -> None:
        """The parameters in the order of their first use in the forward pass."""

    def publish_blob(self, which: int, step: int, data: bytes) -> None:
        """Rank 0: leave bytes for whoever asks."""

    def fetch_blob(self, which: int, step: int) -> memoryview:
        """Rank 0's bytes of this step; blocks until they are there."""

    def raise_if_failed(self) -> None: ...
    def give_up(self, error: BaseException) -> None:
        """Tell all ranks that this one goes on no more, and why."""

    def close(self, *, failure: BaseException | None = None) -> None:
        """Finish what is under way, or tell the others why not. Idempotent."""
