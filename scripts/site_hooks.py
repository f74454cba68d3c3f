"""Hooks of mkdocs for two sites: foreprop's (mkdocs.yml), and the lab's in its folder lab.

Sources link to files of the repository, so that the links work there, too. mkdocs handles a link
within a site. A link into the other site is rewritten here, and its target must exist.

Each site also has the files outside of its docs that it links to: examples, the changelog and other
files become pages. README.md is the first page of foreprop's site, where docs/README.md, the list
of all pages, is called contents. The page of errors is made from the code as the site is built.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import runpy
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
ALWAYS_SHOWN = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
MOVED = {
    "README.md": "index.md",
    "docs/README.md": "contents.md",
    "SECURITY.md": "reporting.md",  # docs/security.md is security.html there
    "lab/docs/results/index.html": "results/figures.html",  # results/README.md is index.html there
}
GENERATED = {"errors.md": "errors_page.py"}
"""The pages of foreprop's site that are in no file, with the scripts that make them."""
LANGUAGES = {".py": "python", ".json": "json", ".yml": "yaml", ".cff": "yaml"}
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
OTHER_SITE = "site:"
"""The scheme of links to the other site while mkdocs has them: it leaves any scheme alone."""

_log = logging.getLogger("mkdocs.hooks.site")  # a warning here fails a strict build
_sources: dict[str, str] = {}
"""The path in the repository of each page that was added."""


def in_lab(path: str) -> bool:
    """Whether a file of the repository is on the lab's site."""
    return path.startswith("lab/")


def docs_of(path: str) -> str:
    """The folder with the pages of a file's site."""
    return "lab/docs/" if in_lab(path) else "docs/"


def site_path(path: str) -> str:
    """Where a file of the repository is on its site, as mkdocs names pages: with .md."""
    if path in MOVED:
        return MOVED[path]
    if path.startswith(docs_of(path)):
        return path.removeprefix(docs_of(path))
    name = PurePosixPath(path)
    return str(name.with_suffix(".md")).lower()


def built_path(path: str) -> str:
    """Where a file of the repository is in the folder that both sites are built into."""
    page = re.sub(r"(^|/)README\.md$", r"\1index.md", site_path(path))
    return ("lab/" if in_lab(path) else "") + re.sub(r"\.md$", ".html", page)


@functools.cache
def anchors(path: str) -> set[str]:
    """The anchors that mkdocs and GitHub make of a page's headings."""
    text = re.sub(r"^```.*?^```", "", (ROOT / path).read_text(), flags=re.MULTILINE | re.DOTALL)
    heads = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def rewritten(text: str, source: str, *, outside: set[str] | None = None) -> str:
    """The text with links between files of the repository as links between pages of the sites.

    ``outside`` collects the files outside of both docs that are linked to.
    """

    def replace(found: re.Match[str]) -> str:
        before, target, after = found.groups()
        if "://" in target or target.startswith("mailto:"):
            return found[0]
        path = os.path.normpath(os.path.join(os.path.dirname(source), target))
        if path.startswith("..") or not (ROOT / path).is_file():
            return found[0]  # mkdocs says so
        if outside is not None and not path.startswith(docs_of(path)):
            outside.add(path)
        if in_lab(path) == in_lab(source):
            here = os.path.dirname(site_path(source)) or "."
            return f"{before}{os.path.relpath(site_path(path), here)}{after}"
        anchor = after[1:-1]
        if anchor and anchor not in anchors(path):
            _log.warning("%s links to '%s', which has no '#%s'", source, target, anchor)
        here = os.path.dirname(built_path(source)) or "."
        return f"{before}{OTHER_SITE}{os.path.relpath(built_path(path), here)}{after}"

    return LINK.sub(replace, text)


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages that are not in docs, and move two that are."""
    _sources.clear()
    examples = [path.relative_to(ROOT).as_posix() for path in (ROOT / "examples").glob("*.py")]
    wanted = {path for path in (*ALWAYS_SHOWN, *examples) if (ROOT / path).exists()}
    for folder in ("docs", "lab/docs"):
        for page in (ROOT / folder).rglob("*.md"):
            rewritten(page.read_text(), page.relative_to(ROOT).as_posix(), outside=wanted)
    lab = in_lab(_docs(config))
    added: set[str] = set()
    while wanted - added:
        path = min(wanted - added)
        added.add(path)
        if in_lab(path) == lab:
            _add(files, config, path, (ROOT / path).read_text(), wanted)
    for path in ("docs/README.md", "lab/docs/results/index.html"):
        if in_lab(path) == lab:
            _move(files, config, path)
    for name, script in GENERATED.items():
        if not lab:
            text = runpy.run_path(str(ROOT / "scripts" / script))["page"]()
            files.append(File.generated(config, name, content=text))
    return files


def _docs(config: Any) -> str:
    return Path(config["docs_dir"]).relative_to(ROOT).as_posix()


def _add(files: Files, config: Any, path: str, text: str, wanted: set[str]) -> None:
    if path.endswith(".md"):
        rewritten(text, path, outside=wanted)  # on_page_markdown does it
    else:
        language = LANGUAGES.get(Path(path).suffix, "text")
        text = f"# {path}\n\n```{language}\n{text}```\n"
    _sources[site_path(path)] = path
    files.append(File.generated(config, site_path(path), content=text))


def _move(files: Files, config: Any, path: str) -> None:
    old = files.get_file_from_path(path.removeprefix(docs_of(path)))
    if old is not None:  # else mkdocs.yml leaves it out, because two pages would have one name
        files.remove(old)
    _sources[site_path(path)] = path
    files.append(File.generated(config, site_path(path), abs_src_path=str(ROOT / path)))


def on_nav(nav: Any, **_: Any) -> Any:
    """Complete the menus' links to the other site."""
    items = [*nav.items]
    while items:
        item = items.pop()
        items += item.children or []
        if item.is_link:
            item.url = item.url.removeprefix(OTHER_SITE)
    return nav


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    uri = page.file.src_uri
    return rewritten(markdown, _sources.get(uri, f"{_docs(config)}/{uri}"))


def on_page_content(html: str, **_: Any) -> str:
    return html.replace(f'="{OTHER_SITE}', '="')
