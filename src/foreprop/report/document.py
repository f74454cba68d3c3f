"""The frame of a page that needs nothing else: neither network nor files beside it."""

from __future__ import annotations

import os
import tempfile
from importlib import resources
from pathlib import Path

from foreprop.report.markup import tag, text

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def asset(name: str) -> str:
    """A style sheet or script that lies beside this file."""
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def render_document(title: str, body: str, *, styles: str) -> str:
    """The whole page around ``body``, with report.js behind it; ``styles`` follow report.css."""
    head = (
        '<meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{text(title)}</title><style>{asset('report.css')}{styles}</style>"
    )
    script = f"<script>{asset('report.js')}</script>"
    content = tag("head", head) + "\n" + tag("body", tag("main", body) + script)
    return "<!doctype html>\n" + tag("html", content, lang="en") + "\n"


def write_document(path: Path, page: str) -> None:
    """Write the page to `path`, which either keeps its old content or has the whole new one."""
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".partial")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(page)
            os.fchmod(file.fileno(), 0o644)
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise
