"""scripts/check_commits.py fails when a subject breaks the rule, and only then."""

from __future__ import annotations

import runpy
import subprocess
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "check_commits.py"
GOOD = "Skip the lane scan when nothing can be held back"


@pytest.fixture
def history(tmp_path: Path) -> Path:
    """A repository with one commit that is older than the rule."""
    git(tmp_path, "init", "-q", "-b", "main")
    commit(tmp_path, "a subject that is older than the rule.")
    return tmp_path


@pytest.fixture
def script(history: Path) -> dict[str, Any]:
    """The script, for which that commit is the first."""
    found = runpy.run_path(str(SCRIPT))
    found["subjects"].__globals__["FIRST"] = git(history, "rev-parse", "HEAD")
    return found


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=n", "-c", "user.email=e@localhost", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", "-C", str(folder), *who, *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def commit(folder: Path, subject: str) -> str:
    git(
        folder,
        "commit",
        "-q",
        "--allow-empty",
        "-m",
        subject,
        "-m",
        "the body. wip, as long as it likes",
    )
    return git(folder, "rev-parse", "HEAD")


BAD = {
    "Skip " + 68 * "x": "longer than 72",
    "skip the lane scan": "capital letter",
    "Skip the lane scan.": "period",
    "WIP on lanes": "work in progress",
    "The lane scan is skipped": "about a thing",
    "An idle link waits": "about a thing",
    "docs/performance.md: 16 nodes again": "path or a label",
}


def test_subjects_that_break_the_rule_fail(
    script: dict[str, Any], history: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for subject in (GOOD, *BAD):
        commit(history, subject)
    assert script["main"](history) == 1
    printed = capsys.readouterr().out
    assert [subject for subject, what in BAD.items() if f"{subject!r} {what}" in printed] == []
    assert f"{1 + len(BAD)} checked" in printed


def test_good_subjects_pass_and_older_ones_are_left_alone(
    script: dict[str, Any], history: Path
) -> None:
    assert script["main"](history) == 0
    commit(history, GOOD)
    commit(history, "Anneal the thresholds; skip " + 44 * "x")
    assert script["main"](history) == 0
    assert len(script["subjects"](history)) == 2


def test_a_merge_is_no_subject_of_ones_own(script: dict[str, Any], history: Path) -> None:
    git(history, "checkout", "-q", "-b", "side")
    commit(history, GOOD)
    git(history, "checkout", "-q", "main")
    commit(history, GOOD)
    git(history, "merge", "-q", "--no-ff", "-m", "merge of side", "side")
    assert script["main"](history) == 0


def test_what_origin_has_is_not_checked_unless_there_is_nothing_else(
    script: dict[str, Any], history: Path
) -> None:
    pushed = commit(history, "The wrong subject")
    git(history, "update-ref", "refs/remotes/origin/main", pushed)
    assert script["main"](history) == 1
    commit(history, GOOD)
    assert script["main"](history) == 0
    assert script["main"](history, pushed + "~") == 1


def test_without_a_history_nothing_fails(
    script: dict[str, Any], history: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export = tmp_path / "export"
    export.mkdir()
    git(history, "init", "-q", str(export))  # no commit of this one's
    assert script["main"](export) == 0
    commit(history, "The wrong subject")
    clone = tmp_path / "clone"
    git(history, "clone", "-q", "--depth", "1", f"file://{history}", str(clone))
    assert script["main"](clone) == 0
    assert capsys.readouterr().out.count("no history") == 2
