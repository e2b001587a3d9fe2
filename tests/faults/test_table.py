"""Every test that the table of faults names exists."""

from __future__ import annotations

import re

from sourcetree import ROOT

ROW = re.compile(r"^\| (B\d{3}) \|.*\| `([\w/]+\.py)(?:::(\w+))?` \|$", re.MULTILINE)


def test_every_row_names_a_test_that_exists() -> None:
    page = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    rows = ROW.findall(page)
    assert len(rows) == len(re.findall(r"^\| B", page, re.MULTILINE)) > 20
    for label, path, function in rows:
        source = (ROOT / "tests" / path).read_text(encoding="utf-8")
        assert not function or f"def {function}(" in source, (label, path, function)
        assert label in source, f"{path} does not name {label}"


def test_every_fault_test_stands_in_the_table() -> None:
    page = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    files = (path.name for path in (ROOT / "tests" / "faults").glob("test_b*.py"))
    assert [name for name in files if f"faults/{name}" not in page] == []
