"""Words of other libraries: each is answered, and with what there is."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import accelerate
import pytest
import torch
from raised import error_of
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import foreprop
from foreprop import Config, ConfigError
from foreprop.config.otherwords import (
    answer_to_name,
    answer_to_value,
    did_you_mean,
    names,
    values,
)

SETTINGS = {spec.name for spec in fields(Config)}
ARGUMENTS = set(inspect.signature(foreprop.parallelize).parameters)


def arguments(call: Callable[..., Any]) -> Iterator[str]:
    for name, parameter in inspect.signature(call).parameters.items():
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            yield name


HOROVODS = (
    "named_parameters backward_passes_per_step op gradient_predivide_factor num_groups groups"
    " sparse_as_dense process_set root_rank"
).split()


@pytest.mark.parametrize(
    "words",
    [
        arguments(DistributedDataParallel),
        arguments(FullyShardedDataParallel),
        arguments(fully_shard),
        arguments(accelerate.Accelerator),
        arguments(accelerate.DistributedDataParallelKwargs),
        HOROVODS,
    ],
    ids=["ddp", "fsdp", "fsdp2", "accelerate", "ddp-kwargs", "horovod"],
)
def test_every_argument_of_other_libraries_is_answered(words: Iterator[str]) -> None:
    unanswered = [word for word in words if word not in SETTINGS and not answer_to_name(word)]
    assert unanswered == []


def test_answers_name_settings_and_values_that_there_are() -> None:
    answers = [*names().values(), *values().values()]
    texts = {text for words in answers for text in words.values()}
    written = {found for text in texts for found in re.findall(r"(\w+)='?([\w.:]*)'?", text)}
    assert {name for name, _ in written} <= SETTINGS | ARGUMENTS | {"requires_grad"}
    given = {name: value for name, value in written if name in SETTINGS and value.islower()}
    for name, value in given.items():
        more: dict[str, Any] = {"collectives": {"architecture": "ring"}}.get(name, {})
        if value == "ps":
            more = {"dedicated_servers": 1}
        assert getattr(Config(**{name: value}, **more), name) == value


def test_no_word_of_the_table_is_a_setting() -> None:
    assert {word for words in names().values() for word in words} & SETTINGS == set()


WORDS = [
    ("find_unused_parameters", "DistributedDataParallel's: leave it out"),
    ("bucket_cap_mb", "DistributedDataParallel's: there are no buckets"),
    ("sharding_strategy", "FullyShardedDataParallel's: each rank has the whole model"),
    ("reshard_after_forward", "fully_shard's: each rank has the whole model"),
    ("backward_passes_per_step", "Horovod's: write backward_passes"),
    ("gradient_accumulation_steps", "accelerate's: run several backward passes"),
    ("Bucket-Cap-MB", "DistributedDataParallel's: there are no buckets"),
    ("preset", "an argument of parallelize()"),
]


@pytest.mark.parametrize(("word", "answer"), WORDS)
def test_another_library_s_word_is_answered_wherever_it_is_written(word: str, answer: str) -> None:
    told = f"{word!r}, which is {answer}"
    if word != "preset":  # which resolve() takes, by position
        assert told in error_of(ConfigError, Config.resolve, **{word: 25})
        model = torch.nn.Linear(1, 1)
        assert told in error_of(ConfigError, foreprop.parallelize, model, **{word: 25})
    assert told in error_of(TypeError, Config, **{word: 25})


def test_a_variable_with_such_a_word_is_answered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FOREPROP_BUCKET_CAP_MB", "25")
    Config.resolve()
    assert "is no setting, which is DistributedDataParallel's: there are no buckets" in caplog.text


VALUES = [
    ("wire_dtype", "fp16", "write 'float16'"),
    ("wire_dtype", "half", "write 'float16'"),
    ("wire_dtype", torch.float16, "write 'float16'"),
    ("wire_dtype", torch.bfloat16, "write 'bfloat16'"),
    ("wire_dtype", torch.float32, "float32 is sent as it is: leave wire_dtype out"),
    ("architecture", "allreduce", "for all-reduce write 'ring'"),
    ("architecture", "all_reduce", "for all-reduce write 'ring'"),
    ("architecture", "All-Reduce", "for all-reduce write 'ring'"),
    ("architecture", "parameter_server", "for servers beside the workers write 'p2p'"),
    ("architecture", "parameter-server", "for servers beside the workers write 'p2p'"),
    ("architecture", "rings", "did you mean 'ring'?"),
    ("compression", torch.bfloat16, "write 'bf16'"),
    ("update", "server", "write 'servers'"),
    ("reduction", torch.distributed.ReduceOp.AVG, "write 'mean'"),
    ("encryption", True, "write 'tls'"),
]


@pytest.mark.parametrize(("setting", "value", "answer"), VALUES)
def test_another_library_s_value_is_answered(setting: str, value: object, answer: str) -> None:
    told = error_of(ConfigError, Config, **{setting: value})
    assert told.startswith(f"{setting} is {value!r}; it must be ")
    assert f"; {answer}" in told


def test_another_library_s_codec_and_preset_are_answered() -> None:
    from foreprop.features.compression.codecs import make

    assert error_of(ConfigError, make, "powersgd").endswith(
        "there is none of low rank; 'auto' chooses as few bytes as are needed"
    )
    assert "write '1bit', a codec of foreprop-lab (pip install" in error_of(
        ConfigError, make, "onebit"
    )
    assert "for all-reduce write 'ring'" in error_of(ConfigError, Config.resolve, "allreduce")


def test_what_nobody_says_is_not_answered() -> None:
    assert answer_to_name("zzz") == answer_to_value("architecture", "zzz") == ""
    assert answer_to_value("ema", "ring") == ""


# Near names.
@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("order", "; did you mean 'order'?"),
        ("placment", "; did you mean 'placement'?"),
        ("elems", "; did you mean 'slice_elems', 'big_array_elems' or 'chunk_elems'?"),
        ("zzz", ""),
    ],
)
def test_near_names_are_few(name: str, advice: str) -> None:
    known = [spec.name for spec in fields(Config)]
    assert did_you_mean(name, known) == advice


def test_of_sixty_near_names_five_are_told() -> None:
    assert did_you_mean("size", [f"its_size_{i}" for i in range(60)]).count("'") == 10


@pytest.mark.parametrize("name", ["steps", "bytes", "elems", "gradient", "x" * 40, "s", "e_s"])
def test_at_most_five_names_are_near(name: str) -> None:
    assert did_you_mean(name, SETTINGS).count("'") <= 10
    assert len(error_of(ConfigError, Config.resolve, **{name: 1})) < 200
