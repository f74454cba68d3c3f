"""What users' pages have them type: commands are ones that there are, and Python runs."""

from __future__ import annotations

import ast
import logging
import os
import re
import textwrap
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import foreprop
from foreprop.config.settings import Config
from foreprop.tools.cli.registry import command_of
from foreprop.tools.cli.registry import commands as registry
from tests.cluster import worlds
from tests.pages import FENCED, PAGES, ROOT, commands

OTHERS = {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "FOREPROP_INTERFACE", "FOREPROP_WATCH"}
"""Variables that are no setting of `foreprop.Config`."""


def python(page: Path) -> list[str]:
    """Its blocks of Python, and what a diff leads to."""
    blocks = []
    for language, text in FENCED.findall(page.read_text()):
        if language == "diff":
            kept = [line[1:] for line in text.splitlines() if not line.startswith("-")]
            blocks.append("\n".join(kept) + "\n")
        elif language == "python":
            blocks.append(textwrap.dedent(text))
    return blocks


def leaf(words: list[str]) -> tuple[Any, list[str]]:
    """The command that the first words name, and what it is given."""
    line = " ".join(words) + " "
    entry = next(entry for entry in registry() if line.startswith(f"{entry.name} "))
    command: Any = command_of(entry)
    words = words[entry.name.count(" ") + 1 :]
    while hasattr(command, "commands"):
        command, words = command.commands[words[0]], words[1:]
    return command, words


def missing(words: list[str]) -> list[str]:
    """Of what a launcher or an interpreter is told to run, what is not there."""
    if "-m" in words:
        module = words[words.index("-m") + 1]
        tops = {"foreprop": "src", "foreprop_lab": "lab/src", "tests": "."}
        top = tops.get(module.partition(".")[0])
        path = ROOT / (top or "") / module.replace(".", "/")
        known = top is None or path.with_suffix(".py").is_file() or path.is_dir()
        words = words[words.index("-m") + 2 :] if known else [module]
    files = [word for word in words if re.fullmatch(r"[\w./-]+\.py", word)]
    return [file for file in files if file != "train.py" and not (ROOT / file).is_file()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_commands_of_a_page_can_be_typed(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "hosts", "mine.json"):
        (tmp_path / name).touch()
    for name in ("runs/trace", "run"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for words in commands(page):
        while re.fullmatch(r"[A-Z_]+=.*", words[0]):
            name = words.pop(0).partition("=")[0]
            setting = name.removeprefix("FOREPROP_").lower()
            assert name in OTHERS or setting in Config.__dataclass_fields__, name
        if words[0] == "foreprop":
            command, given = leaf(words[1:])
            if ">" in given:  # the shell's
                given = given[: given.index(">")]
            with command.make_context(command.name, given):
                pass
        else:
            assert missing(words) == [], words


def test_most_pages_have_commands() -> None:
    assert sum(len(commands(page)) for page in PAGES) > 50


class MyModel(nn.Sequential):
    """A user's."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def a_users_names() -> dict[str, Any]:
    """What a page takes for granted in the script around its block."""
    inputs, targets = torch.randn(16, 4), torch.arange(16) % 3
    model = MyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dataset = torch.utils.data.TensorDataset(inputs, targets)
    return {
        "MyModel": MyModel,
        "model": model,
        "optimizer": optimizer,
        "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 1),
        "dataset": dataset,
        "loader": torch.utils.data.DataLoader(dataset, batch_size=4),
        "DataLoader": torch.utils.data.DataLoader,
        "loss_fn": nn.functional.cross_entropy,
        "batch": (inputs, targets),
        "x": inputs,
        "y": targets,
        "epochs": 2,
        "foreprop": foreprop,
        "torch": torch,
        "nn": nn,
        "os": os,
        "logging": logging,
    }


class LossModel(MyModel):
    """As Hugging Face's trainers want it: it gives its loss."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        found = super().forward(x)
        if labels is None:
            return found
        return {"loss": nn.functional.cross_entropy(found, labels), "logits": found}


def a_trainers_names(block: str, folder: Path) -> dict[str, Any]:
    """More for the page about trainers."""
    import lightning.pytorch as pl
    import transformers
    from lightning.fabric import Fabric

    from foreprop.integrations.trainer import ForepropTrainer

    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=1, report_to=[], use_cpu=True, disable_tqdm=True
    )
    samples = [{"x": torch.randn(4), "labels": torch.tensor(n % 3)} for n in range(16)]
    return {
        "pl": pl,
        "Fabric": Fabric,
        "args": Namespace(foreprop=True) if "args.foreprop" in block else arguments,
        "samples": samples,
        **({"model": LossModel()} if "ForepropTrainer(model" in block else {}),
        "ForepropTrainer": ForepropTrainer,
        "SFTTrainer": transformers.Trainer,
    }


RUN = ("README.md", "get-started.md", "from-ddp.md", "checkpoints.md", "compile.md", "devices.md")


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # inductor's
@pytest.mark.parametrize(
    "name",
    [
        *RUN,
        "elastic.md",
        "plan.md",
        "tables.md",
        pytest.param(
            "trainers.md",
            marks=[
                pytest.mark.long,  # to import them takes 10 s
                pytest.mark.leaks_ok("Fabric opens a process group's store, and keeps that"),
            ],
        ),
        pytest.param("observe.md", marks=pytest.mark.leaks_ok("TensorBoard's writer has a thread")),
    ],
)
def test_the_python_of_a_page_runs_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """In a world of one, on the CPU; each block in a script of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOCAL_RANK", "0")
    blocks = python(next(page for page in PAGES if page.name == name))
    assert blocks
    logger = logging.getLogger("foreprop")
    request.addfinalizer(partial(logger.setLevel, logger.level))  # a page may set another
    if name == "tables.md":  # its tables are held by servers, which a world of one has none of
        with_servers = partial(foreprop.parallelize, world=worlds(1)[0])
        monkeypatch.setattr(foreprop, "parallelize", with_servers)
    for block in blocks:
        script = a_users_names()
        script["self"] = script["model"]
        if name == "tables.md":
            block = block.replace("...", "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)")
            block = re.sub(r"\b1(_000){2,}", "1_000", block)  # rows
        if name == "trainers.md":
            monkeypatch.delenv("LOCAL_RANK", raising=False)
            script |= a_trainers_names(block, tmp_path)
            block = block.replace("devices=4", "devices=1")
            block = block.replace("train_dataset=...", "train_dataset=samples")
        if "session." in block and "session =" not in block:
            script["session"] = foreprop.parallelize(script["model"], script["optimizer"])
        exec(block.replace('"cuda"', '"cpu"'), script)
        session = script.get("session")
        if session is not None:
            session.close()
        if torch.distributed.is_initialized():  # Fabric's
            torch.distributed.destroy_process_group()


def test_the_python_of_every_page_is_python_and_what_it_imports_of_foreprop_is_there() -> None:
    for page in PAGES:
        for block in python(page):
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "foreprop":
                    there = node.attr in foreprop.__all__ or node.attr == "integrations"
                    assert there, (page.name, node.attr)
                if isinstance(node, ast.keyword) and node.arg == "foreprop":
                    for key in getattr(node.value, "keys", []):
                        assert ast.literal_eval(key) in Config.__dataclass_fields__, page.name
