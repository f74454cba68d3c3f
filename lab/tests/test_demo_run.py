"""How the demo's systems are chosen and summed up."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from foreprop_lab.demo.run import Found, Outcome, headline, summarise, table, write_results
from foreprop_lab.demo.training import Block, DemoSetting, Trained


def outcome(digest: str, waited_s: float | None) -> Outcome:
    gathered = Outcome(
        trained=[
            Trained(test_accuracy=0.8, weights_sha256=digest),
            Trained(test_accuracy=None, weights_sha256=digest),
        ]
    )
    for _ in range(2):
        gathered.add(Block(step_s=[0.4, 0.5, 0.6], waited_s=waited_s))
    return gathered


def found(p3_digest: str = "aa") -> Found:
    outcomes = {
        "kvstore": outcome("aa", 0.3),
        "p3": outcome(p3_digest, 0.15),
        "ddp": outcome("cc", None),
    }
    return Found(
        setting=DemoSetting(workers=2), compute_s=0.3, rate_bits_per_s=1e8, outcomes=outcomes
    )


def test_ddp_runs_only_on_real_links() -> None:
    assert DemoSetting().systems == ("kvstore", "p3", "ddp")
    assert DemoSetting(paced=True).systems == ("kvstore", "p3")


def test_blocks_add_up_and_an_unknown_wait_stays_unknown() -> None:
    kvstore, ddp = (summarise(name, found()) for name in ("kvstore", "ddp"))
    assert kvstore.waiting_share is not None
    assert round(kvstore.waiting_share, 6) == 0.2
    assert ddp.waiting_share is None
    assert not ddp.sums_alike
    assert ddp.step_s_median == 0.5


def test_the_caption_compares_the_presets_only() -> None:
    for digest, told in (("aa", "final weights identical among"), ("bb", "FINAL WEIGHTS DIFFER")):
        run = found(digest)
        shown = table([summarise(name, run) for name in run.outcomes], run)
        assert str(shown.caption).startswith(told)


def slower(step_s: float) -> Outcome:
    return Outcome(
        step_s=[step_s * factor for factor in (0.98, 1.0, 1.0, 1.02)],
        waited_s=None,
        trained=[Trained(test_accuracy=0.8, weights_sha256="cc")],
    )


def test_every_system_is_compared_with_ddp_and_the_headline_says_by_how_much() -> None:
    run = found()
    run.outcomes["ddp"] = slower(0.8)
    summaries = [summarise(name, run) for name in run.outcomes]
    (over,) = [column for column in table(summaries, run).columns if column.header == "over ddp"]
    assert list(over.cells) == ["1.60x", "1.60x", "1.00x"]
    told = "p3 trains 1.60x as fast as ddp: 500 ms per step instead of 800"
    assert headline(summaries, run) == told
    run.outcomes["ddp"] = slower(0.55)
    near = headline([summarise(name, run) for name in run.outcomes], run)
    assert near.endswith("(but their ranges overlap: p10 to p90)")


def test_without_ddp_the_first_preset_is_the_baseline() -> None:
    run = found()
    del run.outcomes["ddp"]
    summaries = [summarise(name, run) for name in run.outcomes]
    assert "over kvstore" in [column.header for column in table(summaries, run).columns]
    assert headline(summaries, run).startswith("p3 trains 1.00x as fast as kvstore")


def test_results_have_every_step_and_what_they_were_measured_with(tmp_path: Path) -> None:
    run = replace(found(), setting=DemoSetting(workers=2, rate_bits_per_s=1e8))
    summaries = [summarise(name, run) for name in run.outcomes]
    write_results(tmp_path / "results.json", run, summaries, "foreprop demo")
    written = json.loads((tmp_path / "results.json").read_text())
    assert written["command"] == "foreprop demo"
    assert written["compared_with"] == "ddp"
    assert written["setting"]["workers"] == 2
    assert written["limit_s"] == run.setting.limit_s
    assert [system["preset"] for system in written["systems"]] == ["kvstore", "p3", "ddp"]
    assert written["systems"][1]["step_s"] == run.outcomes["p3"].step_s
    assert written["systems"][0]["over"] == 1.0
