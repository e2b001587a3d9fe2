"""The wheel holds every folder under the name that it is imported by."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
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


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the sources and unpacked outside the project."""
    scratch = tmp_path_factory.mktemp("packaging")
    source, target = scratch / "source", scratch / "site"
    source.mkdir()
    for folder in {path.relative_to(ROOT).parts[0] for path in package_folders().values()}:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, source / folder, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    options = ["--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "wheel", *options, "-w", scratch, source], check=True, cwd=scratch)
    (wheel,) = scratch.glob("kvferry-*.whl")
    subprocess.run(
        [*pip, "install", "--no-deps", "--no-index", "--target", target, wheel], check=True
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
