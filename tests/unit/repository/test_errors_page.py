"""The site's page of errors has every text, docs/troubleshooting.md every kind of error."""

from __future__ import annotations

import gc
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import foreprop
from foreprop import errors
from foreprop.params import looprules
from foreprop.quantities import parse_rate
from foreprop.tools.run.resources import parse_resources

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    found = runpy.run_path(str(ROOT / "scripts" / "errors_page.py"))
    gc.disable()  # to collect garbage takes twice as long as to parse the source does
    found["messages"]()
    gc.enable()
    return found


def test_every_error_s_text_is_on_the_page_under_its_heading(script: dict[str, Any]) -> None:
    sections = dict(
        part.split("\n", 1) for part in re.split(r"^## ", script["page"](), flags=re.MULTILINE)[1:]
    )
    for message in script["messages"]():
        heading, target = script["section"](message.where)
        assert f"| `` {message.text.replace('|', '/')} `` | " in sections[heading]
        assert f"({target})" in sections[heading]


def test_the_page_of_errors_is_made_with_the_site_and_not_kept() -> None:
    hooks = runpy.run_path(str(ROOT / "scripts" / "site_hooks.py"))
    assert hooks["GENERATED"] == {"errors.md": "errors_page.py"}
    assert not (ROOT / "docs" / "errors.md").exists()
    assert ": errors.md\n" in (ROOT / "mkdocs.yml").read_text()


def test_every_place_that_makes_an_error_is_read(script: dict[str, Any]) -> None:
    """Counted another way: by the text of src, not by its syntax tree."""
    files = (ROOT / "src" / "foreprop").rglob("*.py")
    made = sum(len(re.findall(r"raise \w+Error\(", path.read_text())) for path in files)
    assert made > 300
    assert len(script["messages"]()) > 0.9 * made


def test_every_kind_of_error_is_in_troubleshooting() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    kinds = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.ForepropError)
    }
    missing = {name for name in kinds if f"| `{name}` |" not in page}
    assert missing == {"ForepropError"}  # which is not raised itself
    assert "`foreprop.ForepropError`" in page


def test_the_messages_that_troubleshooting_quotes_are_real(script: dict[str, Any]) -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    section = page.partition("\n## It does not start\n")[2].partition("\n## ")[0]
    quoted = re.findall(r"^\| `([^`]+)` \|", section, flags=re.MULTILINE)
    assert len(quoted) >= 6
    texts = [message.text for message in script["messages"]()]
    for text in quoted:
        pattern = ".*".join(map(re.escape, text.split("...")))
        assert any(re.search(pattern, listed) for listed in texts), text


def test_each_section_names_a_page_that_is_there(script: dict[str, Any]) -> None:
    targets = {target for _, target in script["SECTIONS"].values()}
    assert [name for name in targets if not (ROOT / "docs" / name).is_file()] == []


def raised(call: Callable[[], object]) -> str:
    with pytest.raises(foreprop.ForepropError) as caught:
        call()
    return str(caught.value)


MODEL = torch.nn.Linear(2, 2)
REAL = {
    "a setting": lambda: foreprop.Config(ema=2.0),
    "a name": lambda: foreprop.parallelize(MODEL, None, slice_elms=5),  # type: ignore[call-arg]
    "a model": lambda: foreprop.parallelize(3),  # type: ignore[arg-type]
    "an optimizer": lambda: foreprop.parallelize(MODEL, 3),  # type: ignore[arg-type]
    "a rate": lambda: parse_rate("rate", "10"),
    "a hosts file": lambda: parse_resources("node0:0,x", source="hosts", workers_per_node=1),
}


def known(text: str, script: dict[str, Any], *, least_words: int = 3) -> bool:
    """Whether a listed message fits, of those with so many words of their own."""
    for message in script["messages"]():
        words = re.findall(r"\w+", message.text.replace(script["VALUE"], " "))
        if len(words) >= least_words and message.pattern.search(text):
            return True
    return False


@pytest.mark.parametrize("what", REAL)
def test_a_real_message_is_listed(what: str, script: dict[str, Any]) -> None:
    assert known(raised(REAL[what]), script)


def test_a_message_made_by_a_function_is_listed(script: dict[str, Any]) -> None:
    assert known(str(looprules.changed_while_sent("fc.weight")), script)


def test_an_unknown_message_is_not_listed(script: dict[str, Any]) -> None:
    assert not known("the moon is not made of cheese", script)


def test_texts_are_put_together_and_values_left_out(script: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "path"
    folder.mkdir()
    (folder / "a.py").write_text(
        "HINT = 'Do it.'\n"
        "def why(n): return f'rank {n} is late'\n"
        "def f(x):\n"
        "    raise ConfigError(f'{x!r} is bad.' f' {HINT}' + why(x))\n"
        "def g(): return PeerLost(why(1) if 1 else 'gone now')\n"
        "class _Own(Exception): ...\n"
        "class Mine(TransportError): ...\n"
        "def h(): raise _Own('no') from None\n"
        "def i(): raise Mine('cut')\n"
        "def j(): return ValueError('never raised')\n"
        "def k(error): raise ConfigError(str(error))\n"
    )
    found = [(each.where, each.kind, each.text) for each in script["messages"](tmp_path)]
    assert sorted(found) == [
        ("path", "ConfigError", "… is bad. Do it.rank … is late"),
        ("path", "Mine", "cut"),
        ("path", "PeerLost", "gone now"),
        ("path", "PeerLost", "rank … is late"),
        ("path", script["PART"], "no"),
    ]


def test_no_message_leaves_the_plural_open() -> None:
    """`foreprop.quantities.counted` knows it."""
    open_ended = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in (ROOT / "src").rglob("*.py")
        for line in path.read_text().splitlines()
        if re.search(r"\} \w+\(s\)", line)
    ]
    assert open_ended == []
