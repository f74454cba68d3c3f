"""docs/recipes.md's YAML for Kubernetes: what refers to something else in it fits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

PAGE = Path(__file__).parents[3] / "docs" / "recipes.md"


@pytest.fixture(scope="module")
def resources() -> dict[str, Any]:
    """By kind."""
    found = re.search(r"^```yaml\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert found
    return {one["kind"]: one for one in yaml.safe_load_all(found[1])}


def test_the_service_is_of_the_job_s_pods(resources: dict[str, Any]) -> None:
    service, job = resources["Service"], resources["Job"]
    pod = job["spec"]["template"]["spec"]
    assert service["spec"]["clusterIP"] == "None", "pods have names by a headless Service alone"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"]
    mounted = [mount["name"] for mount in pod["containers"][0]["volumeMounts"]]
    assert mounted == [volume["name"] for volume in pod["volumes"]]


def test_torchrun_is_told_what_the_job_is(resources: dict[str, Any]) -> None:
    job = resources["Job"]
    spec, name = job["spec"], job["metadata"]["name"]
    pod = spec["template"]["spec"]
    *_, command = pod["containers"][0]["command"]
    told = dict(re.findall(r"--([a-z-]+) (\S+)", command))
    assert int(told["nnodes"]) == spec["completions"] == spec["parallelism"]
    assert spec["completionMode"] == "Indexed", "which gives JOB_COMPLETION_INDEX"
    assert told["node-rank"] == '"$JOB_COMPLETION_INDEX"'
    assert told["master-addr"] == f"{name}-0.{pod['subdomain']}"
