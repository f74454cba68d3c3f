"""Check that commit subjects are imperative and at most 72 characters long; name the others.

python scripts/check_commits.py [BASE]

It checks the commits since BASE. By default these are the ones that origin/main does not have. If
it has all of them, or there is no origin/main, they are those since `FIRST`. Commits before `FIRST`
are older than the rule and never checked. An export or a shallow clone has no such history: then
the check says so and passes.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

FIRST = "f1814391cd60da0995fc5738d0a1d20dc4094825"
ORIGIN = "refs/remotes/origin/main"
LONGEST = 72

RULES = (
    (rf"^.{{{LONGEST + 1},}}$", f"is longer than {LONGEST} characters"),
    (r"^(?![A-Z])", "does not begin with a capital letter"),
    (r"\.$", "ends with a period"),
    (r"(?i)\bwip\b", "is work in progress"),
    (r"^(The|A|An)\b", "is about a thing; say what the commit does, as in 'Skip the lane scan'"),
    (r"^\S+:( |$)", "begins with a path or a label"),
)


def problems(subject: str) -> list[str]:
    """What is wrong with a subject; an empty list if nothing is."""
    return [what for pattern, what in RULES if re.search(pattern, subject)]


def subjects(folder: Path, base: str | None = None) -> list[tuple[str, str]] | None:
    """The commits to check as (short hash, subject), newest first; None without a history."""
    if not _knows(folder, FIRST) or not _knows(folder, base or FIRST):
        return None
    if base is not None:
        return _log(folder, FIRST, base)
    ahead = _log(folder, FIRST, ORIGIN) if _knows(folder, ORIGIN) else []
    return ahead or _log(folder, FIRST)


def _knows(folder: Path, commit: str) -> bool:
    return _git(folder, "cat-file", "-e", f"{commit}^{{commit}}") is not None


def _log(folder: Path, *without: str) -> list[tuple[str, str]]:
    """The commits that HEAD has and none of the others has."""
    leave_out = [f"^{commit}" for commit in without]
    text = _git(folder, "log", "--no-merges", "--format=%h %s", "HEAD", *leave_out) or ""
    pairs = [line.partition(" ") for line in text.splitlines()]
    return [(commit, subject) for commit, _, subject in pairs]


def _git(folder: Path, *arguments: str) -> str | None:
    """What git prints; None if it fails or is not installed."""
    try:
        ended = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return None
    return ended.stdout if ended.returncode == 0 else None


def main(folder: Path, base: str | None = None) -> int:
    commits = subjects(folder, base)
    if commits is None:
        print(f"commit subjects: no history since {(base or FIRST)[:12]} here, nothing to check")
        return 0
    failures = [
        f"{commit} {subject!r} {what}" for commit, subject in commits for what in problems(subject)
    ]
    print(*failures, f"commit subjects: {len(commits)} checked, {len(failures)} wrong", sep="\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(Path(__file__).parents[1], *sys.argv[1:2]))
