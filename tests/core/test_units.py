from __future__ import annotations

import pytest

from kvferry.core.units import format_bytes, parse_address, parse_bytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("512MiB", 512 * 2**20),
        ("2GB", 2 * 10**9),
        ("1.5 GiB", 3 * 2**29),
        ("4096", 4096),
        (4096, 4096),
        (" 1 kB ".replace("k", "K"), 1000),
        ("7B", 7),
    ],
)
def test_sizes_with_and_without_units(text: str | int, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("wrong", ["", "MiB", "-1MiB", "1 mib", "1e9", "1XB", True, None, 1.5])
def test_what_is_not_a_size_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="size"):
        parse_bytes(wrong)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (23_592_960, "23.6 MB"), (5 * 10**12, "5.0 TB")],
)
def test_sizes_for_people(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:0", ("127.0.0.1", 0)),
        ("node-3.example:65535", ("node-3.example", 65535)),
        ("[::1]:8000", ("::1", 8000)),
    ],
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize(
    "wrong", ["", "8000", ":8000", "host:", "host:-1", "host:65536", "::1:80", "a:²"]
)
def test_what_is_not_an_address_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="write"):
        parse_address(wrong)
