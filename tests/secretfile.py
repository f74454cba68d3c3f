"""A job's secret in a file that nobody else may read, as `secret_file` wants it."""

from __future__ import annotations

from pathlib import Path


def secret_file(folder: Path, name: str = "job.secret", text: str = "0123456789abcdef") -> str:
    path = folder / name
    path.write_text(text)
    path.chmod(0o600)
    return str(path)
