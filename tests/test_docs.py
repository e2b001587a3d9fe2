"""What the documentation names is there: commands, options, make targets, keys, links."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from sourcetree import ROOT

from kvferry.cli.main import app
from kvferry.core.config import Config
from kvferry.core.config_keys import Section

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def named(pattern: str) -> Iterator[tuple[str, re.Match[str]]]:
    for page in PAGES:
        for match in re.finditer(pattern, text(page), flags=re.MULTILINE):
            yield page.name, match


def commands() -> dict[str, Any]:
    """``serve`` and ``model pull`` -> the command object."""
    found: dict[str, Any] = {}
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        found[name] = command
        for inner, leaf in getattr(command, "commands", {}).items():
            found[f"{name} {inner}"] = leaf
    return found


def bench_options(bench: str | None) -> set[str]:
    """Of one bench, or those that all share: whatever its source adds to a parser."""
    sources = [ROOT / "bench" / f"{name}.py" for name in ("options", "model_option", bench)]
    found = (re.findall(r'"(--[a-z-]+)"', text(path)) for path in sources if path.exists())
    return {option for options in found for option in options}


def config_keys(section: type[Section] = Config, prefix: str = "") -> set[str]:
    keys = set()
    for name, field in section.model_fields.items():
        keys.add(prefix + name)
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            keys |= config_keys(kind, f"{prefix}{name}.")
    return keys


def test_there_are_pages() -> None:
    assert {"README.md", "ARCHITECTURE.md", "configuration.md"} <= {page.name for page in PAGES}


def test_commands_and_their_options_exist() -> None:
    known = commands()
    wrong = []
    pattern = r"(?:^\$ |`)(?:\.venv/bin/)?kvferry ([a-z]+)(?: ([a-z]+)\b)?([^`\n#]*)"
    for page, match in named(pattern):
        name = f"{match[1]} {match[2]}" if f"{match[1]} {match[2]}" in known else match[1]
        if name not in known:
            wrong.append(f"{page}: {match[0]}")
            continue
        options = {option for p in known[name].params for option in p.opts} | {"--help", "--"}
        if name == "bench":
            options |= bench_options(match[2])
        used = set(re.findall(r"(?<!\S)--[a-z-]*", match[0]))
        wrong += [f"{page}: kvferry {name} {option}" for option in used - options]
    assert wrong == []


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", text(ROOT / "Makefile"), flags=re.MULTILINE))
    used = {(page, m[1]) for page, m in named(r"(?:^\$ |`)make (?:[A-Z]+=\S+ )?([a-z]+)")}
    assert {(page, target) for page, target in used if target not in targets} == set()
    assert {"demo", "test", "check"} <= {target for _, target in used}


def test_configuration_keys_exist() -> None:
    keys = config_keys()
    sections = "|".join(name for name in keys if f"{name}." in " ".join(keys))
    used = {(page, match[1]) for page, match in named(rf"`((?:{sections})\.\w+)(?:: \w+)?`")}
    wrong = {(p, key) for p, key in used if key not in keys and not (ROOT / key).exists()}
    assert wrong == set()


def test_the_configuration_reference_is_fresh(tmp_path: Path) -> None:
    fresh = tmp_path / "configuration.md"
    subprocess.run([sys.executable, ROOT / "docs" / "generate.py", fresh], check=True)
    assert text(fresh) == text(ROOT / "docs" / "configuration.md"), "run make docs"


def test_the_example_configuration_is_valid(tmp_path: Path) -> None:
    from kvferry.core.config import load_config

    (example,) = re.findall(r"```yaml\n(.*?)```", text(ROOT / "docs/configuration.md"), re.DOTALL)
    (tmp_path / "example.yaml").write_text(example)
    assert load_config(tmp_path / "example.yaml").decode.workers == 2


def test_relative_links_lead_somewhere() -> None:
    wrong = [
        f"{page.name}: {target}"
        for page in PAGES
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text(page))
        if not (page.parent / target).exists()
    ]
    assert wrong == []


def test_every_folder_is_on_the_map() -> None:
    folders = {
        path.parent.name for path in ROOT.glob("*/__init__.py") if path.parent.name != "tests"
    }
    page = text(ROOT / "ARCHITECTURE.md")
    assert {folder for folder in folders if f"[{folder}]({folder})" not in page} == set()


def test_every_file_of_the_kv_plane_is_described() -> None:
    files = {path.name for path in ROOT.glob("kv_transfer/*.py")} - {"__init__.py"}
    page = text(ROOT / "docs" / "transfer.md")
    described = page[page.index("## The code") : page.index("## Measured")]
    assert set(re.findall(r"`(\w+\.py)`", described)) == files


@pytest.mark.parametrize("command", ["serve", "generate", "status", "model", "bench", "demo"])
def test_every_command_is_in_the_documentation(command: str) -> None:
    assert any(f"kvferry {command}" in text(page) for page in PAGES)


def test_python_examples_compile_and_import_what_is_there() -> None:
    for page in PAGES:
        for block in re.findall(r"```python\n(.*?)```", text(page), re.DOTALL):
            compile(block, page.name, "exec")
            for line in re.findall(r"^from kvferry\S* import .*$", block, re.MULTILINE):
                exec(line, {})
