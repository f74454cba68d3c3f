"""Fetching, checking and reading, on data sets of a few bytes and without a network."""

from __future__ import annotations

import functools
import gzip
import hashlib
import os
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch

from foreprop_lab import datasets
from foreprop_lab.datasets import DatasetUnavailable, Source, ensure_files, read_idx
from foreprop_lab.experiments import wikitext


def idx_bytes(shape: Sequence[int]) -> bytes:
    count = int(np.prod(shape))
    header = struct.pack(f">HBB{len(shape)}I", 0, 8, len(shape), *shape)
    return header + bytes(value % 251 for value in range(count))


IMAGES = idx_bytes((3, 28, 28))
LABELS = idx_bytes((3,))
CONTENTS = {"train-images": IMAGES, "train-labels": LABELS}


FILES = {name: hashlib.sha256(data).hexdigest() for name, data in CONTENTS.items()}


class CountingSource:
    """Serves `CONTENTS`, changed by `change`; counts how often it was asked."""

    def __init__(self, change: Callable[[bytes], bytes] = lambda packed: packed) -> None:
        self.calls = 0
        self._change = change
        self._lock = threading.Lock()

    def __call__(self, into: Path, names: Sequence[str]) -> None:
        with self._lock:
            self.calls += 1
        for name in names:
            (into / f"{name}.gz").write_bytes(self._change(gzip.compress(CONTENTS[name])))


def refuse(into: Path, names: Sequence[str]) -> None:
    raise ConnectionRefusedError("nobody there")


def ensure(root: Path, **sources: Source) -> Path:
    return ensure_files(root, files=FILES, sources=sources)


def test_files_are_fetched_once_and_nothing_else_is_left(tmp_path: Path) -> None:
    source = CountingSource()
    folder = ensure(tmp_path, good=source)
    assert ensure(tmp_path, good=source) == folder
    assert source.calls == 1
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == CONTENTS | {".lock": b""}


def test_callers_at_the_same_time_fetch_once(tmp_path: Path) -> None:
    callers = 4
    source = CountingSource()
    together = threading.Barrier(callers)

    def call() -> Path:
        together.wait()
        return ensure(tmp_path, good=source)

    with ThreadPoolExecutor(callers) as pool:
        folders = [call.result() for call in [pool.submit(call) for _ in range(callers)]]
    assert folders == [tmp_path / "fashion-mnist"] * callers
    assert source.calls == 1


def test_the_next_source_is_tried(tmp_path: Path) -> None:
    first, second = CountingSource(), CountingSource()
    ensure(tmp_path, refused=refuse, first=first, second=second)
    assert (first.calls, second.calls) == (1, 0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda packed: packed[:-12], "ended before the end-of-stream marker"),
        (lambda packed: b"<html>not here</html>", "Not a gzipped file"),
        (lambda packed: packed[:10] + b"\xff" * 8 + packed[18:], "invalid block type"),
        (lambda packed: gzip.compress(b"short"), "does not match the known hash"),
        (lambda packed: gzip.compress(bytes(99_999)), "does not match the known hash"),
        (lambda packed: gzip.compress(bytes(len(IMAGES))), "does not match the known hash"),
    ],
    ids=["truncated", "a web page", "garbled", "too short", "too long", "other bytes"],
)
def test_a_damaged_download_is_refused(
    tmp_path: Path, change: Callable[[bytes], bytes], says: str
) -> None:
    source = CountingSource(change)
    with pytest.raises(DatasetUnavailable, match=says):
        ensure(tmp_path, bad=source)
    assert source.calls == 1
    assert [path.name for path in (tmp_path / "fashion-mnist").iterdir()] == [".lock"]


def test_a_damaged_copy_in_the_cache_is_replaced(tmp_path: Path) -> None:
    folder = ensure(tmp_path, good=CountingSource())
    (folder / "train-images").write_bytes(bytes(len(IMAGES)))
    source = CountingSource()
    ensure(tmp_path, good=source)
    assert source.calls == 1
    assert (folder / "train-images").read_bytes() == IMAGES


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    left = tmp_path / "fashion-mnist" / ".fetch-old" / "packed"
    left.mkdir(parents=True)
    ensure(tmp_path, good=CountingSource())
    assert not left.parent.exists()


def test_when_nothing_works_one_error_says_what_was_tried_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DatasetUnavailable) as raised:
        ensure(tmp_path, first=refuse, second=CountingSource(lambda packed: b"?"))
    text = str(raised.value)
    for part in ("first: nobody there", "second:", "train-images.gz", str(tmp_path), "FOREPROP_"):
        assert part in text


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DatasetUnavailable, match=r"file/fashion-mnist.*FOREPROP_DATA"):
        ensure(tmp_path / "file", good=CountingSource())


def test_files_put_there_by_hand_are_taken_packed_or_plain(tmp_path: Path) -> None:
    folder = tmp_path / "fashion-mnist"
    folder.mkdir()
    (folder / "train-images.gz").write_bytes(gzip.compress(IMAGES))
    (folder / "train-labels").write_bytes(LABELS)
    ensure(tmp_path, here=datasets.from_folder(folder))
    assert (folder / "train-images").read_bytes() == IMAGES
    with pytest.raises(DatasetUnavailable, match=r"no train-images\.gz there"):
        ensure(tmp_path / "other", here=datasets.from_folder(tmp_path))


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """The test's output is not for it."""


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """Of a server of what lies in the test's folder."""
    handler = functools.partial(QuietHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def test_an_address_is_read(tmp_path: Path, address: str) -> None:
    CountingSource()(tmp_path, list(CONTENTS))
    folder = ensure(tmp_path / "root", address=datasets.from_address(address))
    assert (folder / "train-labels").read_bytes() == LABELS
    with pytest.raises(DatasetUnavailable, match="404"):
        ensure(tmp_path / "other", address=datasets.from_address(f"{address}no/"))


def test_where_no_address_can_be_reached_a_mirror_is_used(tmp_path: Path) -> None:
    nobody = datasets.from_address("http://127.0.0.1:9/")
    folder = ensure(tmp_path, address=nobody, mirror=CountingSource())
    assert (folder / "train-images").read_bytes() == IMAGES


APT_GET = """#!/bin/sh
echo "$*" >> "$APT_LOG"
case "$*" in
    *Lists=*update) touch lists/filled ;;
    *download*) if [ -e lists/filled ] || [ -e "$APT_LOG.known" ]; then
                    touch dataset-fashion-mnist_1_all.deb
                else
                    echo "E: Unable to locate package dataset-fashion-mnist"; exit 100
                fi ;;
esac
"""
DPKG_DEB = """#!/bin/sh
mkdir -p "$3/usr/share/datasets" && cp -r "$PACKED" "$3/usr/share/datasets/fashion-mnist"
"""


@pytest.fixture
def apt_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Debian of two scripts; its apt-get knows the package if the log's .known exists."""
    packed = tmp_path / "packed"
    packed.mkdir()
    CountingSource()(packed, list(CONTENTS))
    for name, script in {"apt-get": APT_GET, "dpkg-deb": DPKG_DEB}.items():
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PACKED", str(packed))
    monkeypatch.setenv("APT_LOG", str(tmp_path / "apt.log"))
    return tmp_path / "apt.log"


def apt_actions(log: Path) -> list[str]:
    lines = log.read_text().splitlines()
    return [word for line in lines for word in line.split() if word in {"update", "download"}]


def test_the_debian_package_is_unpacked(tmp_path: Path, apt_log: Path) -> None:
    Path(f"{apt_log}.known").touch()
    folder = ensure(tmp_path / "root", debian=datasets.from_debian)
    assert (folder / "train-images").read_bytes() == IMAGES
    assert apt_actions(apt_log) == ["download"]


def test_package_lists_are_fetched_when_the_machine_has_none(tmp_path: Path, apt_log: Path) -> None:
    folder = ensure(tmp_path / "root", debian=datasets.from_debian)
    assert (folder / "train-images").read_bytes() == IMAGES
    assert apt_actions(apt_log) == ["download", "update", "download"]


def test_without_debian_the_source_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DatasetUnavailable, match="no apt-get and dpkg-deb on this machine"):
        ensure(tmp_path, debian=datasets.from_debian)


def test_the_data_set_as_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "FILES", {"train": FILES})
    monkeypatch.setattr(datasets, "ensure_files", lambda root: ensure(root, s=CountingSource()))
    images, labels = datasets.fashion_mnist("train", tmp_path).tensors
    assert (images.shape, images.dtype) == ((3, 1, 28, 28), torch.float32)
    assert (labels.tolist(), labels.dtype) == ([0, 1, 2], torch.int64)
    expected = torch.tensor([(value / 255 - 0.2860) / 0.3530 for value in (0, 1, 2)])
    torch.testing.assert_close(images[0, 0, 0, :3], expected)
    raw, _ = datasets.load_arrays("train", tmp_path)
    assert raw.dtype == np.uint8
    assert (raw.shape, raw[0, 0, 2]) == ((3, 28, 28), 2)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "header ends after 0 bytes"),
        (IMAGES[:10], "header ends after 10 bytes"),
        (b"\x00\x00\x0d" + IMAGES[3:], "does not begin like an idx file"),
        (IMAGES[:-1], r"2351 bytes of data for the shape \(3, 28, 28\)"),
        (IMAGES + b"x", "2353 bytes of data"),
    ],
)
def test_a_file_that_is_not_idx_is_refused(tmp_path: Path, data: bytes, says: str) -> None:
    path = tmp_path / "images"
    path.write_bytes(data)
    with pytest.raises(DatasetUnavailable, match=says):
        read_idx(path)


def test_where_data_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("FOREPROP_DATA", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert datasets.data_folder() == tmp_path / ".cache" / "foreprop"
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert datasets.data_folder() == Path("/cache/foreprop")
    monkeypatch.setenv("FOREPROP_DATA", "~/data")
    assert datasets.data_folder() == tmp_path / "data"


def test_every_public_address_is_https() -> None:
    assert datasets.ADDRESS.startswith("https://")
    assert wikitext.ADDRESS.startswith("https://")


def test_the_real_files_are_described() -> None:
    assert set(datasets.FILES) == {"train", "test"}
    for files in datasets.FILES.values():
        assert ["idx3" in name for name in files] == [True, False]
        assert all(len(sha256) == 64 for sha256 in files.values())
