"""``foreprop compare``: real ranks, servers and process groups, for every system."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch.distributed as dist

from foreprop.errors import ConfigError
from foreprop.tools.compare.records import Task
from foreprop.tools.compare.result import Comparison
from foreprop.tools.compare.run import Lines, Request, ScriptFailed, compare
from foreprop.tools.compare.systems import ALONE, DDP, DDP_BF16, USUAL
from foreprop.tools.run.run import Outcome
from foreprop_lab.lab.cluster import Cluster
from foreprop_lab.lab.network import NetworkUnavailable
from foreprop_lab.setting.links import Network
from tests.process.harness import FORKED, ROOT, Zygote, environment, running, torchruns_variables
from tests.process.lab_nodes import tell_pids
from tests.tiers import long_cases

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

SCRIPT = ROOT / "tests" / "process" / "compare_script.py"
FAKE_SSH = ROOT / "tests" / "process" / "fake_ssh.py"
RANK = ROOT / "src" / "foreprop" / "tools" / "compare" / "rank.py"
STEPS, WARM_UP = 6, 2

Compare = Callable[..., Comparison]


@pytest.fixture
def comparing(zygote: Zygote, tmp_path: Path) -> Compare:
    """Compares with two ranks that are forked, not started: the launcher has its own tests."""

    def start_with(arguments: list[str]) -> Callable[[Task, Lines], Outcome]:
        def start(task: Task, lines: Lines) -> Outcome:
            folder = tmp_path / f"run-{len(list(tmp_path.glob('run-*')))}"
            folder.mkdir()
            told = [msgspec.json.encode(task).decode(), str(SCRIPT), *arguments]
            return fork_ranks(zygote, folder, told, lines)

        return start

    def run(*arguments: str, systems: tuple[str, ...] = USUAL, **changes: object) -> Comparison:
        settings = {"rounds": 1, "steps": STEPS, "warm_up": WARM_UP, **changes}
        request = Request(
            script=SCRIPT.name,
            systems=systems,
            workers=2,
            machines=1,
            **settings,  # type: ignore[arg-type]
        )
        return compare(request, start_with(list(arguments)), tmp_path / "logs")

    return run


def fork_ranks(zygote: Zygote, folder: Path, arguments: list[str], lines: Lines) -> Outcome:
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    with running(folder) as run:
        for rank in range(2):
            told = torchruns_variables(rank, store.port, local_size=2)
            told |= {"TMPDIR": str(run.temporary), "FORK_SERVERS": str(1 - rank)}
            variables = environment(run.mark, told)
            run.start(zygote, variables, script=FORKED, arguments=[str(RANK), *arguments])
        run.wait()
        run.check_nothing_left()
        for rank, path in enumerate(run.outputs):
            for line in path.read_bytes().splitlines():
                lines.write(b"[%d] %s\n" % (rank, line))
        failed = [code for code in run.codes() if code]
    del store
    return Outcome(failed[0], "a rank failed") if failed else Outcome(0)


@pytest.mark.parametrize("systems", [(DDP, "p3"), *long_cases(USUAL)], ids=len)
def test_all_systems_train_alike(comparing: Compare, systems: tuple[str, ...]) -> None:
    """The bits of two ranks' sums do not depend on who adds them up; bf16 rounds."""
    found = comparing("20", systems=systems)
    rows = {row.system: row for row in found.rows}
    assert {name: row.error for name, row in rows.items()} == dict.fromkeys(systems, "")
    assert {row.steps for row in rows.values()} == {STEPS}
    same = {name: rows[name].losses for name in systems if name not in (ALONE, DDP_BF16)}
    assert same == dict.fromkeys(same, "equal")
    if DDP_BF16 in systems:
        assert 0 < (rows[DDP_BF16].loss_difference or 0) < 0.1
    first = {run.system: [rank.losses[0] for rank in run.ranks] for run in found.runs}
    assert len({tuple(losses) for losses in first.values()}) == 1
    assert rows[DDP].over_ddp == pytest.approx(1)
    sent = {name: rows[name].sent_bytes_per_step or 0 for name in systems}
    assert min(sent[name] for name in same) > 0


@pytest.mark.long
def test_half_the_bytes_stand_beside_ddps_half(comparing: Compare) -> None:
    systems = (DDP, DDP_BF16, "p3", "p3-bf16", "p3+auto")
    rows = {row.system: row for row in comparing("20", systems=systems).rows}
    assert {name: row.error for name, row in rows.items()} == dict.fromkeys(systems, "")
    assert 0 < (rows["p3-bf16"].loss_difference or 0) < 0.1
    sent = {name: rows[name].sent_bytes_per_step or 0 for name in systems}
    # all of this model is one pack, whose one head p3-bf16 has for each parameter
    assert max(sent["p3"], sent["p3-bf16"]) < sent[DDP]


@pytest.mark.long
def test_accumulation_is_close(comparing: Compare) -> None:
    """In its first step DDP reduces twice, before it knows: another order of the same sum."""
    found = comparing("30", "accumulate", systems=(DDP, "p3"))
    assert [row.error for row in found.rows] == ["", ""]
    assert (found.rows[1].loss_difference or 0) < 1e-5


@pytest.mark.long
@pytest.mark.parametrize("end", ["none", "tidy"])
def test_a_script_that_ends_early_is_counted_as_far_as_it_goes(
    comparing: Compare, end: str
) -> None:
    """Tidy: it has a process group, and ends that and the session itself."""
    found = comparing("5", end, systems=(DDP, "p3"))
    assert [row.steps for row in found.rows] == [3, 3]
    assert "ends by itself: of a run 3 steps count, not 6" in found.notices[0]
    assert [row.losses for row in found.rows] == ["equal", "equal"]


@pytest.mark.long
def test_a_script_with_too_few_steps_is_told_so(comparing: Compare) -> None:
    found = comparing("3", systems=("p3",))
    assert "made 3 steps, and 2 of them are not counted" in found.rows[0].error


@pytest.mark.long
def test_random_numbers_that_differ_are_found(comparing: Compare) -> None:
    found = comparing("20", "unseeded", systems=(DDP, "p3"))
    assert any("draws other random numbers" in notice for notice in found.notices)
    assert found.rows[1].losses == "other draws"


@pytest.mark.long
def test_a_script_without_the_two_lines_is_refused(comparing: Compare) -> None:
    with pytest.raises(ConfigError, match=r"without calling foreprop\.parallelize"):
        comparing("10", "bare", systems=(DDP, "p3"))
    with pytest.raises(ScriptFailed, match="25 optimizer steps without calling"):
        comparing("40", "bare", systems=(DDP, "p3"))


@pytest.mark.long
def test_a_script_that_fails_by_itself_is_run_once(comparing: Compare) -> None:
    with pytest.raises(ScriptFailed, match=r"before parallelize\(\) returned: .*no data here"):
        comparing("10", "early", systems=(DDP, "p3"))


@pytest.mark.long
@pytest.mark.parametrize("system", [DDP, "p3", "ring"])
def test_a_crash_is_told_by_the_rank_that_had_it(comparing: Compare, system: str) -> None:
    found = comparing("20", "crash", systems=(system,), rounds=2)
    assert "rank 1: ValueError: the third batch is bad" in found.rows[0].error
    assert len(found.runs) == 1, "a system that failed is not tried again"


@pytest.mark.long
def test_what_ddp_cannot_see_is_an_error_of_ddp_alone(comparing: Compare) -> None:
    found = comparing("20", "elsewhere", systems=("p3", DDP))
    assert found.rows[0].error == ""
    assert "parameters were not the same in the end: DDP averages only" in found.rows[1].error


@pytest.mark.long
def test_a_ddp_of_the_scripts_own_is_refused(comparing: Compare) -> None:
    found = comparing("20", "ddp", systems=(DDP,))
    assert "take that line out for the comparison" in found.rows[0].error


# The command.
@pytest.mark.long
def test_the_command_on_this_machine(zygote: Zygote, tmp_path: Path) -> None:
    with running(tmp_path) as run:
        run.foreprop(
            zygote,
            environment(run.mark, {"TMPDIR": str(run.temporary), "COLUMNS": "60"}),
            *("compare", "--workers-per-node", "2", "--rounds", "1", "--batch", "8"),
            *("--steps", "6", "--warm-up", "2", "--systems", "ddp,p3"),
            *("--out", str(tmp_path / "out"), str(SCRIPT), "20"),
        )
        run.wait(200)
        assert run.codes() == [0], run.output()
        run.check_nothing_left(within_s=60)
        output = run.output()
    assert "samples/s" in output
    assert "itself: equal" in output
    found = msgspec.json.decode((tmp_path / "out" / "results.json").read_bytes(), type=Comparison)
    assert [row.losses for row in found.rows] == ["equal", "equal"]
    assert (tmp_path / "out" / "logs" / "1-p3.log").is_file()


NETWORK = Network(nodes=2, rate_bits_per_s=300e6)


@pytest.fixture
def namespaces() -> Iterator[dict[str, int]]:
    """By address, a process in each node's namespace."""
    try:
        started = Cluster(tell_pids, None, nodes=NETWORK.nodes, network=NETWORK)
    except NetworkUnavailable as error:
        pytest.skip(str(error))
    with started:
        addresses = [NETWORK.address(node) for node in range(NETWORK.nodes)]
        yield dict(zip(addresses, started.ask_all(None), strict=True))


@pytest.mark.long
@pytest.mark.lab
def test_the_command_on_two_hosts(
    zygote: Zygote, tmp_path: Path, namespaces: dict[str, int]
) -> None:
    """Their interfaces count what every machine sends."""
    hosts = tmp_path / "hosts"
    hosts.write_text("\n".join(namespaces))
    told = {"log": str(tmp_path / "logins"), "namespaces": namespaces}
    with running(tmp_path) as run:
        run.foreprop(
            zygote,
            environment(run.mark, {"TMPDIR": str(run.temporary), "FAKE_SSH": json.dumps(told)}),
            *("compare", "--resources", str(hosts), "--ssh", f"{sys.executable} {FAKE_SSH}"),
            *("--rounds", "1", "--steps", "6", "--warm-up", "2", "--systems", "alone,ddp,p3"),
            *("--json", "--out", str(tmp_path / "out"), str(SCRIPT), "20"),
        )
        run.wait(250)
        assert run.codes() == [0], run.output()
    found = msgspec.json.decode((tmp_path / "out" / "results.json").read_bytes(), type=Comparison)
    assert [row.losses for row in found.rows] == ["not compared", "equal", "equal"]
    assert {rank.interface for one in found.runs for rank in one.ranks} == {"eth0"}
    alone, ddp, p3 = (row.sent_bytes_per_step or 0 for row in found.rows)
    assert alone < min(ddp, p3)
