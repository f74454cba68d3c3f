"""The two documentation sites: built by mkdocs --strict, whole, nothing from the network."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

import foreprop

ROOT = Path(__file__).parents[3]
LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
"""Elements that a browser fetches something for, and the attribute that says what."""
SITES = {"mkdocs.yml": "", "lab/mkdocs.yml": "lab"}
"""By configuration: the folder of `runs/site` that it is built into."""
NOT_LOADED = {"canonical", "prev", "next", "edit"}
"""Kinds of ``<link>`` that a browser does not follow."""


@dataclass
class Page(HTMLParser):
    """What a page links to, loads and can be jumped to; and its paragraphs."""

    ids: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    paragraphs: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._in_paragraph = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids.update(given[name] for name in ("id", "name") if name in given)
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag in LOADS and LOADS[tag] in given and given.get("rel", "") not in NOT_LOADED:
            self.loads.append(given[LOADS[tag]])
        if tag == "p":
            self._in_paragraph = True
            self.paragraphs.append("")

    def handle_endtag(self, tag: str) -> None:
        self._in_paragraph = self._in_paragraph and tag != "p"

    def handle_data(self, data: str) -> None:
        if self._in_paragraph:
            self.paragraphs[-1] += data


def parsed(text: str) -> Page:
    page = Page()
    page.feed(text)
    return page


def find_dead_links(pages: dict[Path, Page]) -> set[str]:
    """``page -> link`` for each that leads to no file, or to no such place in a page."""
    found = set()
    for path, page in pages.items():
        for link in [*page.links, *page.loads]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            place = unquote(parts.fragment)
            there = pages[target].ids if target in pages else {place}
            if not target.exists() or (place and place not in there):
                found.add(f"{path.name} -> {link}")
    return found


def find_loads_from_elsewhere(pages: dict[Path, Page]) -> set[str]:
    return {
        f"{path.name}: {load}"
        for path, page in pages.items()
        for load in page.loads
        if urlsplit(load).netloc
    }


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as by ``make docs``, but elsewhere: foreprop's, and the lab's in a folder of it."""
    folder = tmp_path_factory.mktemp("site").resolve()
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file"]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONWARNINGS": "default"}
    for file, inner in SITES.items():
        command = [*build, file, "--site-dir", str(folder / inner)]
        made = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True)
        assert made.returncode == 0, made.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    wanted = [path for path in site.rglob("*.html") if path.name != "404.html"]
    return {path: parsed(path.read_text()) for path in wanted}


@pytest.mark.long
@pytest.mark.timeout(300)
def test_every_page_of_docs_is_there(site: Path) -> None:
    built_path = runpy.run_path(str(ROOT / "scripts" / "site_hooks.py"))["built_path"]
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "lab" / "docs").rglob("*.md")]
    sources = [path.relative_to(ROOT).as_posix() for path in pages]
    for source in [*sources, "README.md", "CHANGELOG.md", "examples/train_resnet.py"]:
        assert (site / built_path(source)).is_file(), source
    assert (site / "errors.html").read_text().count("<tr>") > 500


def test_every_page_of_docs_is_in_a_menu() -> None:
    """But for parts of others: figures and the notebook have pages that list them."""
    for file in SITES:
        menus = (ROOT / file).read_text().partition("\nnav:")[2]
        named = re.findall(r": ([\w/-]+\.md)$", menus, re.MULTILINE)
        pages = {path.name for path in (ROOT / file).with_name("docs").glob("*.md")}
        moved = {"README.md": "contents.md"} if file == "mkdocs.yml" else {}
        assert {moved.get(page, page) for page in pages} <= set(named), file
        assert len(named) == len(set(named)), file


def test_a_users_menus_are_short_and_contributors_reading_is_last() -> None:
    menus = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    *tabs, last = re.split(r"^  - ", menus, flags=re.MULTILINE)[1:]
    assert len(tabs) == 4
    assert len(re.findall(r"\.md$", "".join(tabs), re.MULTILINE)) <= 25
    assert last.index("path.md") < last.index("contributing.md")


@pytest.mark.long
@pytest.mark.timeout(300)
def test_each_site_leads_to_the_other(site: Path) -> None:
    """By a menu, on every page."""
    for page, other in {
        "index.html": "lab/index.html",
        "examples/train_resnet.html": "../lab/index.html",
        "lab/index.html": "../index.html",
        "lab/notebook/4-nodes.html": "../../index.html",
    }.items():
        assert other in parsed((site / page).read_text()).links, page


@pytest.mark.long
@pytest.mark.timeout(300)
def test_every_link_leads_somewhere(pages: dict[Path, Page]) -> None:
    assert len(pages) > 40
    assert sum(len(page.links) for page in pages.values()) > 1000
    assert find_dead_links(pages) == set()


@pytest.mark.long
@pytest.mark.timeout(300)
def test_nothing_comes_from_the_network(site: Path, pages: dict[Path, Page]) -> None:
    assert sum(len(page.loads) for page in pages.values()) > 100
    assert find_loads_from_elsewhere(pages) == set()
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    assert not re.findall(r"url\(['\"]?(?:https?:)?//[^)]*\)|@import[^;]*//", styles)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_lists_are_lists(pages: dict[Path, Page]) -> None:
    """GitHub makes a list of what mkdocs takes for a paragraph, unless an empty line is before."""
    broken = [
        f"{path.name}: {text[:60]}"
        for path, page in pages.items()
        for text in page.paragraphs
        if re.search(r"^(?:[-*]|\d+\.) ", text, re.MULTILINE)
    ]
    assert broken == []


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_reference_has_what_users_import(site: Path) -> None:
    ids = parsed((site / "api.html").read_text()).ids
    documented = {name.rpartition(".")[2] for name in ids if name.startswith("foreprop.")}
    assert set(foreprop.__all__) - documented <= {"PRESETS", "__version__"}


# The checks themselves
def test_a_dead_link_is_found(tmp_path: Path) -> None:
    texts = {
        "a.html": '<a href="b.html#there">1</a><a href="b.html#not">2</a><a href="c.html">3</a>',
        "b.html": '<h2 id="there">x</h2><a href="#there">4</a><a href="https://example.org">5</a>',
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    pages: dict[Path, Page] = {tmp_path / name: parsed(text) for name, text in texts.items()}
    assert find_dead_links(pages) == {"a.html -> b.html#not", "a.html -> c.html"}


def test_what_comes_from_elsewhere_is_found() -> None:
    text = (
        '<img src="x.png"><script src="//cdn.example/x.js"></script><link href="https://f/a.css">'
    )
    canonical = '<link rel="canonical" href="https://example.org/">'
    page: Any = {Path("a.html"): parsed(text + canonical)}
    assert find_loads_from_elsewhere(page) == {
        "a.html: //cdn.example/x.js",
        "a.html: https://f/a.css",
    }


def test_links_out_of_docs_become_links_between_pages() -> None:
    rewritten = runpy.run_path(str(ROOT / "scripts" / "site_hooks.py"))["rewritten"]
    outside: set[str] = set()
    text = "[a](../examples/train_resnet.py) [b](path.md#x) [c](README.md#words) [d](https://e.org)"
    assert rewritten(text, "docs/run.md", outside=outside) == (
        "[a](examples/train_resnet.md) [b](path.md#x) [c](contents.md#words) [d](https://e.org)"
    )
    assert outside == {"examples/train_resnet.py"}
    assert rewritten("[a](docs/plan.md)", "README.md") == "[a](plan.md)"
    assert rewritten("[a](index.html)", "lab/docs/results/README.md") == "[a](figures.html)"


def test_links_into_the_other_site_are_addresses_that_mkdocs_leaves_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rewritten = runpy.run_path(str(ROOT / "scripts" / "site_hooks.py"))["rewritten"]
    text = "[a](../lab/docs/lab.md#codecs) [b](../lab/docs/results/README.md) [c](plan.md)"
    assert rewritten(text, "docs/tuning.md") == (
        "[a](site:lab/lab.html#codecs) [b](site:lab/results/index.html) [c](plan.md)"
    )
    assert caplog.messages == []
    text = "[a](../../../docs/plan.md#x) [b](../../../README.md) [c](../../../docs/README.md)"
    assert rewritten(text, "lab/docs/notebook/papers.md") == (
        "[a](site:../../plan.html#x) [b](site:../../index.html) [c](site:../../contents.html)"
    )
    assert caplog.messages == [  # which fails a strict build
        "lab/docs/notebook/papers.md links to '../../../docs/plan.md', which has no '#x'"
    ]
