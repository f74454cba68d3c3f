"""Architecture, slices or codecs are "auto": measure some steps, then go on as planned."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foreprop.auto.planning import Outlook, Planning
from foreprop.path.optimizer import can_be_served
from foreprop.session.backends import is_served
from foreprop.session.reconnecting import reconnect

if TYPE_CHECKING:
    from foreprop.config import Config
    from foreprop.session.training import Training


class Automatic:
    """One session's plan, from the first measured step to the last one that is compared with it."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._outlook: Outlook | None = None
        self._planning: Planning | None = Planning(
            training.config,
            training.world,
            training.parameters,
            training.infos,
            training.user.candidates,
            type(training.user.model).__name__,
            servable=can_be_served(training.user.optimizer),
            by_workers=training.by_workers,
        )
        training.probe = self._planning.probe

    @property
    def is_planning(self) -> bool:
        return self._planning is not None

    def end_step(self) -> None:
        """After a step: measure the next one, or make and adopt the plan, or see how it did."""
        training = self._training
        if training.completed == 1 and self._planning is None:
            training.checkpoints.forget_start()
        if self._outlook is not None:
            training.report(self._outlook.end_step())
            if self._outlook.is_over:
                self._outlook = None
        if self._planning is None:
            return
        enough = self._planning.end_step()
        if training.probe is not None:
            training.settle_all()  # what is measured is to be the device's time, or the links'
        if enough:
            self._adopt_plan(self._planning)
        elif training.probe is not None:
            training.probe.begin()

    def _adopt_plan(self, planning: Planning) -> None:
        """All ranks alike, after the same step: connect anew if something is to change."""
        training = self._training
        self._planning = training.probe = None
        plan = planning.decide(training.backends.session_id, training.backends.raise_if_failed)
        training.report(plan.text)
        before, training.config = training.config, plan.applied_to(training.config)
        row_wise = {info.name for info in training.infos if info.rows}
        anew = needs_another_backend(before, training.config, planning.nodes)
        if anew or plan.row_wise != row_wise:
            with training.state.quietly():
                reconnect(training, plan.row_wise)
        self._outlook = plan.outlook()


def needs_another_backend(before: Config, after: Config, nodes: int) -> bool:
    """Whether a session must connect anew for these settings, its parameters being as they are."""
    if is_served(after) != is_served(before) or after.codecs != before.codecs:
        return True
    servers = after.servers_on(nodes)
    cuts = {(config.cut_elems(servers), config.shares(servers)) for config in (before, after)}
    return is_served(after) and len(cuts) > 1
