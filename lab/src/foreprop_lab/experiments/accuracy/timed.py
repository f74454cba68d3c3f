"""Add the simulated times of steps to trainings with codecs, which were trained without a clock.

Values are the same whatever moves the bytes, so a network only changes the time of a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from foreprop_lab.experiments.accuracy.steptimes import PROFILES, SYSTEM, Clock, synchronous_step_s
from foreprop_lab.experiments.accuracy.studies import Run, Trained, task_of
from foreprop_lab.experiments.accuracy.training import EXACT, Point


def timed(trained: Sequence[Trained], clock: Clock) -> list[Trained]:
    """The trainings with times, on as many nodes as they had, by their models' profiles."""
    return [_timed(each, clock) for each in trained]


def steps_of(run: Run) -> int:
    """The number of a synchronous training's steps. Loads the data."""
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
