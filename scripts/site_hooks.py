"""Hooks of mkdocs (mkdocs.yml): the site also has what docs links to outside of docs.

The first page is README.md; docs/README.md, the list of all pages, is called contents. Examples,
the changelog and other files become pages, and links to them are rewritten.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
ALWAYS = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
MOVED = {
    "README.md": "index.md",
    "docs/README.md": "contents.md",
    "docs/results/index.html": "results/figures.html",  # results/README.md is index.html there
}
LANGUAGES = {".py": "python", ".json": "json", ".yml": "yaml", ".cff": "yaml"}
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")

_sources: dict[str, str] = {}
"""Of each added page: the repository's path that it shows."""


def site_path(path: str) -> str:
    """Where a file of the repository is on the site, as mkdocs counts pages: before .html."""
    if path in MOVED:
        return MOVED[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    name = PurePosixPath(path)
    return str(name.with_suffix(".md")).lower()


def rewritten(text: str, source: str, *, outside: set[str] | None = None) -> str:
    """Links between files of the repository, as links between pages of the site.

    ``outside`` collects the files outside of docs that are linked to.
    """

    def replace(found: re.Match[str]) -> str:
        before, target, after = found.groups()
        if "://" in target or target.startswith("mailto:"):
            return found[0]
        path = os.path.normpath(os.path.join(os.path.dirname(source), target))
        if path.startswith("..") or not (ROOT / path).is_file():
            return found[0]  # mkdocs says so
        if outside is not None and not path.startswith("docs/"):
            outside.add(path)
        here = os.path.dirname(site_path(source)) or "."
        return f"{before}{os.path.relpath(site_path(path), here)}{after}"

    return LINK.sub(replace, text)


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages that are not in docs, and move two that are."""
    _sources.clear()
    examples = [path.relative_to(ROOT).as_posix() for path in (ROOT / "examples").glob("*.py")]
    wanted = {path for path in (*ALWAYS, *examples) if (ROOT / path).exists()}
    for file in files.documentation_pages():
        rewritten(file.content_string, f"docs/{file.src_uri}", outside=wanted)
    added: set[str] = set()
    while wanted - added:
        path = min(wanted - added)
        added.add(path)
        _add(files, config, path, (ROOT / path).read_text(), wanted)
    for path in ("docs/README.md", "docs/results/index.html"):
        _move(files, config, path)
    return files


def _add(files: Files, config: Any, path: str, text: str, wanted: set[str]) -> None:
    if path.endswith(".md"):
        rewritten(text, path, outside=wanted)  # on_page_markdown does it
    else:
        language = LANGUAGES.get(Path(path).suffix, "text")
        text = f"# {path}\n\n```{language}\n{text}```\n"
    _sources[site_path(path)] = path
    files.append(File.generated(config, site_path(path), content=text))


def _move(files: Files, config: Any, path: str) -> None:
    old = files.get_file_from_path(path.removeprefix("docs/"))
    if old is not None:  # else mkdocs.yml leaves it out, because two pages would have one name
        files.remove(old)
    _sources[site_path(path)] = path
    source = os.path.join(config["docs_dir"], path.removeprefix("docs/"))
    files.append(File.generated(config, site_path(path), abs_src_path=source))


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    uri = page.file.src_uri
    return rewritten(markdown, _sources.get(uri, f"docs/{uri}"))
