"""What the structural tests read: the project's own source files, parsed once."""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module as one statement names it."""

    target: str
    names: tuple[str, ...]
    lineno: int
    lazy: bool
    """Inside a function, or only for the type checker."""


@dataclass(frozen=True, slots=True)
class Module:
    """One source file of the package."""

    name: str
    """Import name, ``kvferry.core.ids``."""
    path: Path
    tree: ast.Module

    @property
    def package(self) -> str:
        """The top-level folder."""
        return self.name.split(".")[1]

    @property
    def where(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    @property
    def is_generated(self) -> bool:
        return "_pb2" in self.path.stem

    def imports(self) -> tuple[Import, ...]:
        return _imports_of(self)

    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node


@functools.cache
def _imports_of(module: Module) -> tuple[Import, ...]:
    return tuple(_imports(module.tree, lazy=False))


def _imports(node: ast.AST, *, lazy: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        inner = lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        inner = inner or (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test))
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, (), child.lineno, lazy)
        elif isinstance(child, ast.ImportFrom):
            names = tuple(alias.name for alias in child.names)
            yield Import("." * child.level + (child.module or ""), names, child.lineno, lazy)
        else:
            yield from _imports(child, lazy=inner)


@functools.cache
def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def package_folders() -> dict[str, Path]:
    """Import name -> folder, as pyproject.toml maps them."""
    mapping: dict[str, str] = pyproject()["tool"]["setuptools"]["package-dir"]
    return {name: ROOT / folder for name, folder in mapping.items()}


@functools.cache
def modules() -> tuple[Module, ...]:
    """Every module of the package, packages' ``__init__`` included, generated ones too."""
    found = []
    for package, folder in package_folders().items():
        for path in sorted(folder.glob("*.py")):
            name = package if path.stem == "__init__" else f"{package}.{path.stem}"
            found.append(Module(name, path, ast.parse(path.read_text(encoding="utf-8"))))
    return tuple(found)


def written_modules() -> list[Module]:
    return [module for module in modules() if not module.is_generated]


def tensor_modules() -> set[str]:
    """The modules that pyproject.toml lets import torch: the second relaxed list of mypy's.

    A pattern stands for those of its modules that do.
    """
    for override in pyproject()["tool"]["mypy"]["overrides"]:
        if override.get("disallow_subclassing_any") is False:
            patterns = [name for name in override["module"] if name.endswith(".*")]
            meant = {
                module.name
                for module in modules()
                if any(fnmatch(module.name, pattern) for pattern in patterns)
                and any(i.target.split(".")[0] in ("torch", "triton") for i in module.imports())
            }
            return set(override["module"]) - set(patterns) | meant
    raise LookupError("pyproject.toml has no list of modules that may import torch")


def imported_modules(module: Module) -> set[str]:
    """The kvferry modules that importing this one runs, without what those import in turn."""
    known = {other.name for other in modules()}
    found = set()
    for imported in module.imports():
        if imported.lazy or not imported.target.startswith("kvferry."):
            continue
        found |= {f"{imported.target}.{name}" for name in imported.names} & known
        found |= {imported.target} & known
    return found


def text_files() -> list[Path]:
    """The project's own text files, without what is installed, built, cached or licence."""
    skipped = re.compile(r"(^|/)(\.venv|\.git|build|dist|\.[a-z]+_cache|\.hypothesis|__pycache__)/")
    suffixes = {".py", ".pyi", ".proto", ".md", ".toml", ".yaml", ".yml", ".txt", ".sh", ".cpp", ""}
    found = []
    for path in sorted(ROOT.rglob("*")):
        relative = path.relative_to(ROOT).as_posix()
        if skipped.search(relative) or ".egg-info/" in relative or not path.is_file():
            continue
        if path.suffix in suffixes and relative != "LICENSE" and "_pb2" not in path.stem:
            found.append(path)
    return found
