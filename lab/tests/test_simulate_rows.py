"""Tables in the simulator: touched rows on the links, their servers, relays, rings beside them."""

from __future__ import annotations

import dataclasses
import statistics
from pathlib import Path

import pytest
from typer.testing import CliRunner

from foreprop.core.parallax import Topology, traffic
from foreprop.errors import ConfigError
from foreprop.plan import limit
from foreprop.plan.deployment import Deployment, ModelledArchitecture, Table
from foreprop.plan.profile import Profile, ProfiledArray
from foreprop.plan.refined import predict
from foreprop.tools.cli.app import app
from foreprop_lab.setting.hosts import Hosts
from foreprop_lab.setting.records import read_records
from foreprop_lab.simulate.rowtables import RowTable
from foreprop_lab.simulate.run import simulate_lab, simulate_system
from foreprop_lab.simulate.setting import SimulatedSetting
from tests.tiers import long_cases

ROWS, ROW_ELEMS, ALPHA = 20_000, 32, 0.05
STEPS = 12
BY_ROWS = ("p3", "kvstore", "tensorflow", "hybrid", "ddp-sparse")


def words(alpha: float = ALPHA) -> Profile:
    """An embedding, dense layers, and a softmax by rows."""
    dense = [
        ProfiledArray(name=f"dense.{i}", shape=(elems,), forward_flops=elems)
        for i, elems in enumerate((40_000, 90_000))
    ]
    tables = [
        ProfiledArray(name=name, shape=(ROWS, ROW_ELEMS), forward_flops=1.0, alpha=alpha)
        for name in ("words.weight", "softmax.weight")
    ]
    return Profile(name="words", arrays=(tables[0], *dense, tables[1]))


def setting(*systems: str, **changes: object) -> SimulatedSetting:
    fields: dict[str, object] = {
        "profile": words(),
        "systems": systems,
        "scale": 1,
        "slice_elems": 5_000,
        "compute_s": 0.2,
        "rate_bits_per_s": 40e6,
        "iterations": 3,
        "warm_up": 1,
        "rows": True,
    }
    return SimulatedSetting(**(fields | changes))  # type: ignore[arg-type]


def sent_bytes(asked: SimulatedSetting) -> float:
    """Of a node in a step, with headers."""
    (system,) = asked.systems
    bucket = 25 * 2**20 if system.startswith("ddp") else None
    simulated = simulate_system(system, asked, Hosts(), steps=STEPS, bucket_bytes=bucket)
    assert all(len(times) == STEPS for times in simulated.step_s)
    return statistics.fmean(simulated.sent_bytes) / STEPS


def expected_bytes(system: str, nodes: int, workers_per_node: int = 1) -> float:
    """By `core.parallax`, with headers, of two tables and the dense arrays."""
    topology = Topology(nodes, workers_per_node)
    table_bytes = ROWS * ROW_ELEMS * 4
    moved = traffic(table_bytes, ROW_ELEMS * 4, ALPHA, topology)
    rows = moved.all_gather if system == "ddp-sparse" else moved.servers
    ranks = nodes if system in ("p3", "kvstore", "tensorflow") else topology.workers
    dense = 2 * (ranks - 1) / ranks * 130_000 * 4
    return limit.HEADER_FACTOR * (2 * rows + dense)


@pytest.mark.parametrize("system", BY_ROWS)
@pytest.mark.parametrize("nodes", [2, *long_cases(4)])
def test_touched_rows_pass_the_links_and_no_others(system: str, nodes: int) -> None:
    sent = sent_bytes(setting(system, nodes=nodes))
    assert sent == pytest.approx(expected_bytes(system, nodes), rel=0.06)


@pytest.mark.parametrize("system", ["p3", "hybrid"])
def test_a_node_s_workers_push_each_row_once(system: str) -> None:
    """1 - (1 - alpha)^3 of all rows, and they are fetched once."""
    sent = sent_bytes(setting(system, workers_per_node=3))
    assert sent == pytest.approx(expected_bytes(system, 4, 3), rel=0.06)


def test_gathered_bytes_take_a_rank_s_processor_one_table_after_the_other() -> None:
    """Two tables' rows of the three others, of 32 elements and a number each."""
    asked, cost = setting("ddp-sparse"), 1e-5

    def step_s(hosts: Hosts) -> float:
        simulated = simulate_system("ddp-sparse", asked, hosts, steps=4, bucket_bytes=2**20)
        return simulated.mean_step_s(1)

    free, slow = step_s(Hosts()), step_s(Hosts(gathered_byte_s=cost))
    gathered_bytes = 3 * ROWS * ALPHA * (ROW_ELEMS * 4 + 8)
    assert slow - free == pytest.approx(2 * gathered_bytes * cost, rel=0.1)


def test_counted_rows_of_a_node_come_before_the_formula() -> None:
    """Frequent words are shared more often than rows that are equally likely."""
    assert RowTable(0, ROWS, ROW_ELEMS, ALPHA).touched(3) == pytest.approx(1 - 0.95**3)
    together = (("words.weight", 0.08), ("softmax.weight", 0.08))
    formula, counted = (
        sent_bytes(setting("p3", workers_per_node=3, together=each)) for each in ((), together)
    )
    rows_bytes = 2 * 2 * 3 / 4 * ROWS * (ROW_ELEMS * 4 + 8) * limit.HEADER_FACTOR
    assert formula - counted == pytest.approx(rows_bytes * (1 - 0.95**3 - 0.08), rel=0.06)


def test_without_local_aggregation_every_worker_pushes_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FOREPROP_LOCAL_AGGREGATION", "off")
    alone, three = setting("hybrid"), setting("hybrid", workers_per_node=3)
    dense = [limit.HEADER_FACTOR * 2 * (r - 1) / r * 130_000 * 4 for r in (4, 12)]
    one, many = (
        sent_bytes(asked) - whole for asked, whole in zip((alone, three), dense, strict=True)
    )
    assert many == pytest.approx(3 * one, rel=0.1)


@pytest.mark.parametrize("system", ["ddp", *long_cases("ring")])
def test_what_reduces_tables_whole_does_so(system: str) -> None:
    (by_rows,), (whole,) = (simulate_lab(setting(system, rows=rows)) for rows in (True, False))
    assert (by_rows.iteration_s, by_rows.limit_s) == (whole.iteration_s, whole.limit_s)


@pytest.mark.long
def test_a_hybrid_without_tables_is_a_ring() -> None:
    (ring,), (hybrid,) = (simulate_lab(setting(name, rows=False)) for name in ("ring", "hybrid"))
    assert hybrid.iteration_s == ring.iteration_s


@pytest.mark.parametrize("workers_per_node", [1, *long_cases(2)])
@pytest.mark.parametrize("system", BY_ROWS)
def test_rows_are_faster_than_whole_tables_and_no_faster_than_the_limit(
    system: str, workers_per_node: int
) -> None:
    asked = setting(system, workers_per_node=workers_per_node, jitter=0.1)
    (record,) = simulate_lab(asked)
    (again,) = simulate_lab(asked)
    assert record == again
    whole_s = simulate_lab(setting("ring", workers_per_node=workers_per_node))[0].iteration_s
    assert record.limit_s < record.iteration_s.median < whole_s.median
    assert record.simulated == {"rows": True}


def test_every_row_of_a_table_is_as_much_as_the_table() -> None:
    """With alpha 1 rows need their numbers, and no more."""
    every = setting("p3", profile=words(1.0), slice_elems=50_000, rate_bits_per_s=400e6)
    rows, whole = sent_bytes(every), sent_bytes(dataclasses.replace(every, rows=False))
    assert rows == pytest.approx(whole * (1 + 8 / (4 * ROW_ELEMS)), rel=0.05)


@pytest.mark.parametrize("system", ["hybrid", *long_cases("ddp-sparse", "p2p")])
def test_the_refined_model_agrees(system: str) -> None:
    """Where rows count: at a twentieth of the rows, four nodes, two rates."""
    for rate in (20e6, 80e6):
        architecture: ModelledArchitecture = "ddp" if system == "ddp-sparse" else system  # type: ignore[assignment]
        asked = setting("p3" if system == "p2p" else system, rate_bits_per_s=rate)
        (record,) = simulate_lab(asked)
        layers = asked.profile.layers(
            scale=1, compute_s=0.2, counted=lambda array: float(array.alpha is None)
        )
        tables = [Table(layer, ROWS * ROW_ELEMS, ROW_ELEMS, ALPHA) for layer in (0, 2)]
        modelled = predict(
            Deployment(
                layers=layers,
                architecture=architecture,
                nodes=4,
                rate_bits_per_s=rate,
                tables=tables,
                slice_elems=5_000,
            )
        )
        assert modelled.step_s == pytest.approx(record.iteration_s.median, rel=0.1)


# What is refused.
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"symmetric": True}, "rows is True, but a node stands for several"),
        ({"compression": "int8"}, "rows is True, but compression is 'int8'"),
        ({"staleness": 1}, "rows is True, but staleness is 1"),
        (
            {"profile": Profile(name="dense", arrays=words().arrays[1:3])},
            "rows is True, but the profile dense has no alpha",
        ),
    ],
    ids=["symmetric", "compression", "staleness", "no alpha"],
)
def test_what_rows_cannot_be_simulated_with(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        setting("p3", **changes)


def test_a_norm_over_ring_and_servers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREPROP_CLIP_GRAD_NORM", "1.0")
    with pytest.raises(ConfigError, match="unset FOREPROP_CLIP_GRAD_NORM"):
        simulate_lab(setting("hybrid"))


# Servers on nodes of their own, and their processors.
def dedicated(servers: int, **changes: object) -> SimulatedSetting:
    layers = {"rows": False, "dedicated_servers": servers, "slice_elems": 50_000}
    return setting("p3", **(layers | changes))


def test_dedicated_servers_share_all_bytes() -> None:
    """Workers send the model once, whoever they send it to; one server's link is the limit."""
    model_bytes = limit.model_bytes(dedicated(1).layers)
    for servers in (1, 2):
        asked = dedicated(servers)
        assert sent_bytes(asked) == pytest.approx(limit.HEADER_FACTOR * model_bytes, rel=0.06)
        (record,) = simulate_lab(asked)
        wire_s = max(1, 4 / servers) * model_bytes * 8 / 40e6
        assert wire_s < record.limit_s <= 1.001 * record.iteration_s.median
        assert record.iteration_s.median < 1.3 * wire_s + 0.2
        assert record.simulated == {"dedicated_servers": servers}


def test_a_server_s_processor_limits_all_its_workers() -> None:
    """N pushes and N replies of the model, one after the other."""
    quick = {"rate_bits_per_s": 10e9}
    (free,) = simulate_lab(dedicated(1, **quick))
    (busy,) = simulate_lab(dedicated(1, server_s_per_gb=50.0, **quick))
    work_s = 2 * 4 * limit.model_bytes(dedicated(1).layers) * 50e-9
    assert free.iteration_s.median < 0.3
    assert work_s < busy.iteration_s.median < work_s + 0.25


def test_rows_pass_a_server_s_processor_too() -> None:
    slow = setting("hybrid", server_s_per_gb=500.0, rate_bits_per_s=10e9)
    (busy,) = simulate_lab(slow)
    rows_bytes = 2 * ALPHA * ROWS * (2 * ROW_ELEMS * 4 + 8)  # of each node's worker at all servers
    assert busy.iteration_s.median > rows_bytes * 500e-9  # four servers, four workers


def test_a_byte_of_rows_may_cost_a_server_more_than_another() -> None:
    """Of one row each the numbers are; dense arrays, which all servers share, are not."""
    quick = setting("p3", rate_bits_per_s=10e9)
    rows_bytes = 2 * ALPHA * ROWS * (2 * ROW_ELEMS * 4 + 8)
    steps = {}
    for cost in (0.0, 500e-9, None):
        hosts = Hosts(server_byte_s=50e-9, server_row_byte_s=cost)
        (record,) = simulate_lab(quick, hosts=hosts)
        steps[cost] = record.iteration_s.median
    assert steps[0.0] < steps[None] < steps[500e-9]
    assert steps[500e-9] > rows_bytes * 500e-9  # four servers, four workers
    (alone,) = simulate_lab(quick, hosts=Hosts(server_row_byte_s=500e-9))
    assert rows_bytes * 500e-9 < alone.iteration_s.median < steps[500e-9]


def test_only_presets_have_servers_of_their_own() -> None:
    with pytest.raises(ConfigError, match="dedicated_servers is 2, but systems has 'ring'"):
        setting("p3", "ring", dedicated_servers=2)
    with pytest.raises(ConfigError, match="dedicated_servers is 2, but a node stands for several"):
        setting("p3", rows=False, dedicated_servers=2, symmetric=True)
    with pytest.raises(ConfigError, match="dedicated_servers is -1; at least 0"):
        setting("p3", dedicated_servers=-1)
    with pytest.raises(ConfigError, match="server_s_per_gb is -1"):
        setting("p3", server_s_per_gb=-1.0)


def test_the_command_takes_a_profile_with_counted_rows(tmp_path: Path) -> None:
    words().save(tmp_path / "words.json")
    options = f"--profile {tmp_path}/words.json --rows --systems p3,hybrid,ring --steps 2 --scale 1"
    arguments = ["lab", "simulate", *f"{options} --rate 40Mbit --out {tmp_path}".split()]
    result = CliRunner().invoke(app, [*arguments, "--compute", "200ms"])
    assert result.exit_code == 0, result.output
    records = read_records(tmp_path / "results.json")
    steps = {record.system: record.iteration_s.median for record in records}
    assert max(steps["p3"], steps["hybrid"]) < steps["ring"]
