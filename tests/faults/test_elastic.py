"""Workers of an elastic session that die, or stop, as real processes: the others go on."""

from __future__ import annotations

import hashlib
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from foreprop.core.slicing import Slice
from foreprop.session.stored import SHARED, CheckpointFolder
from tests.countedlogs import counted_by
from tests.faults.kill_points import SERVERS, plan_of, run_plan, start, start_again
from tests.process.elastic_script import Plan, by_arithmetic
from tests.process.harness import Zygote, running, wait_for

pytestmark = [pytest.mark.process, pytest.mark.long, pytest.mark.timeout(240)]


def test_five_of_six_workers_are_killed_at_any_moment(zygote: Zygote, tmp_path: Path) -> None:
    """Rank 0 is one of them: what is left has the bits that the servers' logs say."""
    plan = plan_of(1, workers=6)
    assert 0 in plan.victims
    deaths = run_plan(zygote, tmp_path, plan, 6, forked=False)
    assert len(deaths) == 5
    assert max(each.seconds for each in deaths) < 10


@pytest.mark.parametrize("backups", [0, 1])
def test_a_killed_worker_is_started_again_and_joins(
    zygote: Zygote, tmp_path: Path, backups: int
) -> None:
    """One of six, by SIGKILL: all end with the bits that the servers' logs say.

    Also the values of the last checkpoint, of which the killed one has a part again. With a backup
    worker all meet for each.
    """
    workers, killed = 6, 1
    settings = {"backup_workers": backups} if backups else {}
    deaths = {str(killed): (4, 2, 0.0)}
    plan = Plan(steps=24, deaths=deaths, awaits=8, every=3, settings=settings)
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    with running(tmp_path) as run:
        start(run, zygote, plan, store.port, workers)
        command, first = run.started[0], run.started[1 + killed]
        run.wait(60, but=[each for each in run.started if each is not first])
        assert "died_s" in run.results()[killed]
        start_again(run, zygote, replace(plan, deaths={}), killed, workers)
        run.wait(60, but=[command])
        del store
        run.wait(30)
        results = run.results()
        joined_at = results[killed]["joined_at"]
        assert joined_at > 8
        pieces = [Slice(*piece) for piece in results[0]["pieces"]]
        counted = []
        for index in range(SERVERS):
            own = [piece.number for piece in pieces if piece.server == index]
            counted.append(counted_by(run.folder, index, workers, own))
        for piece in pieces:
            sets = [counted[piece.server].at(piece.number, step) for step in range(1, 25)]
            steps = [step for step, ranks in enumerate(sets, 1) if killed in ranks]
            after = {step for step in steps if step > 5}
            assert set(range(joined_at, 25 if not backups else joined_at + 1)) <= after
            assert min(after) == joined_at
        expected = by_arithmetic(workers, plan.steps, pieces, counted)
        assert {each["sha256"] for each in results.values()} == {expected}, run.output()
        files = CheckpointFolder(run.folder / "checkpoints")
        saved = [files.open(step) for step in files.steps()]
        assert [(each.step, each.is_whole) for each in saved[:2]] == [(24, True), (21, True)]
        values = saved[0].read(SHARED)["sessions"][0]["model"].values()
        weights = b"".join(value.numpy().tobytes() for value in values)
        assert hashlib.sha256(weights).hexdigest() == expected
        run.check_nothing_left()


def test_workers_are_killed_where_two_of_six_are_backups(zygote: Zygote, tmp_path: Path) -> None:
    """Rank 0 and as many as the backups: who is left has met, and has the bits of the logs."""
    workers, victims = 6, {0: 4, 2: 6, 3: 7}
    deaths = {str(rank): (step, 2, 0.0) for rank, step in victims.items()}
    plan = Plan(steps=20, deaths=deaths, pause_s=0.03, settings={"backup_workers": 2})
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    with running(tmp_path) as run:
        start(run, zygote, plan, store.port, workers)
        command = run.started[0]
        run.wait(90, but=[command])
        del store
        run.wait(30)
        results = run.results()
        assert sorted(rank for rank in results if "died_s" in results[rank]) == plan.victims
        alive = [rank for rank in range(workers) if rank not in victims]
        pieces = [Slice(*piece) for piece in results[alive[0]]["pieces"]]
        counted = []
        for index in range(SERVERS):
            own = [piece.number for piece in pieces if piece.server == index]
            counted.append(counted_by(run.folder, index, workers, own))
        sizes = set()
        for piece in pieces:
            for step in range(1, plan.steps + 1):
                ranks = counted[piece.server].at(piece.number, step)
                sizes.add(len(ranks))
                assert not [rank for rank in ranks if victims.get(rank, step) < step]
        assert min(sizes) < workers - 2, "nobody was missed while the others trained"
        expected = by_arithmetic(workers, plan.steps, pieces, counted)
        assert {results[rank].get("sha256") for rank in alive} == {expected}, run.output()
        run.check_nothing_left()


@pytest.mark.alone
def test_a_stopped_worker_comes_back_and_is_told(zygote: Zygote, tmp_path: Path) -> None:
    plan = Plan(steps=12, stops={"1": 5}, settings={"step_timeout_s": 8.0, "stall_report_s": 1.0})
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    with running(tmp_path) as run:
        start(run, zygote, plan, store.port, workers=3)
        command, stopped = run.started[0], run.started[2]
        run.wait(60, but=[command, stopped])
        wait_for(lambda: run.results()[1].get("stopped"), run)
        assert run.exit_codes[run.started[1].pid] == run.exit_codes[run.started[3].pid] == 0
        stopped.send_signal(signal.SIGCONT)
        run.wait(20, but=[command])
        del store
        run.wait(20)
        told = run.results()[1]
        assert told["error"] == "PeerLost", told
        assert "rank 1 was dropped, and the others go on without it" in told["message"]
        results = run.results()
        assert results[0]["sha256"] == results[2]["sha256"]
        run.check_nothing_left()
