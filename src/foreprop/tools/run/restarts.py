"""A run that is started again when it fails, with the hosts that answer.

Each try is a `Launcher` of its own: with new processes on every host, a new secret, and a new port
and rendezvous. The one before has ended by then, but for a host that nobody reaches any more; there
it ends by itself, and without the new secret nothing of it is heard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import BinaryIO

from foreprop.errors import ConfigError
from foreprop.quantities import counted
from foreprop.tools.run.plan import Plan, check_reachable
from foreprop.tools.run.rejoins import NodeRange, Rejoins
from foreprop.tools.run.run import Launcher, Outcome


class Restarts:
    """All tries of one ``foreprop run``."""

    def __init__(
        self,
        plan: Plan,
        out: BinaryIO,
        err: BinaryIO,
        *,
        say: Callable[[str], object],
        most: int = 0,
        least_hosts: int | None = None,
        nodes: NodeRange | None = None,
    ) -> None:
        """Try with ``least_hosts`` or more, by default all, and restart at most ``most`` times.

        With ``nodes`` there is one try, and each host's workers have ``most`` restarts of their
        own, while the others go on. ``say`` is told of each restart, and of each host that is left
        out. Raises `ConfigError`.
        """
        if nodes is not None:
            least_hosts = nodes.least
        least_hosts = len(plan.hosts) if least_hosts is None else least_hosts
        if least_hosts > len(plan.hosts):
            raise ConfigError(
                f"min_hosts is {least_hosts}, of {counted(len(plan.hosts), 'host')}; it must be at"
                " most as many"
            )
        self._plan = plan
        self._out, self._err = out, err
        self._say = say
        self._most = 0 if nodes is not None else most
        self._most_rejoins = most
        self._nodes = nodes
        self._least_hosts = least_hosts

    def run(self) -> Outcome:
        """Run, and run again after failures; the outcome is the last try's."""
        before: Outcome | None = None
        for restarts in range(self._most + 1):
            outcome = self._try()
            if outcome.code == 0 or outcome.interrupted or not (restarts or outcome.started):
                return outcome  # what could not be started once is somebody's mistake
            if restarts and (reason := _why_useless(before, outcome)):
                return replace(outcome, failure=f"{outcome.failure}; {reason}")
            if restarts < self._most:
                self._say(f"{outcome.failure}; restart {restarts + 1} of {self._most}")
            before = outcome
        if self._most:
            return replace(
                outcome, failure=f"{outcome.failure}; that was restart {self._most} of {self._most}"
            )
        return outcome

    def _try(self) -> Outcome:
        most = len(self._plan.hosts) if self._nodes is None else self._nodes.most
        absent: dict[str, str] = {}
        while True:
            try:
                plan = without_hosts(self._plan, absent, most)
            except ConfigError as error:
                return Outcome(1, str(error))
            outcome = self._launcher(plan, len(self._plan.hosts) - len(absent)).run()
            if not outcome.absent:
                return outcome
            for name, reason in outcome.absent.items():
                self._say(f"goes on without {name}: {reason}")
            absent |= outcome.absent

    def _launcher(self, plan: Plan, known: int) -> Launcher:
        rejoins = None
        if self._nodes is not None:
            others = [host for host in self._plan.hosts if host not in plan.hosts]
            rejoins = Rejoins(self._nodes, plan.hosts, others, self._most_rejoins)
            plan = replace(plan, hosts_at_start=len(plan.hosts))
            if rejoins.most_workers > sum(host.workers for host in plan.hosts):
                plan = replace(plan, most_workers=rejoins.most_workers)
        spare = known - self._least_hosts
        streams = self._out, self._err
        return Launcher(plan, *streams, spare_hosts=spare, say=self._say, rejoins=rejoins)


def without_hosts(plan: Plan, absent: Mapping[str, str], most: int) -> Plan:
    """The plan with fewer hosts; the first of them has the rendezvous. Raises `ConfigError`."""
    hosts = tuple(host for host in plan.hosts if host.name not in absent)[:most]
    if hosts[0] == plan.hosts[0]:
        return replace(plan, hosts=hosts)
    check_reachable(hosts, plan.here)
    return replace(plan, hosts=hosts, master_address=hosts[0].name)


def _why_useless(before: Outcome | None, now: Outcome) -> str | None:
    """Why another try would end as the last two did; None if it may not."""
    if before is None or before.worker_error is None or now.worker_error is None:
        return None
    step, step_before = now.worker_error.step, before.worker_error.step
    if step is None or step_before is None or before.worker_error.code != now.worker_error.code:
        return None
    if abs(step - step_before) > 1:  # ranks may be one apart, and another one may be the first
        return None
    return f"it ended at step {step} the last time, too, so a restart would not help"
