"""constraints.txt is made again (`make constraints`) when pyproject.toml asks for something else."""

import re
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from lolcats.modeling.configuration import TESTED


def test_what_the_package_requires_is_locked_at_a_version_that_it_takes():
    lines = (Path(__file__).parents[1] / "constraints.txt").read_text().splitlines()
    locked = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}
    needed = [Requirement(line) for line in requires("lolcats") or []]
    for need in needed:
        if not need.marker or need.marker.evaluate({"extra": "dev"}):
            name = canonicalize_name(need.name)
            assert name in ("torch", "triton", "lolcats") or locked[name] in need.specifier, need


def test_exported_folders_name_the_releases_of_transformers_that_the_package_takes():
    pyproject = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert re.search(r'"transformers>=([\d.]+),<([\d.]+)"', pyproject).groups() == TESTED
