"""Settings: where each value comes from, and what a wrong one is told."""

from __future__ import annotations

import inspect
import os
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from raised import error_of

import foreprop
from foreprop.config import (
    PRESETS,
    Config,
    Preset,
    child_environment,
    launch_info,
)
from foreprop.config.checks import with_advice
from foreprop.config.environment import parse_setting
from foreprop.config.settings import TIERS, settings_in
from foreprop.config.sources import resolve_with_sources
from foreprop.config.typed import Settings
from foreprop.engine.world import is_alone
from foreprop.errors import ConfigError


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT".split()
    for name in list(os.environ):
        if name.startswith(("FOREPROP_", "TORCHELASTIC_")) or name in launcher:
            monkeypatch.delenv(name)


def test_the_presets_are_the_published_table() -> None:
    columns = ("granularity", "order", "reply", "placement", "lanes")
    table = {name: tuple(row[column] for column in columns) for name, row in PRESETS.items()}
    assert table == {
        "p3": ("slice", "priority", "broadcast", "round_robin", "peers"),
        "slicing": ("slice", "fifo", "broadcast", "round_robin", "peers"),
        "kvstore": ("array", "fifo", "notify", "kvstore", "peers"),
        "wfbp": ("array", "fifo", "broadcast", "balanced", "peers"),
        "tensorflow": ("array", "fifo", "pull", "balanced", "peers"),
        "p3-2019": ("slice", "priority", "broadcast", "strict_round_robin", "one"),
    }
    more = {name: set(row) - set(columns) for name, row in PRESETS.items()}
    assert more == {name: set() for name in PRESETS} | {"p3-2019": {"slice_elems"}}
    default = Config()
    assert {column: getattr(default, column) for column in columns} == dict(PRESETS["p3"])
    assert (default.cut_elems(1), default.big_array_elems) == (50_000, 1_000_000)


def test_slices_are_cut_as_asked_for_or_else_as_usual_with_so_many_servers() -> None:
    assert Config(slice_elems=7).cut_elems(16) == Config(slice_elems=7).knobs(16).slice_elems == 7
    assert Config(slice_elems=50_000).cut_elems(16) == 50_000
    assert [Config().knobs(servers).slice_elems for servers in (8, 16)] == [50_000, 25_000]
    assert Config(slice_elems="auto").cut_elems(16) == 25_000


def test_servers_are_dedicated_or_beside_the_workers() -> None:
    assert Config(servers_per_node=2).servers_on(3) == 6
    assert Config(dedicated_servers=5).servers_on(3) == 5


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_sets_its_knobs(preset: str) -> None:
    config = Config.resolve(preset)
    assert config == Config(**PRESETS[preset])  # type: ignore[arg-type]
    assert config.knobs(3).servers == 3
    for name in PRESETS[preset]:
        assert getattr(config.knobs(3), name) == PRESETS[preset][name]


def test_argument_beats_environment_beats_preset_beats_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert Config.resolve("kvstore").order == "fifo"
    monkeypatch.setenv("FOREPROP_ORDER", "priority")
    monkeypatch.setenv("FOREPROP_SLICE_ELEMS", "123")
    assert Config.resolve("kvstore").order == "priority"
    config, sources = resolve_with_sources("kvstore", slice_elems=7)
    assert (config.order, config.slice_elems, config.reply) == ("priority", 7, "notify")
    assert sources == {
        spec.name: {
            "order": "environment",
            "slice_elems": "argument",
            "granularity": "preset kvstore",
            "reply": "preset kvstore",
            "placement": "preset kvstore",
            "lanes": "preset kvstore",
        }.get(spec.name, "default")
        for spec in fields(Config)
    }
    assert Config.resolve("kvstore", order="fifo").order == "fifo"


def test_the_environment_may_name_the_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREPROP_PRESET", "wfbp")
    assert Config.resolve() == Config.resolve("wfbp")
    assert Config.resolve("slicing").granularity == "slice"
    monkeypatch.setenv("FOREPROP_PRESET", "p4")
    with pytest.raises(ConfigError, match=r"preset is 'p4'; it must be one of .*'p3', 'slicing'"):
        Config.resolve()


def test_p3_as_published_cuts_alike_for_any_number_of_servers() -> None:
    published = Config.resolve("p3-2019")
    assert [published.cut_elems(servers) for servers in (1, 4, 16, 64)] == [50_000] * 4


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"no setting is called 'slice_elem'.*'slice_elems'"):
        Config.resolve(slice_elem=3)
    with pytest.raises(ConfigError, match="preset is 'mxnet'; it must be one of"):
        Config.resolve("mxnet")


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"order": "lifo"}, "order is 'lifo'; it must be one of ['priority', 'fifo']"),
    ({"granularity": "bit"}, "granularity is 'bit'; it must be one of ['slice', 'array']"),
    ({"lanes": "two"}, "lanes is 'two'; it must be one of ['peers', 'one']"),
    (
        {"lanes": "one", "order": "fifo"},
        "lanes is 'one', and order is 'fifo': one lane goes by priority; set order='priority'",
    ),
    ({"placement": None}, "placement is None; it must be one of ['round_robin', 'kvstore'"),
    ({"reply": ["pull"]}, "reply is ['pull']; it must be one of ['broadcast', 'notify'"),
    ({"slice_elems": 0}, "slice_elems is 0; it must be at least 1"),
    ({"slice_elems": 1.5}, "slice_elems is 1.5; it must be int"),
    ({"slice_elems": True}, "slice_elems is True; it must be int"),
    ({"slice_elems": "9"}, "slice_elems is '9'; it must be int"),
    ({"big_array_elems": -1}, "big_array_elems is -1; it must be at least 1"),
    ({"servers_per_node": -1}, "servers_per_node is -1; it must be at least 0"),
    ({"dedicated_servers": -1}, "dedicated_servers is -1; it must be at least 0"),
    (
        {"local_aggregation": "yes"},
        "local_aggregation is 'yes'; it must be one of ['auto', 'on'",
    ),
    (
        {"architecture": "ring", "local_aggregation": "on"},
        "architecture is 'ring', and local_aggregation is 'on': ranks in a ring are ordered",
    ),
    ({"workers_per_node": 0}, "workers_per_node is 0; it must be at least 1"),
    ({"workers_per_node": "2"}, "workers_per_node is '2'; it must be int or nothing"),
    ({"interface": 3}, "interface is 3; it must be str or nothing"),
    ({"trace": Path("here")}, "; it must be str or nothing"),
    ({"link_rate_bits_per_s": 999}, "link_rate_bits_per_s is 999; it must be at least 1000"),
    ({"unsent_bytes": 0}, "unsent_bytes is 0; it must be at least 1"),
    ({"backward_passes": 0}, "backward_passes is 0; it must be at least 1"),
    ({"step_timeout_s": 0}, "step_timeout_s is 0; it must be at least 0.1"),
    ({"step_timeout_s": None}, "step_timeout_s is None; it must be float or int"),
    ({"step_timeout_s": float("nan")}, "step_timeout_s is nan; it must be a finite number"),
    ({"join_timeout_s": float("inf")}, "join_timeout_s is inf; it must be a finite number"),
    ({"stall_report_s": -1.0}, "stall_report_s is -1.0; it must be at least 0.1"),
    ({"servers_per_node": 0}, "servers_per_node and dedicated_servers are both 0"),
    (
        {"architecture": "tree"},
        "architecture is 'tree'; it must be one of ['p2p', 'ps', 'ring', 'hybrid', 'auto', None]",
    ),
    ({"architecture": "ps"}, "architecture is 'ps'; set dedicated_servers to their number"),
    (
        {"architecture": "ring", "dedicated_servers": 2},
        "architecture is 'ring', and dedicated_servers is 2: there are no dedicated servers",
    ),
    (
        {"architecture": "ring", "link_rate_bits_per_s": 1e6},
        "link_rate_bits_per_s is 1000000.0: foreprop paces its own connections",
    ),
    ({"chunk_elems": 0}, "chunk_elems is 0; it must be at least 1"),
    ({"reduction": "max"}, "reduction is 'max'; it must be one of ['mean', 'sum']"),
    ({"clip_grad_value": 0.0}, "clip_grad_value is 0.0; it must be above 0"),
    ({"ema": 1.0}, "ema is 1.0; it must be above 0 and below 1"),
    ({"ema": 0}, "ema is 0; it must be above 0 and below 1"),
    ({"clip_grad_norm": -1.0}, "clip_grad_norm is -1.0; it must be above 0"),
    (
        {"clip_grad_norm": 1.0, "clip_grad_value": 2.0},
        "clip_grad_norm is 1.0, and clip_grad_value is 2.0: a gradient is clipped by one rule; set",
    ),
    ({"chunks_in_flight": 0}, "chunks_in_flight is 0; it must be at least 1"),
]


def test_a_wrong_value_is_told_field_value_and_what_is_allowed() -> None:
    for settings, message in WRONG:
        assert message in error_of(ConfigError, Config, **settings)
        assert message in error_of(ConfigError, Config().replace, **settings)


def test_whole_numbers_do_where_fractions_are_allowed() -> None:
    assert Config(step_timeout_s=5, link_rate_bits_per_s=10**9).step_timeout_s == 5
    assert Config(servers_per_node=0, dedicated_servers=2).dedicated_servers == 2


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("SLICE_ELEMS", "many", "FOREPROP_SLICE_ELEMS is 'many'; it must be a whole number"),
        ("SLICE_ELEMS", "1.5", "FOREPROP_SLICE_ELEMS is '1.5'; it must be a whole number"),
        ("BIG_ARRAY_ELEMS", "", "FOREPROP_BIG_ARRAY_ELEMS is ''; it must be a whole number"),
        ("SLICE_ELEMS", "0", "slice_elems is 0; it must be at least 1"),
        ("STEP_TIMEOUT_S", "soon", "FOREPROP_STEP_TIMEOUT_S is 'soon'; it must be a number"),
        ("STEP_TIMEOUT_S", "inf", "step_timeout_s is inf; it must be a finite number"),
        ("ORDER", "Priority", "order is 'Priority'; it must be one of"),
    ],
)
def test_a_wrong_variable_is_named(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str, message: str
) -> None:
    monkeypatch.setenv(f"FOREPROP_{variable}", text)
    with pytest.raises(ConfigError) as caught:
        Config.resolve()
    assert message in str(caught.value)


def test_every_setting_can_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {
        "WORKERS_PER_NODE": "2",
        "LINK_RATE_BITS_PER_S": "1e9",
        "INTERFACE": "none",
        "TRACE": "somewhere",
        "BACKWARD_PASSES": "None",
    }
    for name, text in texts.items():
        monkeypatch.setenv(f"FOREPROP_{name}", text)
    config = Config.resolve()
    assert (config.workers_per_node, config.link_rate_bits_per_s) == (2, 1e9)
    assert (config.interface, config.trace, config.backward_passes) == (None, "somewhere", None)


def test_settings_are_read_from_text() -> None:
    assert parse_setting("x", "3", int) == 3
    assert parse_setting("x", "3", float) == 3.0
    assert parse_setting("x", "", int | None) is None
    assert parse_setting("x", "text", str | None) == "text"
    assert [parse_setting("x", text, bool) for text in ("1", "True", "off")] == [True, True, False]
    with pytest.raises(ConfigError, match="x is 'maybe'; it must be one of"):
        parse_setting("x", "maybe", bool)


def test_every_setting_says_what_it_is_for() -> None:
    assert all(spec.metadata["help"] for spec in fields(Config))


def test_few_settings_are_in_the_first_tiers() -> None:
    by_tier = [settings_in(tier, Config) for tier in TIERS]
    use, operate, _ = by_tier
    assert len(use) <= 15
    assert len(operate) <= 25
    assert [spec for tier in by_tier for spec in tier] == list(fields(Config))


def test_the_docstring_tells_what_each_setting_means() -> None:
    told = " ".join((Config.__doc__ or "").split())
    for spec in fields(Config):
        assert f" {spec.name}: {spec.metadata['help']}" in told


def test_the_docstring_is_indented_alike_by_every_python() -> None:
    """Docstrings have no indentation of the source from 3.13 on, and before that they have it."""
    lines = (Config.__doc__ or "").splitlines()
    assert lines == inspect.getdoc(Config).splitlines()  # type: ignore[union-attr]
    (place,) = [number for number, line in enumerate(lines) if line == TIERS["use"]]
    assert not lines[place - 1]
    first, *_ = fields(Config)
    assert lines[place + 1].startswith(f"    {first.name}: ")


def test_the_settings_for_editors_are_the_fields() -> None:
    typed, own = get_type_hints(Settings), get_type_hints(Config)
    assert list(typed) == [spec.name for spec in fields(Config)]
    assert typed == {name: own[name] for name in typed}
    assert not Settings.__required_keys__
    assert get_args(Preset) == tuple(PRESETS)


def test_parallelize_takes_the_typed_settings() -> None:
    parameter = inspect.signature(foreprop.parallelize).parameters["settings"]
    assert parameter.annotation == "Unpack[Settings]"


@pytest.mark.parametrize("misspelt", ["slice_elem", "slice_elms", "sliceelems"])
def test_a_misspelt_setting_is_told_which_is_meant(misspelt: str) -> None:
    advice = "; did you mean 'slice_elems'\\?$"
    with pytest.raises(ConfigError, match=f"no setting is called '{misspelt}'{advice}"):
        Config.resolve(**{misspelt: 3})
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{misspelt}'{advice}"):
        Config(**{misspelt: 3})
    with pytest.raises(TypeError, match=advice):
        Config().replace(**{misspelt: 3})


def test_advice_is_given_once_where_python_gives_it_too() -> None:
    text = "got an unexpected keyword argument 'slice_elem'"
    python_3_14 = TypeError(f"{text}. Did you mean 'slice_elems'?")
    told = with_advice(python_3_14, {"slice_elem": 3}, {"slice_elems"})
    assert str(told) == f"{text}; did you mean 'slice_elems'?"


def test_what_is_like_no_setting_gets_no_advice() -> None:
    with pytest.raises(ConfigError) as caught:
        Config.resolve(zzz=1)
    assert "did you mean" not in str(caught.value)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'zzz'$"):
        Config(zzz=1)
    with pytest.raises(ConfigError, match=r"did you mean 'kvstore'\?$"):
        Config.resolve("kv_store")


def test_a_misspelt_variable_is_told_which_is_meant(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("SLICE_ELEM", "ZZZ", "PRESETS"):
        monkeypatch.setenv(f"FOREPROP_{name}", "1")
    Config.resolve()
    assert capsys.readouterr().err.splitlines() == [
        "foreprop: FOREPROP_SLICE_ELEM is set, but is no setting; did you mean"
        " 'FOREPROP_SLICE_ELEMS'?",
        "foreprop: FOREPROP_ZZZ is set, but is no setting",
        "foreprop: FOREPROP_PRESETS is set, but is no setting; did you mean 'FOREPROP_PRESET'?",
    ]


def test_the_package_lists_what_users_call() -> None:
    assert dir(foreprop) == sorted(foreprop.__all__)
    assert all(hasattr(foreprop, name) for name in dir(foreprop))


def test_without_a_launcher_the_world_is_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    info = launch_info()
    assert (info.rank, info.world_size, info.local_world_size, info.launched) == (0, 1, 1, False)
    monkeypatch.setenv("WORLD_SIZE", "4")  # a rank is missing: not torchrun's doing
    assert not launch_info().launched
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("MASTER_PORT", "1234")
    info = launch_info()
    assert (info.rank, info.world_size, info.local_world_size) == (3, 4, 4)
    assert (info.master_port, info.launched) == (1234, True)
    monkeypatch.setenv("RANK", "three")
    with pytest.raises(ConfigError, match="RANK is 'three'; it must be a whole number"):
        launch_info()


@pytest.mark.parametrize("name", ["FOREPROP_JOIN", "FOREPROP_MAX_WORKERS"])
def test_one_that_others_may_join_is_not_alone(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert is_alone()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert is_alone()
    monkeypatch.setenv(name, "2")
    assert not is_alone()


def test_a_server_inherits_nothing_of_torchrun_or_our_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("RANK", "WORLD_SIZE", "FOREPROP_ORDER", "TORCHELASTIC_RUN_ID", "UNRELATED"):
        monkeypatch.setenv(name, "1")
    environment = child_environment()
    assert environment["UNRELATED"] == environment["OMP_NUM_THREADS"] == "1"
    assert not [n for n in environment if "RANK" in n or n.startswith(("FOREPROP", "TORCHELASTIC"))]


def test_automatic_codecs_are_checked() -> None:
    assert Config.resolve(compression="auto").codecs == ()
    assert Config.resolve(compression="auto:int8").compression == "auto:int8"
    with pytest.raises(ConfigError, match="after auto: comes the lossiest codec"):
        Config.resolve(compression="auto:most")
    with pytest.raises(ConfigError, match="takes bf16 or fp16 for all"):
        Config.resolve(compression="auto", architecture="ring")
