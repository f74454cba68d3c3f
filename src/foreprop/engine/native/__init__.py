"""The native plane's library: what its functions take (`interface.cpp`), and who can use it."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

from foreprop.config import Config
from foreprop.core.codec import NONE
from foreprop.core.manifest import Manifest

LIBRARY = Path(__file__).with_name("plane.so")
_VERSION = 8
"""That of `interface.cpp`; another one was built before these sources came."""

DTYPES = {"float32": 0, "float64": 1, "bfloat16": 2, "float16": 3}
"""The types of parameters that it adds up, by their numbers there."""
CODECS = {NONE: 0, "int8": 1, "int4": 2, "bf16": 3, "fp16": 4}
"""The codecs that it has, by their numbers there."""
_TYPES = {
    "i": ctypes.c_int,
    "n": ctypes.c_int64,
    "d": ctypes.c_double,
    "u": ctypes.c_uint64,
    "p": ctypes.c_void_p,
    "s": ctypes.c_char_p,
}
_FUNCTIONS = """
    new p:ps  free :p  error :si  descriptors :pp
    adopt u:piii  carry :pui  bound :puii  pace :puiid  release :pu
    read n:pupn  end i:pupsi  write i:pupnpn
    push i:pinipppn  message :piiiniiipn  await_values :pnp  learn i:ppi  pulls_due :p
    complete i:pi  answered i:pi  wait i:pii  ring :p  flush i:pi
    missing i:pippi  step n:pi  statistics :pp
    snapshot n:pipn  last_push :piip  left :pii  tell_begins :pi  spans i:pipip  same_batch i:pi
    drop i:piip  join i:piinp  settle :piin  go_on :pi
    take_over :piinn  counted n:pipn  sent_all i:pii
    slices_lost :pipi  slices_go_on :ppi  came_after :pn  slice :pip  heard i:pi
    tell_scale :pind  residual i:piipppp  put_residual :piipnd
    square_sum :ipnp  quantise :ippnp  dequantise i:ipnp
""".split()
"""Each with what it returns and takes, by a letter each."""


@functools.cache
def maybe_library() -> ctypes.CDLL | None:
    """The compiled plane; None where none was built, or one for other sources."""
    try:
        library = ctypes.CDLL(str(LIBRARY))
        if library.fp_version() != _VERSION:
            return None
        for name, signature in zip(_FUNCTIONS[::2], _FUNCTIONS[1::2], strict=True):
            returns, _, takes = signature.partition(":")
            function = getattr(library, f"fp_{name}")
            function.restype = _TYPES[returns] if returns else None
            function.argtypes = [_TYPES[letter] for letter in takes]
    except (OSError, AttributeError):
        return None
    return library


def why_not(manifest: Manifest, config: Config) -> str:
    """Why this session runs the Python engine; empty: the plane carries it."""
    knobs, infos = manifest.knobs, manifest.parameters
    reasons = {
        "plane='python'": config.plane == "python",
        "servers update": manifest.serves,
        "tables": any(info.rows for info in infos),
        f"compression={config.compression!r}": bool({c for _, c in knobs.compression} - {*CODECS}),
        "a parameter's type": any(info.dtype not in DTYPES for info in infos),
        "backup workers": knobs.backup_workers > 0,
        "counted_replay": config.counted_replay is not None,
        "elastic, and not a preset's replies": knobs.elastic and knobs.reply != "broadcast",
        "elastic, with codecs": knobs.elastic and bool(knobs.compression),
        "elastic, encrypted": knobs.elastic and config.encryption is not None,
        f"staleness={knobs.staleness!r}": bool(knobs.staleness),
        "local aggregation": manifest.workers_per_push > 1,
        "rebalance_s": config.rebalance_s is not None,
    }
    found = [reason for reason, holds in reasons.items() if holds]
    if not found and maybe_library() is None:
        return "it was not built: `make setup` does where there is a C++20 compiler"
    return found[0] if found else ""
