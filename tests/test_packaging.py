"""The sdist, wheel and editable install, built from a copy of the work tree without a network and imported elsewhere."""

from __future__ import annotations

import email.message
import email.parser
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from thunder_fsdp_sched import compat

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]

setuptools = pytest.importorskip("setuptools", minversion="77")


def build(kind: str, tree: Path, out: Path) -> Path:
    """Build an ``sdist``, ``wheel`` or ``editable`` of a tree with the backend that pip uses."""
    out.mkdir(parents=True)
    result = subprocess.run(
        [sys.executable, "-c", f"from setuptools import build_meta; build_meta.build_{kind}({str(out)!r})"],
        cwd=tree,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    (artifact,) = out.iterdir()
    return artifact


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the work tree without the files of earlier builds and runs."""
    copy = tmp_path_factory.mktemp("packaging") / "tree"
    ignored = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=ignored)
    return copy


@pytest.fixture(scope="module")
def unpacked(tree: Path) -> Path:
    """The files of the sdist."""
    with tarfile.open(build("sdist", tree, tree.parent / "sdist")) as archive:
        # Early releases of Python 3.10 do not have filter="data".
        archive.extractall(tree.parent, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return tree.parent / "thunder_fsdp_sched-0.1.0"


@pytest.fixture(scope="module")
def wheel(unpacked: Path) -> Path:
    """A wheel that is built from the sdist."""
    return build("wheel", unpacked, unpacked.parent / "wheel")


@pytest.fixture(scope="module")
def about(wheel: Path) -> email.message.Message:
    """The metadata of the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return email.parser.BytesParser().parsebytes(archive.read(f"{wheel.name[:24]}.dist-info/METADATA"))


@pytest.fixture(scope="module")
def required(about: email.message.Message) -> dict[str, SpecifierSet]:
    """The versions of each distribution that is always required."""
    requirements = map(Requirement, about.get_all("Requires-Dist"))
    return {requirement.name: requirement.specifier for requirement in requirements if requirement.marker is None}


def test_the_wheel_of_the_sdist_has_every_module_and_no_other_top_level_package(unpacked, wheel):
    assert (unpacked / "LICENSE").is_file()
    assert (unpacked / "thunder_fsdp_sched" / "transforms" / "__init__.py").is_file()
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "thunder_fsdp_sched").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == modules
    assert "thunder_fsdp_sched/py.typed" in names
    assert {name.split("/")[0] for name in names} == {"thunder_fsdp_sched", "thunder_fsdp_sched-0.1.0.dist-info"}
    assert "thunder_fsdp_sched-0.1.0.dist-info/licenses/LICENSE" in names


def test_an_editable_install_is_found_from_an_empty_folder_even_from_a_checkout_without_symlinks(tree, tmp_path):
    copy, site, empty = (tmp_path / name for name in ("tree", "site", "empty"))
    shutil.copytree(tree, copy, symlinks=True)
    (copy / "transforms").unlink()
    empty.mkdir()
    with zipfile.ZipFile(build("editable", copy, tmp_path / "out")) as archive:
        archive.extractall(site)
    code = f"""
import importlib.util, site
site.addsitedir({str(site)!r})
print(importlib.util.find_spec("thunder_fsdp_sched").origin)
for name in ("transforms", "transports", "tests"):
    assert importlib.util.find_spec(name) is None, f"global package {{name}}"
"""
    # -I keeps the current folder and PYTHONPATH off the path. -S ignores the environment's .pth files, such as that of an
    # editable install of the work tree.
    command = [sys.executable, "-I", "-S", "-c", code]
    result = subprocess.run(command, cwd=empty, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-4000:]
    assert os.path.realpath(result.stdout.strip()) == os.path.realpath(copy / "thunder_fsdp_sched" / "__init__.py")


def test_the_work_tree_has_the_symlink():
    link = ROOT / "transforms"
    assert os.readlink(link) == os.path.join("thunder_fsdp_sched", "transforms")
    assert link.resolve() == ROOT / "thunder_fsdp_sched" / "transforms"


def test_the_required_versions_are_those_that_compat_accepts(required):
    assert compat.SUPPORTED
    for requirement in map(Requirement, compat.requirements()):
        assert required[requirement.name] == requirement.specifier


def test_the_script_for_other_versions_tries_all_that_are_supported(about, required):
    combinations = runpy.run_path(str(ROOT / ".ci" / "versions"))["COMBINATIONS"]
    pythons, torches, thunders = map(set, zip(*combinations, strict=True))
    classifiers = {c for c in about.get_all("Classifier") if ":: Python :: 3." in c}
    assert {f"Programming Language :: Python :: {python}" for python in pythons} == classifiers
    assert {Version(torch).minor for torch in torches} == {n for n in range(100) if f"2.{n}.0" in required["torch"]}
    assert all(required["lightning-thunder"].contains(thunder, prereleases=True) for thunder in thunders)
    default = {thunder for _, torch, thunder in combinations if torch == makefile()["TORCH"]}
    assert {makefile()["THUNDER"], makefile()["NIGHTLY"]} == default


def makefile() -> dict[str, str]:
    """Return the versions that the Makefile installs by default."""
    text = (ROOT / "Makefile").read_text()
    return dict(re.findall(r"^(TORCH|THUNDER|NIGHTLY) \?= .*==(.*)$", text, re.MULTILINE))


def test_the_digests_are_of_the_default_versions_because_others_skip_them():
    digests = json.loads((ROOT / "tests" / "freeze.json").read_text())
    assert digests["versions"] == f"torch {makefile()['TORCH']}, thunder {makefile()['THUNDER']}"


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_documentation_installs_the_default_versions(page):
    command = f"pip install torch=={makefile()['TORCH']} lightning-thunder=={makefile()['THUNDER']}"
    assert f"    {command}\n" in (ROOT / page).read_text()


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13"])
@pytest.mark.parametrize("system", ["linux x86_64", "linux aarch64", "darwin x86_64"])
def test_the_nvfuser_extra_requires_a_compatible_torch(about, python, system):
    here = dict(zip(("sys_platform", "platform_machine"), system.split(), strict=True)) | {"python_version": python}
    found = [r for r in map(Requirement, about.get_all("Requires-Dist")) if r.marker is not None]
    asked, others = ([r for r in found if r.marker.evaluate({**here, "extra": e})] for e in ("nvfuser", ""))
    required_by_extra = {r.name: r.specifier for r in asked if r not in others}
    if python not in ("3.10", "3.12") or system != "linux x86_64":
        assert not required_by_extra
        return
    # nvFuser's wheels are pre-releases, so the range has to allow pre-releases.
    assert required_by_extra["nvfuser-cu128-torch210"].prereleases
    assert required_by_extra["torch"].contains("2.10.0") and not required_by_extra["torch"].contains("2.11.0")
    assert not required_by_extra["lightning-thunder"].contains(Version("0.2.6"))
