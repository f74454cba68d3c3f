"""Pages that need nothing else, neither network nor files beside them: templates and writing.

Values are escaped by the templates; styles and scripts are ours, and are put in as they are.
"""

from __future__ import annotations

import math
import os
import tempfile
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from foreprop.report.numbers import ABSENT, milliseconds, percent, rate, size


def render(template: str, *, package: str = __package__, styles: str, **values: Any) -> str:
    """A page from a template of ``package`` that extends document.html.

    ``styles`` follow report.css; report.js comes behind the page.
    """
    loader = ChoiceLoader([PackageLoader(package), PackageLoader(__package__)])
    environment = Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "milliseconds": milliseconds,
        "percent": percent,
        "rate": rate,
        "size": size,
        "count": lambda value: f"{value:,.0f}" if math.isfinite(value) else ABSENT,
        "pixels": lambda px: f"{px:.2f}".rstrip("0").rstrip("."),
    }
    return environment.get_template(template).render(
        values,
        styles=Markup(asset("report.css") + styles),
        script=Markup(asset("report.js")),
    )


def asset(name: str, *, package: str = __package__) -> str:
    """A style sheet or script that lies in the package."""
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")


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
