"""A tiny measurement, also where there are no namespaces."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import msgspec

from foreprop.errors import ConfigError
from foreprop.plan.profile import load_profile
from foreprop_lab.lab.run import LabResult, run_lab
from foreprop_lab.setting.labsetting import LabSetting

SYSTEMS = ("p3", "kvstore", "ddp", "ddp-tuned")
SETTING = LabSetting(
    profile=load_profile("resnet110_cifar"),
    systems=SYSTEMS,
    nodes=2,
    scale=16,
    compute_s=0.1,
    iterations=3,
    warm_up=1,
    sample_network=True,
)


def tell(result: LabResult) -> dict[str, Any]:
    return {
        "records": msgspec.to_builtins(result.records),
        "samples": result.samples,
        "notices": result.notices,
    }


def fall_back() -> None:
    """A program that is to run where there are no namespaces."""
    try:
        run_lab(replace(SETTING, systems=("ddp", "ddp-tuned")))
    except ConfigError as error:
        refusal = str(error)
    result = run_lab(replace(SETTING, systems=("ddp", "p3")))
    print(json.dumps(tell(result) | {"refusal": refusal}))
