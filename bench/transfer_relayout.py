"""What paging, digest, other block sizes and other element types add to a transfer."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from kvferry.bench.report import Better, Claim, Scalar, claim_from
from kvferry.bench.stats import bootstrap_median, interleaved_pairs
from kvferry.bench.transfer_cache import Copier, cache_layout
from kvferry.bench.transfer_pair import Pair, Setting
from kvferry.kernels.kv_pack.host_compiled import compiled_pack

GOAL_OVERHEAD = 0.35
GOAL_OVERHEAD_COMPILED = 0.15
TRANSPORT = "shm"


@dataclass(frozen=True, slots=True)
class Variant:
    """One way in which both sides differ, or do not."""

    name: str
    blocks: tuple[int, int]
    """Tokens per block of source and target."""
    dtypes: tuple[str, str, str] = ("bfloat16", "bfloat16", "bfloat16")
    """Of source, wire and target."""
    in_order: bool = False
    copier: Copier = Copier.BEST

    def tokens(self, nbytes: int) -> int:
        """Whole blocks of both sides that have so many bytes on the wire, or a little less."""
        whole = max(self.blocks)
        token_bytes = cache_layout(16, self.dtypes[1]).token_bytes
        return max(1, nbytes // token_bytes // whole) * whole

    def setting(self, held_bytes: int) -> Setting:
        """Caches of so many bytes on the wire."""
        source, wire, target = self.dtypes
        return Setting(
            source=cache_layout(self.blocks[0], source),
            target=cache_layout(self.blocks[1], target),
            wire=wire,
            tokens=self.tokens(held_bytes),
            walked=self.tokens(held_bytes),
            in_order=self.in_order,
            copier=self.copier,
        )


PLAIN = Variant("copies alone", (16, 16), in_order=True, copier=Copier.PLAIN)
RELAID = Variant("blocks of 8 to 32, shuffled", (8, 32))
RELAID_NUMPY = Variant("blocks of 8 to 32, shuffled, numpy", (8, 32), copier=Copier.NUMPY)
FLOATS = ("float32", "float32")
VARIANTS = (
    PLAIN,
    Variant("same blocks, in order", (16, 16), in_order=True),
    Variant("same blocks, shuffled", (16, 16)),
    RELAID,
    RELAID_NUMPY,
    Variant("blocks of 32 to 8, shuffled", (32, 8)),
    Variant("float32 to bf16, 8 to 32", (8, 32), ("float32", "bfloat16", "bfloat16")),
    Variant("float32, fp8 on the wire, 8 to 32", (8, 32), ("float32", "float8_e4m3fn", "float32")),
    Variant("float32, int8 on the wire, 8 to 32", (8, 32), ("float32", "int8", "float32")),
)


def relayout_rows(
    pair: Pair, nbytes: int, held_bytes: int, count: int
) -> Iterator[dict[str, Scalar]]:
    """Each variant by itself."""
    for variant in VARIANTS:
        setting, tokens = variant.setting(held_bytes), variant.tokens(nbytes)
        pair.open(setting, [TRANSPORT])
        pair.transfer(TRANSPORT, tokens, 2)
        batch = pair.transfer(TRANSPORT, tokens, count)
        size = setting.nbytes(tokens)
        latency_s = statistics.median(batch.latencies_s)
        yield {
            "what": f"{TRANSPORT}: {variant.name}",
            "KiB": size >> 10,
            "GB/s": size / latency_s / 1e9,
            "p50 ms": latency_s * 1e3,
            "CPU s/GB": batch.cpu_s / (len(batch.latencies_s) * size / 1e9),
            "n": len(batch.latencies_s),
        }
    print("re-layouts: done", file=sys.stderr)


def relayout_claims(
    plain: Pair, relaid: Pair, nbytes: int, held_bytes: int, pairs: int
) -> list[Claim]:
    """The part of a transfer's time that digest and re-layout take, by interleaved pairs: with the
    compiled pack, where there is one, and with numpy.
    """

    def claim(id: str, variant: Variant, goal: float) -> Claim:
        plain.open(PLAIN.setting(held_bytes), [TRANSPORT])
        relaid.open(variant.setting(held_bytes), [TRANSPORT])
        plain_s, relaid_s = interleaved_pairs(
            lambda: _seconds(plain, PLAIN.tokens(nbytes)),
            lambda: _seconds(relaid, variant.tokens(nbytes)),
            pairs,
        )
        shares = [1 - copies / whole for copies, whole in zip(plain_s, relaid_s, strict=True)]
        return claim_from(bootstrap_median(shares), id=id, better=Better.LOWER, goal=goal)

    if compiled_pack() is None:
        return [claim("relayout_overhead", RELAID_NUMPY, GOAL_OVERHEAD)]
    return [
        claim("relayout_overhead", RELAID, GOAL_OVERHEAD_COMPILED),
        claim("relayout_overhead_numpy", RELAID_NUMPY, GOAL_OVERHEAD),
    ]


def _seconds(pair: Pair, tokens: int) -> float:
    return statistics.median(pair.transfer(TRANSPORT, tokens, 3).latencies_s)
