"""Layer colours: one sequential ramp by forward position, for a light and for a dark page.

The ramps run from dark to bright, so that they also read without colour vision and in grey; red
is left to waiting.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

LIGHT_RAMP = ("#33267d", "#2a5cab", "#1a84a2", "#2a9a77", "#76a83c", "#cda425")
DARK_RAMP = ("#7f76e8", "#5a97ee", "#43b4d6", "#4dcda6", "#a5da62", "#f3d469")
_INK = {"dark": "#14161a", "bright": "#ffffff"}

_Rgb = tuple[float, float, float]


def palette_css(layer_indices: Iterable[int]) -> str:
    """Rules that fill the classes `c<index>` and, readable on them, the texts `t<index>`."""
    indices = sorted(layer_indices)
    rules = "".join(
        f".c{i}{{fill:var(--l{i});color:var(--l{i})}}.t{i}{{fill:var(--t{i});stroke:var(--l{i})}}\n"
        for i in indices
    )
    light, dark = _variables(indices, LIGHT_RAMP), _variables(indices, DARK_RAMP)
    return f":root{{{light}}}\n@media (prefers-color-scheme:dark){{:root{{{dark}}}}}\n{rules}"


def _variables(indices: Sequence[int], ramp: Sequence[str]) -> str:
    parts = []
    for position, index in enumerate(indices):
        colour = ramp_colour(ramp, position / max(len(indices) - 1, 1))
        parts.append(f"--l{index}:{colour};--t{index}:{_ink_on(colour)};")
    return "".join(parts)


def ramp_colour(ramp: Sequence[str], place: float) -> str:
    """The colour at `place` (0 to 1) of a ramp of equally spaced hex colours."""
    scaled = min(max(place, 0.0), 1.0) * (len(ramp) - 1)
    left = min(int(scaled), len(ramp) - 2)
    share = scaled - left
    mixed = (
        round((1 - share) * a + share * b)
        for a, b in zip(_rgb(ramp[left]), _rgb(ramp[left + 1]), strict=True)
    )
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


def contrast(one: str, other: str) -> float:
    """WCAG 2 contrast ratio of two hex colours, 1 to 21."""
    dark, bright = sorted((_luminance(one), _luminance(other)))
    return (bright + 0.05) / (dark + 0.05)


def _ink_on(colour: str) -> str:
    return max(_INK.values(), key=lambda ink: contrast(ink, colour))


def _rgb(colour: str) -> _Rgb:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def _luminance(colour: str) -> float:
    channels = (channel / 255 for channel in _rgb(colour))
    red, green, blue = (
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
