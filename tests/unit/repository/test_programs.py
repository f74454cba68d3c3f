"""The harness that runs other people's programs: edits, verdicts, sources that are not there."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch

from tests.programs import catalogue, source, table
from tests.programs.compare import (
    CLOSE,
    DIFFERENT,
    EQUAL,
    NOT_RUN,
    REFUSED,
    Comparison,
    relative_difference,
    verdict,
)
from tests.programs.examine import Examination
from tests.programs.launch import Outcome
from tests.programs.own import SOURCES, TINY
from tests.programs.program import DDP, FOREPROP, EditError, Program, after, before, replace

TEXT = "import torch\n\nfor x in data:\n    step(x)\n"


# Edits
def test_lines_are_put_around_the_one_that_is_found_at_its_indentation() -> None:
    edit = after("step(", "a()", "b()")
    assert edit.apply(TEXT, "p") == TEXT.replace("    step(x)", "    step(x)\n    a()\n    b()")
    assert before("step(", "a()").apply(TEXT, "p") == TEXT.replace("    step", "    a()\n    step")
    assert replace("(x)", "(y)").apply(TEXT, "p") == TEXT.replace("(x)", "(y)")
    assert (edit.lines, replace("t", "u", count=3).lines) == (2, 3)


@pytest.mark.parametrize("edit", [after("nothing"), after("t"), replace("step", "s", count=2)])
def test_an_edit_that_does_not_fit_the_text_is_an_error(edit: object) -> None:
    assert isinstance(edit, type(after("x")))
    with pytest.raises(EditError, match=r"p: .* is in \d lines"):
        edit.apply(TEXT, "p")


def test_only_foreprops_variant_imports_it(tmp_path: Path) -> None:
    for variant, imports in ((FOREPROP, 1), (DDP, 0)):
        folder = tmp_path / variant
        folder.mkdir()
        (folder / "train.py").write_text((SOURCES / TINY.repository / "train.py").read_text())
        TINY.patch(folder, variant)
        text = (folder / "train.py").read_text()
        assert text.count("import foreprop\n") == imports
        assert text.count("foreprop.") == 2 * imports
        compile(text, "train.py", "exec")


# The catalogue
def test_programs_have_names_of_their_own_and_two_variants() -> None:
    names = [program.name for program in catalogue.PROGRAMS]
    assert len(set(names)) == len(names) >= 15
    for program in catalogue.PROGRAMS:
        assert re.fullmatch(r"[0-9a-f]{40}", program.commit), program.name
        assert any("foreprop.parallelize(" in line for e in program.foreprop for line in _new(e))
        assert program.group or program.ddp, f"{program.name} has no DDP"


def _new(edit: object) -> list[str]:
    assert isinstance(edit, type(after("x")))
    return [*edit.before, *edit.after, edit.replacement or ""]


def test_what_is_chosen() -> None:
    assert [program.name for program in catalogue.chosen(["mingpt", "minGPT"])] == ["minGPT/adder"]
    assert len(catalogue.chosen([])) == len(catalogue.PROGRAMS)


# Sources
@pytest.fixture
def programs_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("PROGRAMS_DIR", str(tmp_path / "sources"))
    return tmp_path / "sources"


def test_a_program_whose_source_is_not_here_is_skipped_with_how_to_get_it(
    programs_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    examination = Examination(tmp_path / "runs")
    examination.run(TINY, 2)
    said = f"git clone https://github.com/own/tiny {programs_dir}/own/tiny"
    assert examination.skipped == {"tiny": said}
    assert f"tiny: skipped; {said}" in capsys.readouterr().out
    assert not examination.failed


def test_a_program_that_imports_what_is_not_here_is_skipped(
    programs_dir: Path, tmp_path: Path
) -> None:
    examination = Examination(tmp_path / "runs")
    examination.run(_program(packages=["no_such_package"]), 2)
    assert "no_such_package" in examination.skipped["one"]


def _program(**fields: object) -> Program:
    names = ("commit", "licence", "about")
    required = {"name": "one", "repository": "own/one", "path": "a.py", **dict.fromkeys(names, "")}
    return Program(**{**required, **fields})  # type: ignore[arg-type]


def test_the_files_are_those_of_the_commit(programs_dir: Path, tmp_path: Path) -> None:
    clone = programs_dir / "own" / "one"
    clone.mkdir(parents=True)

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=n", "-c", "user.email=e@example.invalid"]
        command = ["git", "-C", str(clone), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    (clone / "a.py").write_text("old")
    (clone / "b.py").write_text("not asked for")
    git("add", "-A")
    git("commit", "-q", "-m", "one")
    commit = git("rev-parse", "HEAD")
    (clone / "a.py").write_text("new")
    git("commit", "-q", "-a", "-m", "two")

    source.copy_out(_program(commit=commit), tmp_path / "copy")
    assert [(p.name, p.read_text()) for p in (tmp_path / "copy").iterdir()] == [("a.py", "old")]
    with pytest.raises(source.NotHere, match="fetch origin 0123"):
        source.copy_out(_program(commit="0123456789" * 4), tmp_path / "copy")


# Verdicts
def _outcome(*values: float, losses: tuple[float, ...] = (1.0, 0.5), error: str = "") -> Outcome:
    found = {"0.weight": torch.tensor(values)} if values else {}
    return Outcome(error=error, losses=[list(losses)] * 2, digests=["a", "a"], parameters=found)


def test_differences_are_relative_to_a_parameters_largest_element() -> None:
    assert relative_difference(_outcome(1.0, 4.0), _outcome(1.0, 4.0)) == 0
    assert relative_difference(_outcome(1.5, 4.0), _outcome(1.0, 4.0)) == 0.125
    assert relative_difference(_outcome(float("nan")), _outcome(1.0)) != 0
    assert relative_difference(_outcome(), _outcome(1.0)) == float("inf")


@pytest.mark.parametrize(
    ("ours", "theirs", "exact", "expected"),
    [
        (_outcome(1.0), _outcome(1.0), True, EQUAL),
        (_outcome(1.0), _outcome(1.0 + 1e-6), True, DIFFERENT),
        (_outcome(1.0), _outcome(1.0 + 1e-6), False, CLOSE),
        (_outcome(1.0), _outcome(1.1), False, DIFFERENT),
        (_outcome(1.0, losses=(1.0, 0.6)), _outcome(1.0), True, DIFFERENT),
        (_outcome(error="ConfigError: no"), _outcome(1.0), True, REFUSED),
        (_outcome(error="ConfigError: no"), _outcome(error="no such module"), True, NOT_RUN),
    ],
)
def test_verdicts(ours: Outcome, theirs: Outcome, exact: bool, expected: str) -> None:
    assert verdict(ours, theirs, 1e-4, exact=exact)[0] == expected


def test_what_ddp_differs_by_from_itself_is_no_difference() -> None:
    ours, theirs = _outcome(1.0), _outcome(1.1)
    assert verdict(ours, theirs, 1e-4, exact=False, yardstick=0.05)[0] == CLOSE
    assert verdict(ours, theirs, 1e-4, exact=False, yardstick=0.001)[0] == DIFFERENT


def test_ranks_that_drift_apart_are_told() -> None:
    ours = _outcome(1.0)
    ours.digests = ["a", "b"]
    assert verdict(ours, _outcome(1.0), 1e-4, exact=False) == (
        DIFFERENT,
        "the ranks' parameters are not the same",
    )


# The page
def test_the_table_is_put_between_the_marks(tmp_path: Path) -> None:
    page = tmp_path / "programs.md"
    marks = "before\n<!-- table -->\nold\n<!-- end of table -->\n"
    page.write_text(f"{marks}<!-- origins --><!-- end of origins -->\nafter\n")
    found = Comparison(
        program="nanoGPT",
        world=2,
        lines=1,
        verdict=EQUAL,
        difference=0.0,
        step_s=0.2,
        ddp_step_s=0.1,
    )
    table.write(page, [found], [2, 3])
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    row = next(line for line in text.splitlines() if line.startswith("| nanoGPT |"))
    assert "bits equal | 200.0 ms, 2.00 of DDP" in row
    head = next(line for line in text.splitlines() if "program" in line and "lines" in line)
    assert row.count("|") == head.count("|")


def test_the_documented_programs_are_those_of_the_catalogue() -> None:
    text = (Path(__file__).parents[3] / "lab" / "docs" / "programs.md").read_text()
    for program in catalogue.PROGRAMS:
        assert f"| {program.name} |" in text, program.name
        assert program.repository in text, program.name
