"""A codec makes a slice fewer bytes; the setting ``compression`` chooses one for each parameter.

Theory of operation. A worker encodes a slice of its gradient when the slice's turn to be sent has
come; the server decodes it before the sum in rank order. Where workers update, a server encodes the
average, once for all of them, with error feedback of its own. Otherwise it encodes the *difference*
between the new values and the image, the values that all workers have: the exclusive or of the bits
with an exact codec, the arithmetic difference with another one. Both sides then move the image by
what was decoded, so it has the same bits everywhere after every step. What is lost between the
server's values and the image is in the next difference: these replies need no error feedback.

The setting has *choices*, each a pattern of parameters' names (*, ?) and the codec of those that
match; the first match counts. The bytes themselves are the shell's work
(`foreprop.features.compression`); ``Array`` is ``torch.Tensor`` there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple, Protocol, TypeVar

from foreprop.errors import ConfigError

NONE = "none"  # sent as it is
EXACT = frozenset({NONE, "lossless"})
"""The codecs that change no bit."""
AUTO = "auto"

Choice = tuple[str, str]
Array = TypeVar("Array")


def kind_of(name: str) -> str:
    """A codec's name without its parameter: ``topk`` for ``topk:0.01``."""
    return name.partition(":")[0]


def takes(name: str, shape: Sequence[int]) -> bool:
    """Whether the codec is for a parameter of this shape; others are sent as they are."""
    # DGC leaves out biases and the weights of normalisations, which have one dimension
    return kind_of(name) != "dgc" or len(shape) > 1


def lossy_names(shapes: Mapping[str, Sequence[int]], choices: Sequence[Choice]) -> set[str]:
    """The parameters whose codec changes what is sent; ``shapes`` are by name."""
    codecs = {name: codec_of(name, choices) for name in shapes}
    return {
        name for name in shapes if codecs[name] not in EXACT and takes(codecs[name], shapes[name])
    }


def is_automatic(setting: object) -> bool:
    # ``auto`` or ``auto:int8``: codecs are chosen when some steps have been measured
    return isinstance(setting, str) and kind_of(setting) == AUTO


def may_be_lossy(text: str) -> bool:
    """Whether the setting ``compression`` may change bits of what is trained."""
    if is_automatic(text):
        return text.partition(":")[2] not in EXACT
    return not is_exact(choices_of(text))


def choices_of(text: str) -> tuple[Choice, ...]:
    """What the setting ``compression`` says: a codec for all, or PATTERN=CODEC, with commas.

    There are no choices yet if it `is_automatic`. Raises `ConfigError` for any other text.
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
    """The text that `choices_of` reads as these; `NONE` if there are none."""
    return ",".join(f"{pattern}={codec}" for pattern, codec in choices) or NONE


def pattern_of(name: str) -> str:
    return name.replace(",", "?")  # commas separate choices


def matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern.replace("[", "[[]"))  # a name may have brackets


def codec_of(name: str, choices: Sequence[Choice]) -> str:
    return next((codec for pattern, codec in choices if matches(name, pattern)), NONE)


def is_exact(choices: Sequence[Choice]) -> bool:
    return all(codec in EXACT for _, codec in choices)


class Place(NamedTuple):
    """Where a gradient comes from: a codec's random numbers depend on nothing else.

    ``scale`` is the loss's, which the gradient is multiplied by: limits must be, too.
    """

    step: int
    slice: int
    rank: int
    scale: float = 1.0


class Codec(Protocol[Array]):
    """Encodes flat float32 arrays. It has no state of its own: `new_state` is kept per slice.

    An ``exact`` codec gives back the same bits, NaN payloads included. With another one what is not
    finite never becomes finite: it may become NaN, and make its whole slice NaN, but the state does
    not remember it.
    """

    name: str
    exact: bool

    def most_bytes(self, elems: int) -> int:
        """The length that no encoded array of so many elements exceeds; receivers rely on it."""

    def new_state(self, elems: int) -> Mapping[str, Array]:
        """What a sender keeps from step to step, such as error feedback; may be empty.

        These are flat arrays of ``elems`` float32 elements, by name.
        """

    def encode(self, values: Array, state: Mapping[str, Array], place: Place) -> memoryview:
        """The encoded array, to which nobody may write; changes ``state``, and never ``values``.

        With an empty ``state`` nothing is remembered: a server encodes its differences so.
        """

    def decode(self, data: memoryview, out: Array, place: Place) -> None:
        """Fill ``out``. Raises `RemoteProtocolError` for anything that `encode` cannot give."""
