from __future__ import annotations

import copy
import inspect
import re

import pytest

from kvferry.core import errors
from kvferry.core.errors import ConfigError, InvalidRequest, KvferryError


def drawn_tree() -> dict[str, str]:
    """Child -> parent as the module's docstring draws it: depth is the column of the name."""
    stack: list[tuple[int, str]] = []
    parents: dict[str, str] = {}
    for line in inspect.cleandoc(errors.__doc__ or "").splitlines():
        match = re.match(r"[\s│├└─]*([A-Z][A-Za-z]+)\b", line)
        if match is None or not hasattr(errors, match[1]):
            continue
        depth = match.start(1)
        while stack and stack[-1][0] >= depth:
            stack.pop()
        if stack:
            parents[match[1]] = stack[-1][1]
        stack.append((depth, match[1]))
    return parents


def test_the_drawing_is_the_tree() -> None:
    classes = {
        name: cls
        for name, cls in vars(errors).items()
        if inspect.isclass(cls) and cls.__module__ == errors.__name__
    }
    real = {n: c.__bases__[0].__name__ for n, c in classes.items() if n != "KvferryError"}
    assert drawn_tree() == real


@pytest.mark.parametrize(
    "error",
    [InvalidRequest("prompt", "must not be empty"), ConfigError("decode.workers", "too few")],
    ids=["InvalidRequest", "ConfigError"],
)
def test_errors_with_a_field_survive_the_way_between_processes(error: KvferryError) -> None:
    again = copy.copy(error)  # takes the same road as serialisation
    assert type(again) is type(error)
    assert str(again) == str(error) == f"{error.args[0]}: {error.args[1]}"
