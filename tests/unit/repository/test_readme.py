"""The documentation: tables and names are the code's, links lead somewhere, lines are short."""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import math
import re
import runpy
from pathlib import Path
from typing import Any

import typer
import yaml
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

import foreprop
from foreprop.engine.optimizer import ELEMENTWISE_OPTIMIZERS
from foreprop.tools.cli.app import app

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
LAB_DOCS = ROOT / "lab" / "docs"
PAGES = [page for folder in (DOCS, LAB_DOCS) for page in sorted(folder.rglob("*.md"))]
PAGES += [*sorted(ROOT.glob("*.md")), ROOT / "lab" / "README.md"]
TEXTS = {page: page.read_text() for page in PAGES}
FOLDERS = [
    path.parent.name for path in sorted(Path(foreprop.__file__).parent.glob("*/__init__.py"))
]
COMMANDS = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
NAME = re.compile(rf"`((?:{'|'.join(FOLDERS)})\.\w+(?:\.\w+)*)`")


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def rows(page: Path, heading: str) -> list[list[str]]:
    """The cells of the first table under a heading, without its head."""
    section = page.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    table = re.findall(r"^\|(.*)\|$", section, flags=re.MULTILINE)[2:]
    return [[cell.strip() for cell in row.split("|")] for row in table]


@functools.cache
def anchors(page: Path) -> set[str]:
    """A page's headings, as GitHub makes anchors of them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    heads = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def found(name: str) -> Any:
    """What a dotted name inside foreprop stands for; raises if there is no such thing."""
    parts = name.split(".")
    if parts[0] == "session" and hasattr(foreprop.Session, parts[1]):
        return getattr(foreprop.Session, parts[1])  # what `parallelize` returned, not our folder
    for modules in range(len(parts), 0, -1):
        try:
            thing = importlib.import_module(".".join(["foreprop", *parts[:modules]]))
        except ModuleNotFoundError:
            continue
        for part in parts[modules:]:
            thing = getattr(thing, part)
        return thing
    raise ModuleNotFoundError(name)


# What the code says
def test_the_page_of_settings_is_made_from_the_code() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "settings_page.py"))
    assert (DOCS / "settings.md").read_text() == script["page"](), (
        "run: python scripts/settings_page.py"
    )


def test_the_pages_of_commands_are_made_from_the_code() -> None:
    pages = runpy.run_path(str(ROOT / "scripts" / "commands_page.py"))["pages"]()
    assert {page: page.read_text() for page in pages} == pages, (
        "run: python scripts/commands_page.py"
    )
    sections = [len(re.findall(r"^## ", text, re.MULTILINE)) for text in pages.values()]
    assert min(sections) >= 9, sections  # foreprop's own, and the lab's


def test_the_optimizers_are_listed() -> None:
    errors = rows(DOCS / "semantics.md", "What is an error, and what to do instead")
    (row,) = [row for row in errors if "LBFGS" in row[0]]
    assert sorted(row[2].split(", ")) == sorted(ELEMENTWISE_OPTIMIZERS)


def test_the_commands_of_every_page_exist() -> None:
    typed = re.compile(r"(?:`|^    (?:\$ )?|^\$ )foreprop ([a-z]+)", re.MULTILINE)
    named = {page_id(page): set(typed.findall(text)) for page, text in TEXTS.items()}
    assert {page: names - COMMANDS for page, names in named.items() if names - COMMANDS} == {}


def test_the_names_of_every_page_exist() -> None:
    missing = []
    for page, text in TEXTS.items():
        for name in NAME.findall(text):
            try:
                assert found(name) is not None
            except (AssertionError, AttributeError, ModuleNotFoundError) as error:
                missing.append((page_id(page), name, str(error)))
    assert missing == []


# The pages themselves
def test_the_links_of_every_page_lead_somewhere() -> None:
    astray = []
    for page, text in TEXTS.items():
        for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", text):
            led_to = page.parent / target if target else page
            if "://" not in target and not (
                led_to.exists() and (not anchor or anchor in anchors(led_to))
            ):
                astray.append((page_id(page), f"{target}#{anchor}"))
    assert astray == []


def test_the_pages_that_messages_and_docstrings_name_exist() -> None:
    page = re.compile(r"((?:lab/)?docs/[\w/-]+\.md)(?:#([\w-]+))?")
    named = {
        found
        for folder in ("src", "lab/src", "tests", "scripts", "examples")
        for path in (ROOT / folder).rglob("*.py")
        if path != Path(__file__) and path.name != "test_site.py"
        for found in page.findall(path.read_text())
    }
    assert len(named) > 30
    astray = [
        (name, anchor)
        for name, anchor in sorted(named)
        if not (ROOT / name).is_file() or (anchor and anchor not in anchors(ROOT / name))
    ]
    assert astray == []


def test_the_lines_of_every_page_are_short() -> None:
    long = [
        (page_id(page), line)
        for page, text in TEXTS.items()
        for line in text.splitlines()
        if len(line) > 100 and not line.startswith("|")
    ]
    assert long == []


def test_the_yaml_of_every_page_can_be_read() -> None:
    for page, text in TEXTS.items():
        for block in re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            assert all(list(yaml.safe_load_all(block))), page_id(page)


def test_every_trial_has_question_command_result_and_whether_it_was_kept() -> None:
    marks = (r"\*\*Question\.\*\*", r"\*\*Command\.\*\*", r"\*\*Result\.\*\*")
    pages = [page for page in PAGES if page.parent.name == "notebook" and page.name[0] != "R"]
    missing = [
        (page_id(page), trial.splitlines()[0], mark)
        for page in pages
        for trial in TEXTS[page].split("\n## ")[1:]
        for mark in (*marks, r"\*\*(Kept|Not kept)\b")
        if not re.search(mark, trial)
    ]
    assert pages
    assert missing == []


def test_the_index_has_every_page() -> None:
    for folder in {page.parent for page in PAGES} - {ROOT, ROOT / "lab"}:
        index = (folder / "README.md").read_text()
        listed = {(folder / target).resolve() for target in re.findall(r"\]\(([^)#]+\.md)", index)}
        pages = {page.resolve() for page in folder.glob("*.md") if page.name != "README.md"}
        assert pages <= listed, sorted(pages - listed)


def test_the_readme_and_the_architecture_stay_short() -> None:
    assert len((ROOT / "README.md").read_bytes()) <= 10_240
    assert len((DOCS / "architecture.md").read_text().split()) <= 1_000


def test_the_figures_of_the_readme_are_those_of_the_page_of_performance() -> None:
    """Per model: limit, p3, ddp and ddp-tuned at balance 1.0, and what p3 has over the two."""
    performance = (DOCS / "performance.md").read_text()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in performance.splitlines()]
    at_balance = [row for row in cells if row[:1] == ["1.0"]]
    steps = {row[1]: [row[2], row[3], row[6], row[7]] for row in at_balance if len(row) == 9}
    over = {row[1]: [f"{row[3]}, {row[4]}"] for row in at_balance if len(row) == 8}
    shown = rows(ROOT / "README.md", "What it brings")
    assert len(shown) == len(steps) == 4
    assert {row[0]: row[1:] for row in shown} == {name: steps[name] + over[name] for name in steps}


def test_the_chart_of_the_readme_shows_its_figures() -> None:
    """The number on the first screen is the table's, and so is what the chart is drawn from."""
    readme = (ROOT / "README.md").read_text()
    shown = {row[0]: row for row in rows(ROOT / "README.md", "What it brings")}
    headline = re.search(r"\*\*([0-9.]+) times DDP's throughput\*\*\s+for (\S+)", readme)
    assert headline
    assert shown[headline[2]][5].partition(",")[0] == headline[1]
    chart = runpy.run_path(str(ROOT / "scripts" / "ddp_chart.py"))
    for model in chart["MODELS"]:
        panel = chart["panels"]()[model]
        at_balance = {name: dict(chart["points"](panel, name))[1.0] for name in chart["SHOWN"]}
        over_ddp = at_balance["p3"] / at_balance["ddp"]
        over_tuned = at_balance["p3"] / at_balance["ddp-tuned"]
        assert shown[model][5] == f"{over_ddp:.2f}, {over_tuned:.2f}"
        assert at_balance["p3"] <= max(y for x, y in chart["limit"](panel) if x <= 1.03)


def drawn_lines(chart: dict[str, Any]) -> list[dict[str, Any]]:
    """By panel and label."""
    figure = Figure()
    chart["draw"](figure)
    return [{str(line.get_label()): line for line in axes.lines} for axes in figure.axes]


def test_the_chart_of_the_readme_joins_and_shows_only_what_was_measured() -> None:
    chart = runpy.run_path(str(ROOT / "scripts" / "ddp_chart.py"))
    assert "No schedule\ncan beat the black line" in (ROOT / "README.md").read_text()
    for model, lines in zip(chart["MODELS"], drawn_lines(chart), strict=True):
        limit, plain = lines["the limit"], lines["DDP"]
        assert (limit.get_linestyle(), to_hex(limit.get_color())) == ("-", chart["INK"])
        best = lines["DDP, best of several bucket sizes"]
        assert best.get_linestyle() == "None"
        usual = dict(zip(plain.get_xdata(), plain.get_ydata(), strict=True))
        shown = {
            x: y
            for x, y in zip(best.get_xdata(), best.get_ydata(), strict=True)
            if not math.isnan(y)
        }
        assert sorted(shown) == sorted(
            x for x, _ in chart["points"](chart["panels"]()[model], "ddp-tuned")
        )
        assert len(shown) == 3 < len(usual)
        assert all(y >= usual[x] for x, y in shown.items())  # the usual size is one of several


def test_the_best_of_several_is_at_least_the_usual_one() -> None:
    chart = runpy.run_path(str(ROOT / "scripts" / "ddp_chart.py"))
    curves = {"ddp": [(1, 0.7), (2, 0.9)], "ddp-tuned": [(1, 0.6), (2, 0.95), (3, 0.5)]}
    panel = {
        "axis": {"second_ticks": [[1, "1"]]},
        "limit": [[1, 1]],
        "curves": [
            {"system": name, "points": [{"x": x, "throughput": y} for x, y in points]}
            for name, points in curves.items()
        ],
    }
    assert chart["shown_points"](panel, "ddp-tuned") == [(1, 0.7), (2, 0.95), (3, 0.5)]
    assert chart["shown_points"](panel, "ddp") == curves["ddp"]


def test_the_readme_has_the_two_commands() -> None:
    readme = (ROOT / "README.md").read_text()
    assert re.findall(r"^    (make \w+) +#", readme, flags=re.MULTILINE) == [
        "make demo",
        "make test",
    ]


MODULES = re.compile(r"python3?\s+-m\s+((?:foreprop|tests|scripts)[\w.]*)")


def test_every_module_that_a_page_runs_is_there_to_be_run() -> None:
    """As ``-m``: a file of the lab does not find the others by its path."""
    by_path = [
        f"{page.name}: {found}"
        for page, text in TEXTS.items()
        for found in re.findall(r"python3?\s+(?:lab|tests)/\S+", text)
    ]
    assert by_path == []
    named = {name for text in TEXTS.values() for name in MODULES.findall(text)}
    assert len(named) > 10
    for name in named:
        folder = {"foreprop": "src", "foreprop_lab": "lab/src"}.get(name.partition(".")[0], "")
        path = ROOT / folder / name.replace(".", "/")
        file = (
            path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__main__.py"
        )
        assert file.is_file(), name
        assert file.name == "__main__.py" or "__main__" in file.read_text(), name


def curves_of_figure_1() -> dict[str, dict[str, dict[float, float]]]:
    """Throughput by rate, by model and system."""
    data = json.loads((LAB_DOCS / "results" / "figure-1-bandwidth.json").read_text())
    return {
        panel["title"]: {
            curve["system"]: {point["x"]: point["throughput"] for point in curve["points"]}
            for curve in panel["curves"]
        }
        for panel in data
    }


def knee(curve: dict[float, float], share: float = 0.97) -> float:
    """The least rate with so much of the highest throughput, between two that were measured."""
    wanted = share * max(curve.values())
    for (low, below), (high, above) in itertools.pairwise(sorted(curve.items())):
        if below < wanted <= above:
            return low + (high - low) * (wanted - below) / (above - below)
    raise AssertionError(curve)


def test_what_the_papers_page_says_of_network_and_slicing_is_what_was_measured() -> None:
    page, curves = (LAB_DOCS / "papers.md").read_text(), curves_of_figure_1()
    ours, theirs = (knee(curves["ResNet-50"][system]) for system in ("p3", "kvstore"))
    told = f"at {ours:.2f} Gbit/s, with `kvstore` at {theirs:.2f}: {theirs / ours:.2f} |"
    assert told in page
    gains = [
        max(of["slicing"][rate] / of["kvstore"][rate] for rate in of["kvstore"])
        for of in (curves[model] for model in ("ResNet-50", "InceptionV3", "VGG-19", "Sockeye"))
    ]
    first, second, *others = (f"{gain:.2f}" for gain in gains)
    assert f"up to {first} and {second} over `kvstore`" in page
    assert "VGG-19 ({}) and Sockeye ({})".format(*others) in page
