"""The setting ``join``: where a server of the session is that is to be joined."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foreprop.errors import ConfigError

if TYPE_CHECKING:
    from foreprop.config.settings import Config


def parse_addresses(text: str) -> list[tuple[str, int]]:
    """Of ``HOST:PORT`` or ``[ADDRESS]:PORT``, one or several; raises `ConfigError`."""
    found = []
    for part in text.split(","):
        host, _, port = part.strip().rpartition(":")
        host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 2**16:
            raise ConfigError(
                f"join is {text!r}; it must be HOST:PORT of a server, as 10.0.0.1:29600, or several"
                " with commas"
            )
        found.append((host, int(port)))
    return found


def check_elastic(config: Config) -> None:
    """Of a session that is about to join; raises `ConfigError`."""
    if not config.elastic:
        raise ConfigError(
            f"join is {config.join!r}, and elastic is False: only an elastic session takes in a"
            " worker; set elastic=True as for the others"
        )
