"""Fashion-MNIST, downloaded when it is first needed, checked, and kept outside the repository.

The files are kept unpacked in ``fashion-mnist`` under ``FOREPROP_DATA``, or else
``$XDG_CACHE_HOME/foreprop``, or else ``~/.cache/foreprop``. ``python -m foreprop_lab.datasets``
fetches them and prints where they are. They come from the authors' address by https, or from
Debian's package where that address cannot be reached.
"""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import hashlib
import math
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pooch
import torch
from numpy.typing import NDArray
from torch.utils.data import TensorDataset

from foreprop.errors import ForepropError

Split = Literal["train", "test"]
Source = Callable[[Path, Sequence[str]], None]
"""Puts each named file into a folder, gzipped as ``NAME.gz`` or plain as ``NAME``."""

MEAN = 0.2860
STD = 0.3530
ADDRESS = "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/"
PACKAGE = "dataset-fashion-mnist"
PACKAGE_FOLDER = Path("usr/share/datasets/fashion-mnist")
_TRAIN = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
}
_TEST = {
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
FILES: Mapping[Split, Mapping[str, str]] = {"train": _TRAIN, "test": _TEST}
"""Each split's images and labels, with the SHA-256 of the unpacked bytes.

Packed files of different origin differ in their bytes.
"""

_CONNECT_TIMEOUT_S = 30
_COMMAND_TIMEOUT_S = 600
_FETCH_ERRORS = (OSError, ValueError, EOFError, zlib.error, subprocess.SubprocessError)


class DatasetUnavailable(ForepropError, RuntimeError):
    """The data set is not on this machine and cannot be fetched.

    The message says what was tried and what to do.
    """


def fashion_mnist(split: Split, root: Path | None = None) -> TensorDataset:
    """A split's images float32 (N, 1, 28, 28), normalised by `MEAN` and `STD`; labels int64 (N,).

    ``root`` replaces the cache folder. The first call fetches the data, once for all processes.
    Raises `DatasetUnavailable`.
    """
    images, labels = load_arrays(split, root)
    pixels = torch.from_numpy(images).to(torch.float32).div_(255).sub_(MEAN).div_(STD)
    return TensorDataset(pixels.unsqueeze(1), torch.from_numpy(labels).to(torch.int64))


def load_arrays(
    split: Split, root: Path | None = None
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """A split's images (N, 28, 28) and labels (N,) as the files have them; see `fashion_mnist`."""
    folder = ensure_files(root)
    images, labels = (read_idx(folder / name) for name in FILES[split])
    return images, labels


def read_idx(path: Path) -> NDArray[np.uint8]:
    """Read an idx file of bytes as a writable array; raises `DatasetUnavailable` if it is none."""
    data = path.read_bytes()
    try:
        zeros, kind, rank = struct.unpack_from(">HBB", data)
        shape = struct.unpack_from(f">{rank}I", data, 4)
    except struct.error as error:
        raise _damaged(path, f"its header ends after {len(data)} bytes") from error
    if zeros != 0 or kind != 8:
        raise _damaged(path, "it does not begin like an idx file of bytes")
    body = np.frombuffer(data, np.uint8, offset=4 + 4 * rank)
    if body.size != math.prod(shape):
        raise _damaged(path, f"it has {body.size} bytes of data for the shape {shape}")
    return body.reshape(shape).copy()


def _damaged(path: Path, why: str) -> DatasetUnavailable:
    return DatasetUnavailable(f"{path} is damaged ({why}): delete it, and it is fetched again")


def data_folder() -> Path:
    """The folder in which data sets are kept; it need not exist yet."""
    chosen = os.environ.get("FOREPROP_DATA")
    if chosen:
        return Path(chosen).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "foreprop"


def ensure_files(
    root: Path | None = None,
    *,
    files: Mapping[str, str] | None = None,
    sources: Mapping[str, Source] | None = None,
) -> Path:
    """The folder with Fashion-MNIST's files, or with ``files``, fetched as by `ensure`."""
    files = files or _TRAIN | _TEST
    folder = (data_folder() if root is None else root) / "fashion-mnist"
    sources = sources or {
        str(folder): from_folder(folder),
        str("/" / PACKAGE_FOLDER): from_folder("/" / PACKAGE_FOLDER),
        ADDRESS: from_address(ADDRESS),
        f"Debian package {PACKAGE}": from_debian,
    }
    advice = (
        f"on a machine that has them, get {', '.join(f'{name}.gz' for name in files)} (from"
        f" {ADDRESS}, or Debian's package {PACKAGE}) and put them into {folder}; or set"
        " FOREPROP_DATA to a folder whose fashion-mnist/ has them."
    )
    ensure(folder, files, sources, what="Fashion-MNIST", advice=advice)
    return folder


# What follows serves any data set.
def ensure(
    folder: Path,
    files: Mapping[str, str],
    sources: Mapping[str, Source],
    *,
    what: str,
    advice: str,
) -> None:
    """Make sure that ``folder`` has ``files``, given with their SHA-256, or fetch them.

    ``what`` is the data set's name. Files that are missing or damaged come from the first source
    that works. If several processes or threads call this at the same time, one fetches and the
    others wait. A file appears under its name complete or not at all. Raises `DatasetUnavailable`.
    """
    if _are_whole(folder, files):
        return
    with _locked(folder):
        if _are_whole(folder, files):
            return
        for stale in folder.glob(".fetch-*"):  # its process was killed: we hold the lock
            shutil.rmtree(stale, ignore_errors=True)
        failures = []
        for name, source in sources.items():
            try:
                _fetch(source, folder, files)
            except _FETCH_ERRORS as error:
                failures.append(f"  {name}: {error}")
            else:
                return
    raise DatasetUnavailable(
        f"{what} is not here and could not be fetched. Tried:\n"
        + "\n".join(failures)
        + f"\nWhat to do: {advice}"
    )


def _are_whole(folder: Path, files: Mapping[str, str]) -> bool:
    return all(
        (folder / name).is_file() and _sha256_of(folder / name) == sha256
        for name, sha256 in files.items()
    )


def _sha256_of(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, against other processes and threads; the kernel frees it at exit."""
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stream = stack.enter_context((folder / ".lock").open("ab"))
            fcntl.flock(stream, fcntl.LOCK_EX)
        except OSError as error:
            raise DatasetUnavailable(
                f"cannot keep data in {folder}: {error.strerror or error}; set FOREPROP_DATA to a"
                " folder that can be written"
            ) from error
        yield


def _fetch(source: Source, folder: Path, files: Mapping[str, str]) -> None:
    pooch.get_logger().setLevel("WARNING")
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as name:
        packed = Path(name)
        source(packed, list(files))
        for file, sha256 in files.items():
            pooch.retrieve(
                url=file,
                known_hash=f"sha256:{sha256}",
                fname=file,
                path=folder,
                downloader=lambda file, out, _: _unpack(packed, file, Path(out)),
            )
            (folder / file).chmod(0o644)  # pooch's temporary file was for this user alone


def _unpack(packed: Path, name: str, out: Path) -> None:
    if (packed / name).exists():
        shutil.copyfile(packed / name, out)
        return
    with gzip.open(packed / f"{name}.gz") as stream, out.open("wb") as target:
        shutil.copyfileobj(stream, target)


def from_folder(folder: Path) -> Source:
    """A source that copies what someone else put into a folder, packed or plain."""

    def fetch(into: Path, names: Sequence[str]) -> None:
        for name in names:
            choices = (folder / f"{name}.gz", folder / name)
            found = next((path for path in choices if path.is_file()), None)
            if found is None:
                raise FileNotFoundError(f"no {name}.gz there")
            shutil.copyfile(found, into / found.name)

    return fetch


def from_address(address: str) -> Source:
    """A source that downloads the files under a public address, which ends in a slash."""

    def fetch(into: Path, names: Sequence[str]) -> None:
        for name in names:
            download(f"{address}{name}.gz", into / f"{name}.gz")

    return fetch


def download(address: str, into: Path) -> None:
    pooch.HTTPDownloader(timeout=_CONNECT_TIMEOUT_S)(address, str(into), None)


def from_debian(into: Path, names: Sequence[str]) -> None:
    """Download and unpack Debian's package as a plain user; nothing is installed."""
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise FileNotFoundError("no apt-get and dpkg-deb on this machine")
    with tempfile.TemporaryDirectory(prefix="foreprop-apt-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # root's apt downloads as another user, who has to get in
        try:
            run_quietly(folder, "apt-get", "-q", "download", PACKAGE)
        except subprocess.SubprocessError:  # the machine's package lists are empty or too old
            _download_with_own_lists(folder)
        (package,) = folder.glob(f"{PACKAGE}_*.deb")
        run_quietly(folder, "dpkg-deb", "-x", str(package), str(folder / "unpacked"))
        from_folder(folder / "unpacked" / PACKAGE_FOLDER)(into, names)


def _download_with_own_lists(folder: Path) -> None:
    lists, cache = folder / "lists", folder / "cache"
    (lists / "partial").mkdir(parents=True)
    (cache / "archives" / "partial").mkdir(parents=True)
    own = ("-q", "-o", f"Dir::State::Lists={lists}", "-o", f"Dir::Cache={cache}")
    run_quietly(folder, "apt-get", *own, "update")
    run_quietly(folder, "apt-get", *own, "download", PACKAGE)


def run_quietly(folder: Path, *command: str) -> None:
    """Run a command in `folder`; raises SubprocessError with its last line if it fails."""
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"LC_ALL": "C"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_COMMAND_TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        last = done.stdout.strip().rpartition("\n")[2]
        raise subprocess.SubprocessError(f"{command[0]} failed: {last or done.returncode}")


def main() -> None:
    try:
        print(ensure_files())
    except DatasetUnavailable as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
