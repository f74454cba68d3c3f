"""What a session has that does not go with all settings, and what only servers do."""

from __future__ import annotations

from collections.abc import Mapping

from foreprop.config import Config
from foreprop.config.combinations import FEATURES, asked_for, check_combinations, refused_with
from foreprop.core.codec import NONE
from foreprop.errors import ConfigError
from foreprop.session.adopting import UserModel

_IN_STEPS = {"clip norm", "clip value", "ema", "scaler"}
"""What only servers can do with tables held row by row, whose gradients no worker sees."""


def checked_features(
    user: UserModel, config: Config, workers: int, *, has_scaler: bool
) -> Mapping[str, str]:
    """The names of what the session has, each with what to say of it; raises `ConfigError`."""
    found: dict[str, str] = {}
    if not user.has_optimizer:
        found["no optimizer"] = "parallelize() was given no optimizer"
    if has_scaler:
        found["scaler"] = "a scaler was given"
    if user.row_wise:
        names = ", ".join(sorted(user.row_wise))
        found["tables"] = f"tables are held row by row ({names})"
    for device in {parameter.device for parameter in user.model.parameters()}:
        if device.type not in ("cpu", "meta"):
            found["device"] = f"a parameter is on {device}"
    check_combinations(config, found)
    if config.max_workers is not None and config.max_workers < workers:
        raise ConfigError(
            f"max_workers is {config.max_workers}, and there are {workers} workers at the start:"
            " give at least as many, or leave it out"
        )
    if config.backup_workers >= workers:
        raise ConfigError(
            f"backup_workers is {config.backup_workers}, and must be below the number of workers,"
            f" {workers}: somebody has to count"
        )
    return found


def asked_of_servers(config: Config, found: Mapping[str, str], *, rows: bool) -> str | None:
    """The first thing that is asked for and that only servers do.

    ``rows``: there are tables held row by row.
    """
    asked = {name: FEATURES[name].text(config) for name in asked_for(config)} | dict(found)
    only_servers = refused_with("workers") | (_IN_STEPS if rows else set())
    told = next((text for name, text in asked.items() if name in only_servers), None)
    codecs = {codec for _, codec in config.codecs} - {NONE}
    if told or config.elastic or config.update != "auto" or not codecs:
        return told
    from foreprop.features.compression.codecs import traits_of

    if any(traits_of(codec).servers_update for codec in codecs):
        return f"compression is {config.compression!r}, which loses less of what servers update"
    return None


def check_by_workers(config: Config, found: Mapping[str, str], why: str, *, rows: bool) -> None:
    """Raise `ConfigError` for what only servers would do; ``why`` says why the workers update."""
    here = f"the workers update ({why})"
    tables = {"tables beside workers": f"{here}, but not tables"} if rows else {}
    check_combinations(config, {**found, "workers": here, **tables})
