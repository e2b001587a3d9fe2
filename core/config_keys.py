"""The keys of a configuration as its file spells them, before any value is looked at."""

from __future__ import annotations

import difflib
from typing import Any

from pydantic import BaseModel, ConfigDict

from kvferry.core.errors import ConfigError


class Section(BaseModel):
    """Base of every part of the tree."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def set_dotted(values: dict[str, Any], dotted: str, value: Any) -> None:
    """Set ``a.b.c`` in nested mappings. Raises ConfigError where one is no mapping."""
    *sections, last = dotted.split(".")
    for section in sections:
        inner = values.setdefault(section, {})
        if not isinstance(inner, dict):
            raise ConfigError(section, "must be a mapping")
        values = inner
    values[last] = value


def refuse_unknown_keys(values: dict[str, Any], section: type[Section], prefix: str = "") -> None:
    """Raises ConfigError naming the first key that no part of the tree has, with a suggestion."""
    for key, value in values.items():
        known = section.model_fields
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"known keys: {', '.join(known)}"
            raise ConfigError(f"{prefix}{key}", f"unknown key; {hint}")
        inner = known[key].annotation
        if isinstance(inner, type) and issubclass(inner, Section):
            if not isinstance(value, dict):
                raise ConfigError(f"{prefix}{key}", "must be a mapping")
            refuse_unknown_keys(value, inner, f"{prefix}{key}.")
