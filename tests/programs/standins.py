"""Small substitutes for what programs import and this machine cannot give: data sets, loggers."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

SAMPLES = {True: 192, False: 32}


def install(names: Sequence[str]) -> None:
    for name in names:
        STAND_INS[name]()


class Silent:
    """Takes any call and any attribute: a logger that logs nothing."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Silent()

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return Silent()


def _module(name: str, **members: Any) -> None:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(module).update(members)
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], last, module)


class Images(torch.utils.data.Dataset[Any]):
    """Random images and labels with torchvision's signature, the same on every rank."""

    shape: tuple[int, ...] = (28, 28)

    def __init__(
        self,
        root: str = "",
        train: bool = True,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Any = None,
        download: bool = False,
        **others: Any,
    ) -> None:
        generator = torch.Generator().manual_seed(7 if train else 8)
        shape = (SAMPLES[bool(train)], *self.shape)
        self.data = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        self.targets = torch.randint(0, 10, shape[:1], generator=generator)
        self.classes = [str(number) for number in range(10)]
        self.transform = transform

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        from PIL import Image

        image = Image.fromarray(self.data[index].numpy())
        return (self.transform(image) if self.transform else image), int(self.targets[index])


class ColourImages(Images):
    shape = (32, 32, 3)


class Folder(ColourImages):
    """For torchvision's ImageFolder, whose second argument is the transform."""

    def __init__(self, root: str, transform: Any = None, **others: Any) -> None:
        super().__init__(root, "val" not in root, transform)


def _torchvision() -> None:
    """Its compiled operators fit one build of torch only, and no program here uses them."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    _kept.append(library)
    box = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}{box}")
    from torchvision import datasets

    for name in ("MNIST", "FashionMNIST"):
        setattr(datasets, name, Images)
    datasets.CIFAR10 = ColourImages
    datasets.ImageFolder = Folder


_kept: list[torch.library.Library] = []


def _tensorboard() -> None:
    _module("torch.utils.tensorboard", SummaryWriter=Silent)


def _wandb() -> None:
    _module("wandb", init=Silent(), log=Silent(), run=Silent())


def _pyplot() -> None:
    """matplotlib's drawing takes seconds for a picture that nobody looks at."""
    _module("matplotlib", use=Silent())
    _module(
        "matplotlib.pyplot",
        **{
            name: Silent()
            for name in "figure title xlabel ylabel xticks yticks plot savefig close".split()
        },
    )


def _cuda() -> None:
    """`cuda()` leaves things where they are, for programs that know of no other device."""
    kept: Any = lambda self, *arguments, **named: self  # noqa: E731
    torch.Tensor.cuda = kept  # type: ignore[method-assign]
    torch.nn.Module.cuda = kept  # type: ignore[method-assign]
    torch.cuda.synchronize = Silent()
    torch.cuda.set_device = Silent()


class Pictures(ColourImages):
    """As Hugging Face's datasets: a transform of whole batches, given later."""

    def set_transform(self, transform: Callable[[Any], Any]) -> None:
        self.batches = transform

    def __getitem__(self, index: int) -> Any:
        image, _ = super().__getitem__(index)
        return {name: value[0] for name, value in self.batches({"image": [image]}).items()}

    def __len__(self) -> int:
        return 24


def _datasets() -> None:
    _module("datasets", load_dataset=Pictures, utils=Silent())


class Sentences(dict[str, Any]):
    """As Hugging Face's datasets: GLUE's pairs of sentences, of random words."""

    def __init__(self, *names: str) -> None:
        super().__init__(train=Pairs(96, 7), validation=Pairs(20, 8))

    def map(self, function: Callable[[Any], Any], **others: Any) -> dict[str, list[Any]]:
        """What ``function`` makes of each part's columns, by rows."""
        made = {name: function(pairs) for name, pairs in self.items()}
        return {
            name: [
                dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)
            ]
            for name, columns in made.items()
        }


class Pairs(dict[str, list[Any]]):
    """Columns of one part of `Sentences`."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for name in ("sentence1", "sentence2"):
            lengths = torch.randint(3, 9, (count,), generator=generator).tolist()
            words = [torch.randint(0, 50, (n,), generator=generator).tolist() for n in lengths]
            self[name] = [" ".join(map(str, sentence)) for sentence in words]
        self["label"] = torch.randint(0, 2, (count,), generator=generator).tolist()
        self.features = {"label": types.SimpleNamespace(names=["different", "same"])}
        self.column_names = list(self)


def _glue() -> None:
    _module("datasets", load_dataset=Sentences, utils=Silent())
    metric = types.SimpleNamespace(add_batch=Silent(), compute=dict)
    _module("evaluate", load=lambda *names: metric)


STAND_INS: dict[str, Callable[[], None]] = {
    "torchvision": _torchvision,
    "datasets": _datasets,
    "glue": _glue,
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "pyplot": _pyplot,
    "cuda": _cuda,
}
