"""Other libraries' words for what foreprop has under another name, or does not need.

They are looked up only when a name or value is wrong, so that the error can say what to write.
``otherwords.toml`` has them.
"""

from __future__ import annotations

import difflib
import functools
import tomllib
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Any

from foreprop.errors import INSTALL_LAB

_OWN = "foreprop.parallelize"
Answers = dict[str, dict[str, str]]
"""What to do instead, by library or setting, and then by word."""


@functools.cache
def _table() -> dict[str, Any]:
    text = resources.files(__package__).joinpath("otherwords.toml").read_text(encoding="utf-8")
    return tomllib.loads(text.replace("{INSTALL_LAB}", INSTALL_LAB))


def _by_word(rows: Iterable[Mapping[str, Any]], keys: Iterable[str]) -> Answers:
    found: Answers = {key: {} for key in keys}
    for row in rows:
        for key, words in row.items():
            if key != "answer":
                found.setdefault(key, {}).update(dict.fromkeys(words, row["answer"]))
    return found


@functools.cache
def names() -> Answers:
    """By library; where several have a word the first counts."""
    return _by_word(_table()["names"], _table()["libraries"])


@functools.cache
def values() -> Answers:
    """By setting; values are in small letters, and without ``torch.``."""
    found = _by_word(_table()["values"], ())
    found["preset"] = {
        word: f"a preset is an order of sending; architecture is a setting: {answer}"
        for word, answer in found["architecture"].items()
        if word not in ("kvstore", "p3")
    }
    own = ("p2p", "ps", "ring", "hybrid", "auto")
    found["preset"] |= {word: f"write architecture={word!r}" for word in own}
    return found


def advice_on_name(name: str, known: Iterable[object], *, prefix: str = "") -> str:
    """What to add to an error about an unknown setting: a library's word, or a near name."""
    return answer_to_name(name) or did_you_mean(name, known, prefix=prefix)


def advice_on_value(setting: str, value: object, known: Iterable[object]) -> str:
    """What to add to an error about a setting's value: a library's word, or a near one."""
    return answer_to_value(setting, value) or did_you_mean(str(value), known)


def answer_to_name(name: str) -> str:
    """What a library's word for a setting is here; empty if no library has the word."""
    word = _plain(name)
    for library, answers in names().items():
        if word in answers:
            whose = "" if library == _OWN else f"{library}'s: "
            return f", which is {whose}{answers[word]}"
    return ""


def answer_to_value(setting: str, value: object) -> str:
    """What to write for a library's word for a value; empty if no library has the word."""
    text = getattr(value, "__name__", None) or str(value)
    answer = values().get(setting, {}).get(_plain(text).removeprefix("torch."))
    return f"; {answer}" if answer else ""


def _plain(word: str) -> str:
    return word.strip().lower().replace("-", "_").replace(" ", "_")


# Near names.
_CLOSE = 0.8  # difflib's measure of how like a known name one must be to be meant for it
_LEAST_PART = 4  # letters that may be a part of a known name
_MOST_NAMES = 5


def did_you_mean(name: str, known: Iterable[object], *, prefix: str = "") -> str:
    """What to add to an error about ``name``: the known name that is close, or a few that may be.

    The user writes each known name behind ``prefix``.
    """
    words = [word for word in known if isinstance(word, str)]
    found = difflib.get_close_matches(name, words, n=1, cutoff=_CLOSE)
    if not found:
        having = [word for word in words if len(name) >= _LEAST_PART and name in word]
        found = [*having, *difflib.get_close_matches(name, words, n=_MOST_NAMES)]
    *others, last = [repr(prefix + word) for word in dict.fromkeys(found[:_MOST_NAMES])] or [""]
    either = f"{', '.join(others)} or " if others else ""
    return f"; did you mean {either}{last}?" if last else ""
