"""How far this worker has come, said to ``foreprop run``, which starts failed runs again."""

from __future__ import annotations

from foreprop.config.otherhosts import tell_agent


def report_step(rank: int, step: int) -> None:
    """A line of a rank and a step."""
    tell_agent(b"%d %d" % (rank, step))
