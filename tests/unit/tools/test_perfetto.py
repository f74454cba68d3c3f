"""The file for Perfetto: nothing that it would leave out, and the way of each slice in arrows."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from traced_run import read_as_perfetto, record_run

from foreprop.tools.report.perfetto import Span, exact_ns, merge_traces, place, rates, to_perfetto
from foreprop.tools.report.tracefile import ProcessTrace, read_folder

SLICES, STEPS, RANKS = 3, 6, 2


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("run")
    record_run(folder, steps=STEPS, ranks=RANKS)
    return to_perfetto(read_folder(folder))


def test_perfetto_reads_all_of_it(merged: dict[str, Any]) -> None:
    assert read_as_perfetto(merged["traceEvents"]).failures == []


def span_at(start: float, stop: float, track: int = 5, **more: Any) -> dict[str, Any]:
    at = {"pid": 1, "tid": track, "ts": start, "name": "x", "cat": "c"}
    return {"ph": "X", "dur": stop - start, **at, **more}


def test_the_reader_finds_what_perfetto_leaves_out() -> None:
    def failures(*events: dict[str, Any]) -> int:
        return len(read_as_perfetto(events).failures)

    assert failures(span_at(0, 4), span_at(1, 3), span_at(4, 5), span_at(3, 6, 7)) == 0
    assert failures(span_at(0, 4), span_at(3, 6)) == 1
    assert failures(span_at(0, 1.001), span_at(1.001, 2)) == 0  # cut to 1.000, both
    assert failures(span_at(0.5, 1.001, dur=0.501), span_at(1.001, 2)) == 1
    arrow = {"cat": "slice", "name": "slice", "id": 1, "pid": 1, "tid": 5}
    begin, end = {**arrow, "ph": "s", "ts": 1}, {**arrow, "ph": "f", "bp": "e", "ts": 2}
    assert failures(span_at(0, 4), begin, end) == 0
    assert failures(begin, end) == 2
    assert failures(span_at(0, 4), end) == 1
    name = {"ph": "M", "pid": 1, "tid": 1, "name": "thread_name", "args": {"name": "n"}}
    assert failures({**name, "tid": 2}) == 0
    assert failures(name, {**name, "tid": 0}, {**name, "tid": 2}, {**name, "tid": 2}) == 3
    queued = {"ph": "b", "pid": 1, "cat": "c", "name": "n", "id": "1", "ts": 0}
    assert failures(queued, {**queued, "ph": "e", "ts": 1}) == 0
    assert failures(queued) == 1


@given(st.floats(0, 1e12), st.floats(0, 1e9))
def test_times_stay_what_they_are_where_the_rest_is_cut_off(us: float, more: float) -> None:
    start_ns, stop_ns = exact_ns(us), exact_ns(us + more)
    for at_ns in (start_ns, stop_ns, stop_ns - start_ns):
        assert int(at_ns / 1e3 * 1000.0) == at_ns
        assert int(float(json.dumps(at_ns / 1e3)) * 1000.0) == at_ns
    assert abs(start_ns - us * 1e3) <= 63 + us * 1e-9


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=12))
def test_every_span_gets_a_place_beside_or_within_others(pairs: list[tuple[int, int]]) -> None:
    spans = [
        Span(exact_ns(a), exact_ns(a + length), "c", str(i), {})
        for i, (a, length) in enumerate(pairs)
    ]
    rows = place(spans)
    assert sorted(span for row in rows for span in row) == sorted(spans)
    events = [
        span_at(s.start_ns / 1e3, s.stop_ns / 1e3, n) for n, row in enumerate(rows) for s in row
    ]
    assert read_as_perfetto(events).failures == []


def test_what_overlaps_by_less_than_clocks_tell_shares_a_row() -> None:
    first, second = Span(0, 10_000, "c", "a", {}), Span(9_500, 20_000, "c", "b", {})
    assert len(place([first, second])) == 2
    assert place([first, second], same_ns=1000) == [[first, second._replace(start_ns=10_000)]]


def test_nothing_is_left_out(merged: dict[str, Any]) -> None:
    events = merged["traceEvents"]
    count = defaultdict(int)
    for event in events:
        if event["ph"] in "Xbi":
            count[event["cat"]] += 1
    each = SLICES * STEPS * RANKS
    assert count == {
        **dict.fromkeys(("gradient_ready", "push_queued", "push_sent", "push_received"), each),
        **dict.fromkeys(("reply_queued", "reply_sent", "reply_received"), each),
        "updated": SLICES * STEPS,
        "forward": 2 * STEPS * RANKS,
        "backward": 2 * STEPS * RANKS,
        "wait": (STEPS - 1) * RANKS,
        "step": STEPS * RANKS,
    }
    begun = [event["id"] for event in events if event["ph"] == "b"]
    assert sorted(begun) == sorted(event["id"] for event in events if event["ph"] == "e")
    assert len(set(begun)) == len(begun)


def test_arrows_lead_from_the_push_over_update_and_reply_to_the_first_use(
    merged: dict[str, Any],
) -> None:
    phases, times = defaultdict(list), defaultdict(list)
    for event in merged["traceEvents"]:
        if event["ph"] in "stf":
            phases[event["id"]].append(event["ph"])
            times[event["id"]].append(event["ts"])
    arrows = read_as_perfetto(merged["traceEvents"]).arrows
    assert len(arrows) == SLICES * STEPS * RANKS
    assert all(moments == sorted(moments) for moments in times.values())
    way = ["push_sent", "updated", "reply_sent", "reply_received"]
    ends = [tuple(arrow) for arrow in arrows.values()]
    for number, arrow in arrows.items():
        assert arrow[:4] == way
        assert "".join(phases[number]) == "s" + "t" * (len(arrow) - 2) + "f"
    # conv is used where it is computed, fc where it is waited for; after the last step nowhere
    assert ends.count((*way, "forward")) == (STEPS - 1) * RANKS
    assert ends.count((*way, "wait")) == 2 * (STEPS - 1) * RANKS
    assert ends.count(tuple(way)) == SLICES * RANKS


def test_counters_end_at_nothing(merged: dict[str, Any]) -> None:
    values = defaultdict(list)
    for event in merged["traceEvents"]:
        if event["ph"] == "C":
            values[event["pid"], event["name"]].append((event["ts"], *event["args"].values()))
    names = {name for _, name in values}
    assert names == {
        "push queue",
        "reply queue",
        "pushes under way",
        "link out",
        "link in",
    }
    for samples in values.values():
        assert samples == sorted(samples)
        assert min(value for _, value in samples) >= 0
        assert max(value for _, value in samples) > 0
        assert samples[-1][1] == 0
    assert max(value for key, s in values.items() if key[1] == "push queue" for _, value in s) == 1


def test_rates_keep_the_bytes() -> None:
    spans = [
        Span(0, 3_500_000, "push_sent", "a", {"bytes": 1000}),
        Span(2_000_000, 2_000_000, "push_sent", "b", {"bytes": 500}),
        Span(9_000_000, 9_250_000, "push_sent", "c", {"bytes": 250}),
    ]
    found = rates(spans)
    sent = sum(
        rate * (following[0] - at_ns) / 1e3
        for (at_ns, rate), following in itertools.pairwise(found)
    )
    assert sent / 8 == pytest.approx(1750, rel=0.02)
    assert rates([]) == []


def test_tracks_have_names_and_an_order(merged: dict[str, Any]) -> None:
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in merged["traceEvents"]
        if event["name"] == "thread_name"
    }
    worker = [name for (pid, _), name in sorted(names.items()) if pid == 1]
    assert worker[:3] == ["steps", "compute", "waiting"]
    assert worker[-1] == "moments"
    assert {"push to server 0", "push to server 1", "reply from server 0"} <= set(worker)


def test_sessions_of_one_folder_are_kept_apart(tmp_path: Path) -> None:
    record_run(tmp_path, steps=2)
    for path in list(tmp_path.glob("*.trace.json")):
        name = path.name.replace(".abc.", ".second.")
        (tmp_path / name).write_bytes(path.read_bytes())
    target = tmp_path / "merged.json"
    count = merge_traces(tmp_path, target)
    events = json.loads(target.read_text())["traceEvents"]
    assert len(events) == count
    assert len({event["pid"] for event in events}) == 8
    assert read_as_perfetto(events).failures == []


def process(name: str) -> ProcessTrace:
    return ProcessTrace(
        process=name, session="s", number=0, about={}, threads={}, spans=[], written_s=0.0
    )


@pytest.mark.parametrize(
    ("name", "peer", "changed", "crosses"),
    [
        ("worker 1", 1, {}, False),
        ("worker 1", 0, {}, True),
        ("server 0", 1, {}, True),
        ("server 1", 1, {}, False),
        ("worker 3", 1, {"ranks": 4}, False),
        ("worker 3", 0, {"ranks": 4}, True),
        ("worker 1", 3, {"servers": 4}, False),
        ("worker 1", 1, {"dedicated_servers": 2}, True),
        ("relay 1", 1, {}, True),
        ("worker 1", -1, {}, True),
    ],
)
def test_which_frames_cross_a_link(
    name: str, peer: int, changed: dict[str, int], crosses: bool
) -> None:
    about = {"nodes": 2, "ranks": 2, "servers": 2, "dedicated_servers": 0, **changed}
    assert process(name).crosses(peer, about) is crosses
    assert process(name).crosses(peer, {})


def test_where_clocks_disagree_an_arrow_still_leads_forward(tmp_path: Path) -> None:
    record_run(tmp_path, steps=2)
    traces = []
    for trace in read_folder(tmp_path):
        late_us = 40_000 if trace.process == "server 1" else 0  # that machine's clock is ahead
        spans = [{**span, "ts": span["ts"] + late_us} for span in trace.spans]
        traces.append(dataclasses.replace(trace, spans=spans))
    arrows = defaultdict(list)
    for event in to_perfetto(traces)["traceEvents"]:
        if event["ph"] in "stf":
            arrows[event["id"]].append((event["ts"], event["ph"]))
    assert len(arrows) == SLICES * 2 * RANKS
    for arrow in arrows.values():
        assert arrow == sorted(arrow, key=lambda step: step[0])
        phases = "".join(phase for _, phase in arrow)
        assert phases == "s" + "t" * (len(phases) - 2) + "f"
