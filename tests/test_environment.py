"""constraints.txt, pyproject.toml and environment.yml say the same."""
import re
import tomllib

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from histchrono.core.paths import root

RANGES = {"torch", "torchvision"}


@pytest.fixture(scope="module")
def project():
    return tomllib.loads((root() / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def constraints():
    lines = [l for l in (root() / "constraints.txt").read_text().splitlines() if l and not l.startswith("#")]
    reqs = [Requirement(l) for l in lines]
    names = [canonicalize_name(r.name) for r in reqs]
    assert len(names) == len(set(names)), "a package stands twice in constraints.txt"
    return dict(zip(names, reqs))


def requirements(project):
    groups = {"dependencies": project["dependencies"], **project["optional-dependencies"]}
    return [(g, Requirement(d)) for g, deps in groups.items() for d in deps]


def test_every_requirement_is_constrained_within_its_range(project, constraints):
    for group, r in requirements(project):
        c = constraints.get(canonicalize_name(r.name))
        assert c is not None, f"{r.name} of [{group}] is not in constraints.txt"
        if r.name in RANGES:
            assert c.specifier == r.specifier, f"{r.name}: constraints.txt has {c.specifier}, pyproject.toml [{group}] {r.specifier}"
        else:
            (pin,) = c.specifier
            assert pin.operator == "==" and pin.version in r.specifier, f"{r.name}: {pin} is not within {r.specifier} of [{group}]"


def test_all_but_torch_are_pinned(constraints):
    assert {n for n, r in constraints.items() if [s.operator for s in r.specifier] != ["=="]} == RANGES
    assert not [n for n in constraints if n.startswith(("nvidia-", "cuda-", "triton"))], "what torch brings depends on the machine"


def test_environment_yml_installs_the_same(project):
    env = yaml.safe_load((root() / "environment.yml").read_text())
    deps = [d for d in env["dependencies"] if isinstance(d, str)]
    (pip,) = [d["pip"] for d in env["dependencies"] if isinstance(d, dict)]
    (python,) = [SpecifierSet(d.removeprefix("python")) for d in deps if d.startswith("python")]
    lowest = project["requires-python"].removeprefix(">=")
    assert f">={lowest}" in [str(s) for s in python] and Version("3.11.7") in python
    extras = re.search(r"^EXTRAS \?= (\S+)$", (root() / "Makefile").read_text(), re.M)[1]
    assert pip == ["-c constraints.txt", f"-e .[{extras}]"]


def test_no_index_address_anywhere():
    for name in ("pyproject.toml", "constraints.txt", "environment.yml", "Makefile", "workflow/install.sh"):
        text = (root() / name).read_text()
        assert "index-url" not in text and "find-links" not in text and "download.pytorch" not in text, name


def test_installed_versions_are_the_constrained_ones(constraints):
    from importlib.metadata import PackageNotFoundError, version

    for name, r in constraints.items():
        try:
            have = version(name)
        except PackageNotFoundError:
            continue
        assert have.split("+")[0] in r.specifier, f"{name} {have} is installed, constraints.txt says {r.specifier}"
