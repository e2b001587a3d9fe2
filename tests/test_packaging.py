"""The wheel holds every folder under the name that it is imported by."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from sourcetree import ROOT, modules, package_folders, pyproject

pytestmark = pytest.mark.slow

# What a machine without a GPU or RDMA lacks; modules that need it cannot be imported there.
OPTIONAL = {"triton", "nixl"}

IMPORT_ALL = """
import importlib, importlib.util, json, sys
bare = [importlib.util.find_spec(name) for name in ("router", "kernels", "proto", "engine")]
report = {"bare": [str(spec.origin) for spec in bare if spec]}
for name in json.loads(sys.stdin.read()):
    try:
        report[name] = importlib.import_module(name).__file__
    except ModuleNotFoundError as error:
        report[name] = f"needs {error.name}"
print(json.dumps(report))
"""


def test_every_folder_with_code_is_mapped() -> None:
    folders = {
        path.parent.relative_to(ROOT).as_posix()
        for path in ROOT.glob("[a-z]*/**/__init__.py")
        if path.relative_to(ROOT).parts[0] not in ("build", "tests")
    }
    mapping = pyproject()["tool"]["setuptools"]["package-dir"]
    assert set(mapping.values()) == folders
    assert set(pyproject()["tool"]["setuptools"]["packages"]) == set(mapping)
    assert all(name == f"kvferry.{path.replace('/', '.')}" for name, path in mapping.items())


def test_no_code_lies_in_an_unmapped_folder() -> None:
    mapped = set(package_folders().values())
    inside = {p.parent for folder in mapped for p in folder.rglob("*.py")}
    assert inside - mapped == set()


PIP = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a distribution is built from, without what was built before."""
    source = tmp_path_factory.mktemp("sources")
    for folder in {path.relative_to(ROOT).parts[0] for path in package_folders().values()}:
        ignored = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(ROOT / folder, source / folder, ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    return source


def build_wheel(sources: Path, scratch: Path, **environment: str) -> Path:
    options = ["--no-deps", "--no-build-isolation", "--no-index"]
    shutil.rmtree(sources / "build", ignore_errors=True)
    subprocess.run(
        [*PIP, "wheel", *options, "-w", scratch, sources],
        check=True,
        cwd=scratch,
        env=os.environ | environment,
    )
    (wheel,) = scratch.glob("kvferry-*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, unpacked outside the project."""
    scratch = tmp_path_factory.mktemp("packaging")
    wheel, target = build_wheel(sources, scratch), scratch / "site"
    subprocess.run(
        [*PIP, "install", "--no-deps", "--no-index", "--target", target, wheel], check=True
    )
    return target


def test_the_wheel_imports_whole(installed: Path, tmp_path: Path) -> None:
    names = [module.name for module in modules() if module.path.name != "__main__.py"]
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL],
        input=json.dumps(names),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(installed), "PATH": "/usr/bin:/bin"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    # Others' packages may have these names (proto-plus has one); ours must not answer to them.
    ours = [path for path in report.pop("bare") if path == "None" or path.startswith(str(ROOT))]
    assert [path for path in ours if "site-packages" not in path] == []
    missing = {name: path for name, path in report.items() if path.startswith("needs ")}
    assert set(missing.values()) <= {f"needs {name}" for name in OPTIONAL}, missing
    elsewhere = {n: p for n, p in report.items() if n not in missing and str(installed) not in p}
    assert elsewhere == {}


def test_the_wheel_carries_its_types_and_protocols(installed: Path) -> None:
    assert (installed / "kvferry" / "proto" / "worker.proto").is_file()
    assert (installed / "kvferry" / "proto" / "worker_pb2.pyi").is_file()
    assert (installed / "bin" / "kvferry").is_file()


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_the_wheel_carries_the_compiled_libraries_for_every_python(installed: Path) -> None:
    kernels = installed / "kvferry" / "kernels"
    found = {path.relative_to(kernels).as_posix() for path in kernels.rglob("*.so")}
    assert found == {"kv_pack/_host_pack.abi3.so", "cpu/_cpu_ops.abi3.so"}


def test_without_a_compiler_the_wheel_lacks_the_compiled_libraries_alone(
    sources: Path, tmp_path: Path
) -> None:
    wheel = build_wheel(sources, tmp_path, CC="/bin/false")
    names = zipfile.ZipFile(wheel).namelist()
    assert "kvferry/kernels/kv_pack/host_compiled.py" in names
    assert [name for name in names if name.endswith(".so")] == []
