"""Which parameters are encoded, what the setting may say, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from foreprop.config import Config
from foreprop.core.agreement import decode_manifest, describe_mismatch
from foreprop.core.codec import choices_of, codec_of
from foreprop.core.manifest import Manifest, OptimizerInfo, ParameterInfo
from foreprop.errors import ConfigError
from foreprop.features.compression.choosing import check_setting, coded_slices, describe, why_not

NAMES = ("body.weight", "body.bias", "head.weight")


def manifest_of(compression: Any, *, dtype: str = "float32", rows: bool = False) -> Manifest:
    return Manifest(
        foreprop="",
        torch="",
        byteorder="little",
        session="",
        world_size=2,
        knobs=Config(compression=compression, slice_elems=10).knobs(1),
        optimizer=OptimizerInfo(name="SGD", groups=({"lr": 0.1},)),
        parameters=tuple(
            ParameterInfo(name=name, shape=(25, 1), dtype=dtype, group=0, rows=rows)
            for name in NAMES
        ),
        blob_bytes=(0,),
    )


def coded(compression: Any) -> set[str]:
    manifest = manifest_of(compression)
    pieces = coded_slices(manifest, manifest.slices()).values()
    return {NAMES[each.piece.parameter] for each in pieces}


def test_one_codec_is_for_all_and_patterns_are_for_those_that_match_first() -> None:
    assert coded("lossless") == set(NAMES)
    assert coded({"*.weight": "lossless"}) == {"body.weight", "head.weight"}
    assert coded({"head.*": "none", "*.weight": "lossless"}) == {"body.weight"}
    assert coded("head.*=none, *=lossless") == {"body.weight", "body.bias"}
    assert codec_of("body.bias", choices_of("*.weight=lossless")) == "none"


@pytest.mark.parametrize(
    ("name", "pattern", "is_one"),
    [
        ("a[0].weight", "a[0].weight", True),
        ("a0.weight", "a[0].weight", False),
        ("a[0].weight", "a[*].w?ight", True),
        ("a=b", "a=b", True),
    ],
)
def test_only_stars_and_question_marks_stand_for_others(
    name: str, pattern: str, is_one: bool
) -> None:
    assert codec_of(name, choices_of(f"{pattern}=int8")) == ("int8" if is_one else "none")


@pytest.mark.parametrize("value", ["none", {"*": "none"}, {}, "*=none"])
def test_nothing_to_encode_is_no_setting(value: Any) -> None:
    config = Config(compression=value)
    assert config.compression is None
    assert not config.codecs
    assert config.local_aggregation == "auto"


def test_patterns_are_kept_as_text_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(compression={"b*": "lossless", "*": "none"})
    assert config.compression == "b*=lossless,*=none"
    monkeypatch.setenv("FOREPROP_COMPRESSION", "b*=lossless,*=none")
    assert Config.resolve().codecs == config.codecs == (("b*", "lossless"), ("*", "none"))
    assert hash(config) == hash(Config.resolve())


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("a=b,", "'' is no PATTERN=CODEC"),
        ("lossless,x", "'lossless' is no PATTERN=CODEC"),
        ("=lossless", "'=lossless' is no PATTERN=CODEC"),
        ("", "'' is no PATTERN=CODEC"),
        (7, "compression is 7; it must be a codec's name"),
        ({"a,b": "lossless"}, "compression has 'a,b': 'lossless'"),
        ({"a": None}, "compression has 'a': None"),
    ],
)
def test_what_says_nothing_is_refused(value: Any, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        Config(compression=value)
    assert says in str(error.value)


def check_refused(says: str, compression: Any, **facts: Any) -> None:
    config = Config(compression=compression)
    with pytest.raises(ConfigError) as error:
        check_setting(config, manifest_of(compression, **facts))
    assert says in str(error.value)


def test_patterns_that_match_nothing_codecs_and_parameters_are_named() -> None:
    check_refused(
        "no parameter's name matches 'tail.*'; there are ['body.w",
        {"tail.*": "none"} | {"*": "lossless"},
    )
    check_refused("no codec is called 'zip'; there are [", "zip")
    check_refused("int8 is chosen for body.weight, which is held row", "int8", rows=True)
    check_setting(Config(compression="lossless"), manifest_of("lossless", rows=True))
    check_setting(Config(compression="lossless"), manifest_of("lossless", dtype="bfloat16"))


def test_a_server_says_which_codec_it_has_not() -> None:
    assert why_not(manifest_of("lossless")) is None
    assert "no codec is called 'zip'" in (why_not(manifest_of("zip")) or "")


def test_it_travels_and_another_order_is_another_setting() -> None:
    ours = manifest_of({"*.weight": "lossless", "*": "none"})
    assert decode_manifest(ours.encode()) == ours
    theirs = manifest_of({"*": "none", "*.weight": "lossless"})
    text = describe_mismatch(ours, theirs, us="rank 0", them="rank 1") or ""
    assert text.startswith("knobs.compression: rank 0 has (('*.weight', 'lossless'),")


def test_the_line_at_the_start_says_whether_it_is_exact() -> None:
    assert describe(Config(compression="lossless").codecs) == " compression=lossless (exact)"
    assert describe(Config(compression={"*": "int8"}).codecs) == " compression=int8 (lossy)"
    assert describe(Config(compression="h*=lossless").codecs) == " compression=h*=lossless (exact)"
