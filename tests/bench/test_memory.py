"""Reading smaps."""

from __future__ import annotations

from kvferry.bench.memory import Pages, parse_smaps

SMAPS = """\
7f0000000000-7f0000100000 r--s 00000000 08:01 42   /models/my model/model.safetensors
Size:               1024 kB
Rss:                 700 kB
Pss:                 350 kB
Shared_Clean:        600 kB
Shared_Dirty:         40 kB
Private_Clean:        50 kB
Private_Dirty:        10 kB
Anonymous:             0 kB
VmFlags: rd sh mr mw me
7f0000200000-7f0000300000 rw-p 00000000 00:00 0
Shared_Clean:          0 kB
Private_Dirty:       200 kB
Anonymous:           200 kB
ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0   [vsyscall]
Shared_Clean:          4 kB
THPeligible:    0
"""
WEIGHTS = "/models/my model/model.safetensors"


def test_only_the_named_mappings_count() -> None:
    kib = 1024
    assert parse_smaps(SMAPS, [WEIGHTS]) == Pages(640 * kib, 60 * kib, 0)
    assert parse_smaps(SMAPS, ["/other"]) == Pages(0, 0, 0)


def test_without_names_all_count() -> None:
    kib = 1024
    assert parse_smaps(SMAPS) == Pages(644 * kib, 260 * kib, 200 * kib)
