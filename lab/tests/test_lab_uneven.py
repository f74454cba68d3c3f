"""The lab's own unevenness: another job's bytes and a slow link, in real namespaces."""

from __future__ import annotations

from dataclasses import replace

import psutil
import pytest

from foreprop.plan import limit
from foreprop_lab.lab.crosstraffic import PROCESS_NAME
from foreprop_lab.lab.run import run_lab
from foreprop_lab.setting.links import CrossTraffic, LinkRate
from foreprop_lab.setting.unevenness import StepLengths
from lab.tests.tiny_lab import SETTING

MODEL_BYTES = limit.model_bytes(SETTING.layers)

pytestmark = [pytest.mark.process, pytest.mark.long, pytest.mark.alone, pytest.mark.lab]


def traffic_processes() -> list[int]:
    found = psutil.process_iter(["name", "pid"])
    return [process.info["pid"] for process in found if process.info["name"] == PROCESS_NAME]


@pytest.mark.parametrize(("duty", "expected"), [(1.0, 0.4), (0.5, 0.2)])
def test_cross_traffic_takes_its_share_and_ends_with_the_lab(duty: float, expected: float) -> None:
    before = traffic_processes()
    seen: list[int] = []
    traffic = CrossTraffic(node=0, share=0.4, period_s=0.2, duty=duty)
    asked = replace(SETTING, systems=("p3",), iterations=5, cross_traffic=(traffic,))
    result = run_lab(asked, progress=lambda _: seen.append(len(traffic_processes())))
    if result.notices:
        pytest.skip(result.notices[0])
    assert max(seen) - len(before) == 2  # one for each direction
    assert traffic_processes() == before
    for way in (1, 2):
        first, last = (result.samples["p3"][place] for place in (0, -1))
        carried = (last[way] - first[way]) * 8 / (last[0] - first[0])
        own = limit.HEADER_FACTOR * 8 * 6 * MODEL_BYTES / last[0]
        assert (carried - own) / asked.rate == pytest.approx(expected, abs=0.15)
    assert result.records[0].uneven == asked.uneven


def test_workers_apart_do_not_have_the_slowest_ones_pace() -> None:
    """In step all take 4 times as long; apart 1.6 times, the harmonic mean of 1 and 4."""
    asked = replace(SETTING, systems=("p3",), slow_nodes=1, slowdown=3.0, compute_s=0.2)
    step_s = {}
    for staleness in (0, "async"):
        result = run_lab(replace(asked, staleness=staleness, iterations=5))
        if result.notices:
            pytest.skip(result.notices[0])
        step_s[staleness] = result.records[0].iteration_s.median
    assert step_s[0] > 3.9 * asked.compute_s
    assert 1.5 * asked.compute_s < step_s["async"] < 0.75 * step_s[0]
    assert result.records[0].staleness == "async"


def test_slow_nodes_links_and_sequences_are_those_of_the_setting() -> None:
    asked = replace(
        SETTING,
        systems=("p3", "ring"),
        slow_nodes=1,
        slowdown=0.5,
        step_lengths=StepLengths(distribution="lognormal", spread=0.3),
        link_rates=(LinkRate(node=1, factor=0.5),),
        iterations=8,
    )
    result = run_lab(asked)
    if result.notices:
        pytest.skip(result.notices[0])
    for record in result.records:
        assert record.limit_s == asked.limit_s > 1.8 * SETTING.limit_s
        assert 0.5 < record.efficiency <= 1.05
    sent = {name: samples[-1] for name, samples in result.samples.items()}
    for elapsed_s, out_bytes, _ in sent.values():
        assert out_bytes * 8 < 1.15 * asked.rate / 2 * elapsed_s + 8 * 100_000
