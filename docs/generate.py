"""Write docs/configuration.md from the configuration tree: ``python docs/generate.py [FILE]``."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from kvferry.core.config import Config
from kvferry.core.config_keys import Section
from kvferry.core.units import parse_bytes

HERE = Path(__file__).resolve().parent

HEAD = """\
# Configuration

One YAML file holds every value; `kvferry serve CONFIG.yaml` reads it, checks it whole, and starts
nothing when a value is wrong or a key is unknown. Options of `kvferry serve` override the file.
What is left out keeps its default, so the smallest file is an empty one. Sizes are written with a
unit (`512MiB`, `2GB`) or in bytes; names that end in `_s` are seconds.

```yaml
model:
  path: smollm2-135m-instruct
prefill:
  workers: 1
  kv_memory: 512MiB
decode:
  workers: 2
router:
  grpc: 127.0.0.1:50051
  http: 127.0.0.1:8000
```

This page is generated from `core/config.py` by `make docs`.
"""


def render() -> str:
    """The whole page."""
    parts = [HEAD]
    top = [(name, field) for name, field in Config.model_fields.items() if not _section(field)]
    for name, field in Config.model_fields.items():
        section = _section(field)
        if section is not None:
            doc = " ".join((section.__doc__ or "").split()).replace("``", "`")
            parts.append(f"\n## {name}\n\n{doc}\n\n{_table(_rows(section, f'{name}.'))}")
    parts.append(f"\n## The whole\n\n{_table(_row(name, field) for name, field in top)}")
    return "".join(parts)


def _rows(section: type[Section], prefix: str) -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield _row(prefix + name, field)


def _row(key: str, field: Any) -> str:
    return f"| `{key}` | {_kind(field)} | {_default(field.default)} | {field.description} |"


def _table(rows: Iterator[str]) -> str:
    head = "| key | value | default | meaning |\n|---|---|---|---|\n"
    return head + "\n".join(rows) + "\n"


def _section(field: Any) -> type[Section] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def _kind(field: Any) -> str:
    kinds = [field.annotation]
    if get_origin(field.annotation) in (Union, types.UnionType):
        kinds = [part for part in get_args(field.annotation) if part is not type(None)]
    if all(get_origin(kind) is Literal for kind in kinds):
        return ", ".join(f"`{choice}`" for kind in kinds for choice in get_args(kind))
    (kind,) = kinds
    # Of an optional field the metadata stand with the part that is not None.
    metadata = [*field.metadata, *getattr(kind, "__metadata__", ())]
    if any(getattr(part, "func", None) is parse_bytes for part in metadata):
        return "size"
    return {"int": "whole number", "float": "number", "str": "text", "bool": "true or false"}[
        kind.__name__
    ]


def _default(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, int) and value >= 2**20 and value % 2**20 == 0:
        return f"`{value >> 20}MiB`"
    return f"`{value}`"


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "configuration.md"
    target.write_text(render(), encoding="utf-8")
