"""Trainings with codecs by simulated time: they were trained without a clock.

Values are the same whatever moves the bytes, so a step's time is all that a network adds.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from experiments.accuracy.steptimes import PROFILES, SYSTEM, Clock, synchronous_step_s
from experiments.accuracy.studies import Run, Trained, task_of
from experiments.accuracy.training import EXACT, Point


def timed(trained: Sequence[Trained], clock: Clock) -> list[Trained]:
    """On as many nodes as were trained, with the profile of each task's model."""
    return [_timed(each, clock) for each in trained]


def steps_of(run: Run) -> int:
    """Of a synchronous training. Loads the data."""
    (_, labels), _ = task_of(run).load()
    return run.epochs * (len(labels) // (run.ranks * run.batch))


def _timed(each: Trained, clock: Clock) -> Trained:
    run = each.run
    own = msgspec.structs.replace(clock, profile=PROFILES[run.task], nodes=run.ranks)
    step_s = synchronous_step_s(own, SYSTEM, None if run.codec == EXACT else run.codec)
    whole_s = steps_of(run) * step_s
    course = [
        Point(point.epoch, point.epoch / run.epochs * whole_s, point.score)
        for point in each.outcome.course
    ]
    return Trained(
        run=msgspec.structs.replace(run, clock=own),
        outcome=msgspec.structs.replace(each.outcome, course=course),
    )
