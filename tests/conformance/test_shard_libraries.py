"""`foreprop.shard` of webdataset's, Hugging Face's and accelerate's loaders, where installed."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, DistributedSampler

import foreprop
from foreprop.errors import ConfigError
from tests.cluster import worlds
from tests.conformance.matrices import few
from tests.conformance.shares import epoch_of, flat, numbers, sharded, torchs_share

FILES, EACH = 4, 6
WORKERS = pytest.mark.parametrize("workers", [0, 2])
IGNORED = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore::ResourceWarning",  # webdataset leaves its files to the garbage collector
    "ignore::pytest.PytestUnraisableExceptionWarning",
)


@pytest.fixture
def urls(tmp_path: Path) -> list[str]:
    """Four files of six numbers."""
    for file in range(FILES):
        with tarfile.open(tmp_path / f"{file}.tar", "w") as tar:
            for number in range(file * EACH, (file + 1) * EACH):
                content = str(number).encode()
                about = tarfile.TarInfo(f"{number:03}.txt")
                about.size = len(content)
                tar.addfile(about, io.BytesIO(content))
    return [str(tmp_path / f"{file}.tar") for file in range(FILES)]


def number_of(sample: Any) -> int:
    return int(sample["txt"])


def pipeline(urls: list[str], **options: Any) -> Any:
    webdataset = pytest.importorskip("webdataset")
    data = webdataset.WebDataset(urls, shardshuffle=False, **options)
    return data.decode().map(number_of).shuffle(10).batched(3, collation_fn=list)


@IGNORED
@pytest.mark.parametrize(("way", "workers"), few(["loader", "web loader", "bare"], [0, 2]))
def test_webdataset_divides_its_files(
    urls: list[str], way: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    webdataset = pytest.importorskip("webdataset")
    monkeypatch.setenv("WORLD_SIZE", "2")
    seen = []
    for world in worlds(2):
        monkeypatch.setenv("RANK", str(world.rank))
        data = pipeline(urls, nodesplitter=webdataset.split_by_node)
        loader = data
        if way != "bare":
            kind = webdataset.WebLoader if way == "web loader" else DataLoader
            loader = kind(data, batch_size=None, num_workers=workers)
        seen.append(sorted(flat(epoch_of(foreprop.shard(loader, world=world)))))
    own = [[number for number in range(24) if number // EACH % 2 == rank] for rank in range(2)]
    assert seen == own


@IGNORED
@pytest.mark.parametrize("way", ["loader", "web loader", "bare"])
def test_webdataset_without_a_node_splitter_is_refused(urls: list[str], way: str) -> None:
    webdataset = pytest.importorskip("webdataset")
    data = pipeline(urls)
    loader: Any = {"loader": DataLoader, "web loader": webdataset.WebLoader}.get(way)
    with pytest.raises(ConfigError, match=r"nodesplitter=webdataset\.split_by_node"):
        foreprop.shard(loader(data, batch_size=None) if loader else data, world=worlds(2)[0])


@IGNORED
def test_webdataset_that_draws_its_files_is_taken_as_it_is(
    urls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("webdataset")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    (_, world) = worlds(2)
    share = foreprop.shard(pipeline(urls, resampled=True, nodesplitter=None), world=world)
    batches = iter(share)
    assert set(flat([next(batches) for _ in range(40)])) <= set(range(24))
    with pytest.raises(ConfigError, match="nodesplitter="):
        foreprop.shard(pipeline(urls, resampled=True), world=world)


@IGNORED
def test_webdataset_that_knows_of_no_ranks_is_refused(
    urls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    webdataset = pytest.importorskip("webdataset")
    monkeypatch.delenv("RANK", raising=False)
    data = pipeline(urls, nodesplitter=webdataset.split_by_node)
    with pytest.raises(ConfigError, match=r"rank 0 of 1, .* set RANK=1 and WORLD_SIZE=2"):
        foreprop.shard(DataLoader(data, batch_size=None), world=worlds(2)[1])


@WORKERS
@IGNORED
def test_a_web_loader_of_anything_else_is_divided(workers: int) -> None:
    webdataset = pytest.importorskip("webdataset")
    data = numbers(23)

    def loader() -> Any:
        return webdataset.WebLoader(data, batch_size=4, shuffle=True, num_workers=workers).map(
            lambda batch: [batch[0] + 100]
        )

    for rank, share in enumerate(sharded(loader, 3)):
        expected = [number + 100 for number in DistributedSampler(data, 3, rank)]
        assert flat(epoch_of(share)) == expected


def stream(shards: int = 4) -> Any:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"n": list(range(22))})
    return table.to_iterable_dataset(num_shards=shards)


@IGNORED
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("shards", [1, 4])
def test_a_hugging_face_stream_is_divided(ranks: int, shards: int) -> None:
    loaders = sharded(lambda: DataLoader(stream(shards).shuffle(seed=1), batch_size=4), ranks)
    order = [row["n"] for row in stream(shards).shuffle(seed=1)]
    for rank, loader in enumerate(loaders):
        found = [int(number) for batch in loader for number in batch["n"]]
        assert found == torchs_share(order, rank, ranks)


@IGNORED
def test_a_hugging_face_stream_in_workers() -> None:
    loaders = sharded(lambda: DataLoader(stream(), batch_size=4, num_workers=2), 3)
    shares = [[int(n) for batch in loader for n in batch["n"]] for loader in loaders]
    assert set(flat(shares)) == set(range(22))
    assert len(flat(shares)) == 24  # workers have 11 samples each, filled up to 12
    assert len({len(share) for share in shares}) == 1


@IGNORED
def test_a_hugging_face_stream_that_was_split_is_taken_as_it_is() -> None:
    distributed = pytest.importorskip("datasets.distributed")
    for world in worlds(2):
        data = distributed.split_dataset_by_node(stream(), rank=world.rank, world_size=2)
        share = foreprop.shard(DataLoader(data, batch_size=4), world=world)
        assert [int(n) for batch in share for n in batch["n"]] == [row["n"] for row in data]
    with pytest.raises(ConfigError, match=r"split_dataset_by_node\(dataset, rank=0, world_size=2"):
        foreprop.shard(DataLoader(data), world=worlds(2)[0])


@IGNORED
def test_a_loader_that_accelerate_divided_is_taken_as_it_is() -> None:
    prepare = pytest.importorskip("accelerate.data_loader").prepare_data_loader
    seen = []
    for world in worlds(2):
        loader = DataLoader(numbers(16), batch_size=4)
        prepared = prepare(loader, num_processes=2, process_index=world.rank)
        seen.append(epoch_of(foreprop.shard(prepared, world=world)))
    assert seen == [[[0, 1, 2, 3], [8, 9, 10, 11]], [[4, 5, 6, 7], [12, 13, 14, 15]]]
    with pytest.raises(ConfigError, match="for rank 1 of 2"):
        foreprop.shard(prepared, world=worlds(3)[1])


@IGNORED
def test_one_that_accelerate_did_not_divide_is_divided_inside() -> None:
    prepare = pytest.importorskip("accelerate.data_loader").prepare_data_loader
    data = numbers(23)
    for rank, world in enumerate(worlds(2)):
        prepared = prepare(DataLoader(data, batch_size=4, shuffle=True))
        share: Any = foreprop.shard(prepared, world=world)
        assert flat(epoch_of(share)) == list(DistributedSampler(data, 2, rank))
        assert type(share._loader) is type(prepared)
