"""Fashion-MNIST, fetched when asked for, checked, and cached outside the repository.

Kept unpacked in ``fashion-mnist`` under ``FOREPROP_DATA``, or else ``$XDG_CACHE_HOME/foreprop``, or
else ``~/.cache/foreprop``. ``python -m foreprop.datasets`` fetches it and prints where it is.
"""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import hashlib
import http.client
import math
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import TensorDataset

from foreprop.errors import ForepropError

Split = Literal["train", "test"]
Source = Callable[[Path, Sequence[str]], None]
"""Puts each named file, gzipped as ``NAME.gz`` or plain as ``NAME``, into the folder."""

MEAN = 0.2860
STD = 0.3530
PACKAGE = "dataset-fashion-mnist"
PACKAGE_FOLDER = Path("usr/share/datasets/fashion-mnist")
ADDRESSES = (
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
)
CONNECT_TIMEOUT_S = 30
APT_TIMEOUT_S = 600
CHUNK_BYTES = 1 << 20
FETCH_ERRORS = (
    OSError,
    ValueError,
    EOFError,
    zlib.error,
    http.client.HTTPException,
    subprocess.SubprocessError,
)


class DatasetUnavailable(ForepropError, RuntimeError):
    """The data set is neither here nor to be had; says what was tried and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """One file of the data set, as it is when unpacked."""

    name: str
    size_bytes: int
    sha256: str


FILES: Mapping[Split, tuple[DataFile, DataFile]] = {
    "train": (
        DataFile(
            name="train-images-idx3-ubyte",
            size_bytes=47_040_016,
            sha256="c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        ),
        DataFile(
            name="train-labels-idx1-ubyte",
            size_bytes=60_008,
            sha256="bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        ),
    ),
    "test": (
        DataFile(
            name="t10k-images-idx3-ubyte",
            size_bytes=7_840_016,
            sha256="5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        ),
        DataFile(
            name="t10k-labels-idx1-ubyte",
            size_bytes=10_008,
            sha256="0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        ),
    ),
}
"""Images and labels of each split. The sums are of unpacked bytes: mirrors pack as they like."""


def fashion_mnist(split: Split, root: Path | None = None) -> TensorDataset:
    """Images float32 (N, 1, 28, 28), normalised by `MEAN` and `STD`; labels int64 (N,).

    `root` replaces the cache folder. Fetches the data on first use, once for all processes.
    Raises `DatasetUnavailable`.
    """
    images, labels = load_arrays(split, root)
    pixels = torch.from_numpy(images).to(torch.float32).div_(255).sub_(MEAN).div_(STD)
    return TensorDataset(pixels.unsqueeze(1), torch.from_numpy(labels).to(torch.int64))


def load_arrays(
    split: Split, root: Path | None = None
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Images (N, 28, 28) and labels (N,) as they are in the files; else as `fashion_mnist`."""
    folder = ensure_files(root)
    images, labels = (read_idx(folder / file.name) for file in FILES[split])
    return images, labels


def read_idx(path: Path) -> NDArray[np.uint8]:
    """An idx file of bytes as a writable array; raises `DatasetUnavailable` if it is not one."""
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
    """Where data sets are kept; need not exist yet."""
    chosen = os.environ.get("FOREPROP_DATA")
    if chosen:
        return Path(chosen).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "foreprop"


def ensure_files(
    root: Path | None = None,
    *,
    files: Sequence[DataFile] = (*FILES["train"], *FILES["test"]),
    sources: Mapping[str, Source] | None = None,
) -> Path:
    """The folder that holds `files`, each checked; what is missing or damaged is fetched first.

    Processes and threads that call this at the same time fetch once: the others wait. A file
    appears under its name whole or not at all. Raises `DatasetUnavailable`.
    """
    folder = (data_folder() if root is None else root) / "fashion-mnist"
    names = ", ".join(f"{file.name}.gz" for file in files)
    advice = (
        f"on a machine that has them, get {names} (https://github.com/zalandoresearch/"
        f"fashion-mnist, or Debian's package {PACKAGE}) and put them into {folder}; or set"
        " FOREPROP_DATA to a folder whose fashion-mnist/ has them."
    )
    ensure(folder, files, sources or default_sources(folder), what="Fashion-MNIST", advice=advice)
    return folder


def ensure(
    folder: Path,
    files: Sequence[DataFile],
    sources: Mapping[str, Source],
    *,
    what: str,
    advice: str,
) -> None:
    """Have `files` in `folder`, as `ensure_files` says; `what` is the data set's name."""
    if _are_whole(folder, files):
        return
    with _locked(folder):
        if not _are_whole(folder, files):
            _fetch(folder, files, sources, what, advice)


def default_sources(folder: Path) -> dict[str, Source]:
    """What is tried, in order: copies on this machine, Debian's package, public addresses."""
    return {
        str(folder): from_folder(folder),
        str("/" / PACKAGE_FOLDER): from_folder("/" / PACKAGE_FOLDER),
        f"Debian package {PACKAGE}": from_debian,
        **{address: from_address(address) for address in ADDRESSES},
    }


def _are_whole(folder: Path, files: Sequence[DataFile]) -> bool:
    return all(maybe_fault(folder / file.name, file) is None for file in files)


def maybe_fault(path: Path, file: DataFile) -> str | None:
    """Why the plain file at `path` is not `file`; None if it is."""
    try:
        size_bytes = path.stat().st_size
        if size_bytes != file.size_bytes:
            return f"{path.name} has {size_bytes} bytes, not {file.size_bytes}"
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        return f"{path.name}: {error.strerror or error}"
    return None if digest == file.sha256 else f"{path.name} has another SHA-256 sum, {digest}"


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


def _fetch(
    folder: Path, files: Sequence[DataFile], sources: Mapping[str, Source], what: str, advice: str
) -> None:
    """Fill `folder` from the first source that works; call with the lock held."""
    for stale in folder.glob(".fetch-*"):  # its process was killed: we hold the lock
        shutil.rmtree(stale, ignore_errors=True)
    failures = []
    for name, source in sources.items():
        try:
            _fetch_from(source, folder, files)
        except FETCH_ERRORS as error:
            failures.append(f"  {name}: {error}")
        else:
            return
    raise DatasetUnavailable(
        f"{what} is not here and could not be fetched. Tried:\n"
        + "\n".join(failures)
        + f"\nWhat to do: {advice}"
    )


def _fetch_from(source: Source, folder: Path, files: Sequence[DataFile]) -> None:
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as name:
        packed, plain = Path(name, "packed"), Path(name, "plain")
        packed.mkdir()
        plain.mkdir()
        source(packed, [file.name for file in files])
        for file in files:
            _unpack(packed, plain, file)
        for file in files:
            (plain / file.name).replace(folder / file.name)


def _unpack(packed: Path, plain: Path, file: DataFile) -> None:
    """Unpack and check one file; raises ValueError, or what gzip raises, if it is not `file`."""
    target = plain / file.name
    if (packed / file.name).exists():
        (packed / file.name).replace(target)
    else:
        with gzip.open(packed / f"{file.name}.gz") as stream:
            _copy_at_most(stream, target, file.size_bytes)
    fault = maybe_fault(target, file)
    if fault is not None:
        raise ValueError(fault)


def _copy_at_most(stream: gzip.GzipFile, target: Path, limit_bytes: int) -> None:
    """Copy up to one byte more than the limit, so that the size check sees the excess."""
    left_bytes = limit_bytes + 1
    with target.open("wb") as out:
        while left_bytes and (chunk := stream.read(min(CHUNK_BYTES, left_bytes))):
            left_bytes -= out.write(chunk)


def from_folder(folder: Path) -> Source:
    """Copies that someone else put there, packed or plain."""

    def fetch(into: Path, names: Sequence[str]) -> None:
        for name in names:
            choices = (folder / f"{name}.gz", folder / name)
            found = next((path for path in choices if path.is_file()), None)
            if found is None:
                raise FileNotFoundError(f"no {name}.gz there")
            shutil.copyfile(found, into / found.name)

    return fetch


def from_address(address: str) -> Source:
    """The files under a public address that ends in a slash."""

    def fetch(into: Path, names: Sequence[str]) -> None:
        for name in names:
            with (
                urllib.request.urlopen(f"{address}{name}.gz", timeout=CONNECT_TIMEOUT_S) as reply,
                (into / f"{name}.gz").open("wb") as out,
            ):
                shutil.copyfileobj(reply, out, CHUNK_BYTES)

    return fetch


def from_debian(into: Path, names: Sequence[str]) -> None:
    """Debian's package, downloaded and unpacked without root and without installing anything."""
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise FileNotFoundError("no apt-get and dpkg-deb on this machine")
    with tempfile.TemporaryDirectory(prefix="foreprop-apt-") as name:
        folder = Path(name)
        try:
            _apt(folder, "download", PACKAGE)
        except subprocess.SubprocessError:  # the machine's package lists are empty or too old
            _download_with_own_lists(folder)
        (package,) = folder.glob(f"{PACKAGE}_*.deb")
        run_quietly(folder, "dpkg-deb", "-x", str(package), str(folder / "unpacked"))
        from_folder(folder / "unpacked" / PACKAGE_FOLDER)(into, names)


def _download_with_own_lists(folder: Path) -> None:
    lists, cache = folder / "lists", folder / "cache"
    (lists / "partial").mkdir(parents=True)
    (cache / "archives" / "partial").mkdir(parents=True)
    own = ("-o", f"Dir::State::Lists={lists}", "-o", f"Dir::Cache={cache}")
    _apt(folder, *own, "update")
    _apt(folder, *own, "download", PACKAGE)


def _apt(folder: Path, *arguments: str) -> None:
    # As root, apt would hand downloads to a user that cannot enter this private folder.
    run_quietly(folder, "apt-get", "-q", "-o", "APT::Sandbox::User=root", *arguments)


def run_quietly(folder: Path, *command: str) -> None:
    """Run quietly in `folder`; a failure raises SubprocessError with the last line that it said."""
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"LC_ALL": "C"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=APT_TIMEOUT_S,
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
