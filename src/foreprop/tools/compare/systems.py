"""What can be compared, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from foreprop.config import PRESETS, Config
from foreprop.config.otherwords import did_you_mean
from foreprop.errors import ConfigError

ALONE = "alone"
DDP = "ddp"
DDP_BF16 = "ddp-bf16"
SCRIPT = "script"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One system; its ``settings`` replace what the script gives to ``parallelize``."""

    title: str
    is_ours: bool = True
    """Whether foreprop synchronises, rather than torch or nobody."""
    preset: str | None = None
    settings: Mapping[str, Any]

    def config_from(self, config: Config) -> Config:
        """The `Config` that a script gives to ``parallelize``, with what the system changes."""
        preset = PRESETS[self.preset] if self.preset else {}
        return config.replace(**{**preset, **self.settings})


def _ours(title: str, architecture: str) -> Contender:
    return Contender(title=title, settings={"architecture": architecture})


def _p3(what: str, **settings: Any) -> Contender:
    about = {"architecture": "p2p", **settings}
    return Contender(title=f"foreprop, preset p3, {what}", preset="p3", settings=about)


CONTENDERS: Mapping[str, Contender] = {
    ALONE: Contender(title="every rank by itself, no network", is_ours=False, settings={}),
    DDP: Contender(title="DistributedDataParallel", is_ours=False, settings={}),
    DDP_BF16: Contender(title="DDP with bf16_compress_hook", is_ours=False, settings={}),
    **{
        name: Contender(
            title=f"foreprop, preset {name}", preset=name, settings={"architecture": "p2p"}
        )
        for name in PRESETS
    },
    "p3-bf16": _p3("bfloat16 on the wire", wire_dtype="bfloat16"),
    "p3+auto": _p3("codecs where they pay", compression="auto"),
    "ring": _ours("foreprop, architecture ring", "ring"),
    "hybrid": _ours("foreprop, architecture hybrid", "hybrid"),
    "auto": _ours("foreprop, architecture auto", "auto"),
    SCRIPT: Contender(title="foreprop, as the script says", settings={}),
}
USUAL = (ALONE, DDP, DDP_BF16, "p3", "ring")


def check_systems(names: tuple[str, ...]) -> tuple[str, ...]:
    """The names, each once; raises `ConfigError` for one that is not known."""
    for name in names or ("",):
        if name not in CONTENDERS:
            raise ConfigError(
                f"systems has {name!r}; there are {', '.join(CONTENDERS)}"
                + did_you_mean(name, CONTENDERS)
            )
    return tuple(dict.fromkeys(names))
