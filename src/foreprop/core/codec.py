"""What a codec is: fewer bytes for a slice, and what it keeps from step to step.

Theory of operation. A worker encodes each slice of its gradient when its turn to be sent has come,
the server decodes it before the sum in rank order. Where workers update, a server encodes the
average, once for all, with error feedback of its own. Otherwise it encodes the *difference* between
the new values and the image, the values that all workers have: of an exact codec the exclusive or
of the bits, of another one the arithmetic difference. Both sides then move the image by what was
decoded, so it is the same bits everywhere after every step. An error that stays between master and
image is in the next difference: these replies need no error feedback.

The bytes are the shell's (`foreprop.compression`); ``Array`` is ``torch.Tensor`` there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple, Protocol, TypeVar

from foreprop.errors import ConfigError

NONE = "none"
"""The codec of what is sent as it is."""
EXACT = frozenset({NONE, "lossless"})
"""The codecs that change no bit."""
AUTO = "auto"

Choice = tuple[str, str]
"""A pattern of parameters' names (*, ?), and the codec of those that match it."""

Array = TypeVar("Array")


def kind_of(name: str) -> str:
    """``topk`` of ``topk:0.01``."""
    return name.partition(":")[0]


def takes(name: str, shape: Sequence[int]) -> bool:
    """Whether the codec is for a parameter of this shape; others are sent as they are.

    DGC leaves out biases and the weights of normalisations, which have one dimension.
    """
    return kind_of(name) != "dgc" or len(shape) > 1


def lossy_names(shapes: Mapping[str, Sequence[int]], choices: Sequence[Choice]) -> set[str]:
    """Of parameters' names those with a codec that changes what is sent; ``shapes``: by name."""
    codecs = {name: codec_of(name, choices) for name in shapes}
    return {
        name for name in shapes if codecs[name] not in EXACT and takes(codecs[name], shapes[name])
    }


def is_automatic(setting: object) -> bool:
    """``auto``, or ``auto:int8``: codecs are chosen when some steps have been measured."""
    return isinstance(setting, str) and kind_of(setting) == AUTO


def may_be_lossy(text: str) -> bool:
    """Whether the setting ``compression`` may change bits of what is trained."""
    if is_automatic(text):
        return text.partition(":")[2] not in EXACT
    return not is_exact(choices_of(text))


def choices_of(text: str) -> tuple[Choice, ...]:
    """The setting ``compression``: a codec for all, or PATTERN=CODEC, several with commas.

    None yet if it `is_automatic`. Raises `ConfigError` for text that says neither.
    """
    if is_automatic(text):
        return ()
    parts = [part.strip() for part in text.split(",")]
    if len(parts) == 1 and parts[0] and "=" not in parts[0]:
        return (("*", parts[0]),)
    found = []
    for part in parts:
        pattern, equals, codec = (piece.strip() for piece in part.rpartition("="))
        if not (pattern and equals and codec):
            raise ConfigError(
                f"compression is {text!r}; {part!r} is no PATTERN=CODEC. It must be a codec's name,"
                " as lossless, or several of those with commas: *.weight=lossless,*=none"
            )
        found.append((pattern, codec))
    return tuple(found)


def choices_text(choices: Iterable[Choice]) -> str:
    """What `choices_of` reads as these; `NONE` if there are none."""
    return ",".join(f"{pattern}={codec}" for pattern, codec in choices) or NONE


def pattern_of(name: str) -> str:
    """What a parameter's own choice says of its name, which may have a comma."""
    return name.replace(",", "?")


def matches(name: str, pattern: str) -> bool:
    """Only * and ? stand for others: a name may have brackets."""
    return fnmatchcase(name, pattern.replace("[", "[[]"))


def codec_of(name: str, choices: Sequence[Choice]) -> str:
    """Of a parameter of this name: the first match counts; `NONE` if nothing matches."""
    return next((codec for pattern, codec in choices if matches(name, pattern)), NONE)


def is_exact(choices: Sequence[Choice]) -> bool:
    """Whether these codecs change no bit of what is trained."""
    return all(codec in EXACT for _, codec in choices)


class Place(NamedTuple):
    """Where a gradient comes from: what is drawn depends on nothing else."""

    step: int
    slice: int
    rank: int
    scale: float = 1.0
    """Of the loss, that the gradient is multiplied with: limits are, too."""


class Codec(Protocol[Array]):
    """Encodes flat float32 arrays. It has no state of its own: `new_state` is kept per slice.

    What is not finite never becomes finite: of a codec that is not exact it may become NaN, and
    make its whole slice NaN. The state does not remember it.
    """

    name: str
    exact: bool
    """What is decoded has the bits of what was encoded, NaN payloads included."""

    def most_bytes(self, elems: int) -> int:
        """No encoded array of so many elements is longer: what a receiver has room for."""

    def new_state(self, elems: int) -> Mapping[str, Array]:
        """Flat arrays of ``elems`` float32 elements by name, as of error feedback; may be empty."""

    def encode(self, values: Array, state: Mapping[str, Array], place: Place) -> memoryview:
        """Does not change ``values``; changes ``state`` in place. Nobody writes to the result.

        With an empty ``state`` nothing is remembered: a server encodes its differences so.
        """

    def decode(self, data: memoryview, out: Array, place: Place) -> None:
        """Fill ``out``. Raises `RemoteProtocolError` for anything that `encode` cannot give."""
