"""Where a command writes its outcome."""

from __future__ import annotations

from pathlib import Path

from foreprop.errors import ConfigError


def writable(folder: Path) -> Path:
    """Be sure before the work that its outcome can be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"out is {folder}, which cannot be written: {error.strerror}") from error
    return folder
