"""Plans that a test decides, for sessions whose architecture, slices or codecs are ``"auto"``."""

from __future__ import annotations

from typing import Any

import pytest

from foreprop.config import Config
from foreprop.plan import planning
from foreprop.plan.planner import PlanSetting
from foreprop.plan.planning import Plan, plan_session


def use_plan(monkeypatch: pytest.MonkeyPatch, **decided: Any) -> list[PlanSetting]:
    """Have this decided, whatever would be; returns what it was to be decided for."""
    asked: list[PlanSetting] = []

    def decide(setting: PlanSetting, config: Config, rows: Any, table: str, **options: Any) -> Plan:
        asked.append(setting)
        plan = plan_session(setting, config, rows, table, **options)
        changes = {"row_wise": plan.row_wise, "step_s": plan.step_s, "text": plan.text}
        return Plan(**(changes | decided))

    monkeypatch.setattr(planning, "plan_session", decide)
    return asked
