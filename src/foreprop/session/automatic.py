"""A session whose architecture, slices or codecs are "auto".

It measures some steps, makes a plan from them, connects anew if the plan asks for that, and says
how the steps that follow compare with what was expected.
"""

from __future__ import annotations

from foreprop.config import LOGGER, Config
from foreprop.engine.optimizer import can_be_served
from foreprop.plan.planning import Outlook, Planning
from foreprop.session.backends import is_served
from foreprop.session.meeting import CHOICE, tell_newcomers
from foreprop.session.reconnecting import reconnect
from foreprop.session.training import Training


class Automatic:
    """One session's plan, until the last step that is compared with it. Training thread."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._outlook: Outlook | None = None
        self.planning: Planning | None = Planning(
            training.config,
            training.world,
            training.parameters,
            training.infos,
            training.user.candidates,
            type(training.user.model).__name__,
            servable=can_be_served(training.user.optimizer),
            by_workers=training.by_workers,
        )
        training.probe = self.planning.probe

    def end_step(self) -> None:
        training = self._training
        if training.completed == 1 and self.planning is None:
            training.composition.checkpoints.forget_start()
        if self._outlook is not None:
            training.report(self._outlook.end_step())
            if self._outlook.is_over:
                self._outlook = None
        if self.planning is None:
            return
        enough = self.planning.end_step()
        if training.probe is not None:
            training.settle_all()  # what is measured is to be the device's time, or the links'
        if enough and (training.probe is None or training.composition.meet(CHOICE)):
            self._adopt_plan(self.planning)
        elif training.probe is not None:
            training.probe.begin()

    def _adopt_plan(self, planning: Planning) -> None:
        # all ranks come here after as many steps
        training = self._training
        self.planning = training.probe = None
        elastic, notices = training.config.elastic, training.backends.notices
        plan = planning.decide(
            training.backends.session_id,
            training.backends.raise_if_failed,
            (lambda: notices.members) if elastic and notices is not None else None,
        )
        if plan.text and training.world.rank == (min(notices.members) if notices else 0):
            LOGGER.info("%s", plan.text)
        before, training.config = training.config, plan.applied_to(training.config)
        row_wise = {info.name for info in training.infos if info.rows}
        anew = needs_another_backend(before, training.config, planning.nodes)
        if anew or plan.row_wise != row_wise:
            with training.state.quietly():
                reconnect(training, plan.row_wise)
        elif elastic:
            tell_newcomers(training)
        self._outlook = plan.outlook()


def needs_another_backend(before: Config, after: Config, nodes: int) -> bool:
    """Whether a session must connect anew for these settings, its parameters being as they are."""
    if is_served(after) != is_served(before) or after.codecs != before.codecs:
        return True
    servers = after.servers_on(nodes)
    cuts = {(config.cut_elems(servers), config.shares(servers)) for config in (before, after)}
    return is_served(after) and len(cuts) > 1
