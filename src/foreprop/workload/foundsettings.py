"""Which settings of foreprop the environment has for what the lab and the simulator run.

They are a training's: what counts elements or bytes is of the unscaled model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from foreprop.config import Config, LocalAggregation
from foreprop.config.sources import resolve_with_sources
from foreprop.core.ratedslices import slice_elems_at
from foreprop.core.slicing import usual_slice_elems
from foreprop.errors import ConfigError
from foreprop.workload.limit import BYTES_PER_ELEM, model_bytes

if TYPE_CHECKING:
    from foreprop.workload.setting import LabSetting

DIVIDED = ("slice_elems", "big_array_elems", "chunk_elems", "unsent_bytes", "push_window_bytes")
"""By the scale, as the arrays are."""
SAID_BY_SYSTEMS = ("architecture", "workers_per_node", "staleness")
"""What a system's name or an option says, whatever the environment does."""


def settings_found() -> dict[str, Any]:
    """By name, as they are there."""
    config, sources = resolve_with_sources()
    found = sorted(name for name, source in sources.items() if source == "environment")
    return {name: getattr(config, name) for name in found}


def slice_elems_from_environment() -> int | None:
    """Raises `ConfigError` if they are to be found automatically."""
    found = settings_found().get("slice_elems")
    if found == "auto":
        raise ConfigError(
            "FOREPROP_SLICE_ELEMS is 'auto', which the systems auto and p3-auto are for; unset it"
        )
    return None if found is None else int(found)


def default_slice_elems(setting: LabSetting) -> int:
    """What a session there cuts a model into; of a model whose arrays are divided, P3's size.

    For what a slice costs the hosts is not divided, so that slices which suit fast or slow links
    would be too small or too few.
    """
    uneven = "node_rates" in settings_found()
    if setting.scale > 1:
        return usual_slice_elems(setting.nodes, uneven=uneven)
    elems = int(model_bytes(setting.layers) // BYTES_PER_ELEM)
    return slice_elems_at(setting.rate, servers=setting.nodes, elems=elems, uneven=uneven)


def local_aggregation() -> LocalAggregation:
    """As the environment says, for a comparison with and without."""
    return Config.resolve().local_aggregation
