"""What a release says about itself: versions, classifiers, citation, links on the package index."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml
from packaging.requirements import Requirement

from foreprop.version import __version__

ROOT = Path(__file__).parents[3]


def project() -> Any:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = [line.split("==") for line in lines if "==" in line and not line.startswith("#")]
    return {name.lower(): version for name, version in pinned}


def workflow() -> Any:
    return yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())


def test_every_dependency_has_a_pin_that_it_allows() -> None:
    found = project()["project"]
    extras = found["optional-dependencies"].values()
    wanted = [*found["dependencies"], *(text for extra in extras for text in extra)]
    for requirement in map(Requirement, wanted):
        if requirement.name != "foreprop":
            version = pins()[requirement.name.lower()]
            assert requirement.specifier.contains(version), (requirement, version)


def test_classifiers_have_the_pythons_that_a_release_tests() -> None:
    claimed = {
        entry.rpartition(" ")[2]
        for entry in project()["project"]["classifiers"]
        if re.fullmatch(r"Programming Language :: Python :: \d\.\d+", entry)
    }
    tested = set()
    for job in workflow()["jobs"].values():
        matrix = job.get("strategy", {}).get("matrix", {}).get("python-version", [])
        own = [step.get("with", {}).get("python-version") for step in job["steps"]]
        assert not matrix or "${{ matrix.python-version }}" in own
        tested |= {*matrix, *own} - {"${{ matrix.python-version }}", None}
    assert claimed == tested


def test_torch_is_asked_for_no_older_than_it_is_tested() -> None:
    (torch,) = [
        requirement
        for requirement in map(Requirement, project()["project"]["dependencies"])
        if requirement.name == "torch"
    ]
    tested = pins()["torch"]
    assert str(torch.specifier) == f">={tested.rpartition('.')[0]}"
    assert f"torch=={tested}" in (ROOT / "README.md").read_text()


def test_the_citation_is_of_this_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == __version__
    assert cited["license"] == project()["project"]["license"]
    needed = {"cff-version", "message", "title", "authors", "type"}
    assert needed <= cited.keys()
    (paper,) = cited["references"]
    assert paper["url"] == project()["project"]["urls"]["Paper"]


def test_only_a_tag_is_published() -> None:
    """By trusted publishing, after tests and build, with no more rights than that needs."""
    jobs = workflow()["jobs"]
    publish = jobs["publish"]
    assert publish["if"] == "github.event_name == 'push'"
    assert workflow()[True]["push"] == {"tags": ["v[0-9]+.*"]}  # YAML reads `on` as true
    assert set(publish["needs"]) == {"test", "pythons", "build"}
    assert publish["permissions"] == {"id-token": "write"}
    assert workflow()["permissions"] == {"contents": "read"}


def test_the_package_index_shows_no_link_that_leads_nowhere() -> None:
    """README.md as the hook in pyproject.toml changes it."""
    text = (ROOT / "README.md").read_text()
    assert re.search(r"\]\((?!https?:|#)", text)
    hook = project()["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    for change in hook["substitutions"]:
        text = re.sub(change["pattern"], change["replacement"], text)
    assert re.findall(r"\]\((?!https?:|#)[^)]*\)", text) == []
    assert "(Picture: Throughput of foreprop" in text
    assert "[Status](#status)" in text
