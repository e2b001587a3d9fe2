"""The measured hit is one, whatever it takes here."""

from __future__ import annotations

from kvferry.bench.cache_hit import hit_claim, hit_row, measure_hit


def test_every_repeat_finds_the_whole_prefix() -> None:
    times = measure_hit(num_tokens=64, repeats=5)
    assert len(times.lookup) == len(times.hashing) == 5
    assert all(ms > 0 for ms in [*times.lookup, *times.hashing])
    claim = hit_claim(times)
    assert (claim.id, claim.goal, claim.n) == ("hit_ms_4096", 1.0, 5)
    assert hit_row(times)["ms/step"] == claim.value
