"""How the demo's systems are chosen and summed up."""

from __future__ import annotations

from foreprop.demo.run import Found, Outcome, summarise, table
from foreprop.demo.training import Block, DemoSetting, Trained


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
