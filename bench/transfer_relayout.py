"""What paging, digest, other block sizes and other element types add to a transfer."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from kvferry.bench.report import Better, Claim, Scalar, claim_from
from kvferry.bench.stats import Interval, bootstrap_median, interleaved_pairs
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

    def setting(self, nbytes: int) -> Setting:
        """So many bytes on the wire, or a little less: whole blocks of both sides."""
        source, wire, target = self.dtypes
        token_bytes = cache_layout(16, wire).token_bytes
        whole = max(self.blocks)
        return Setting(
            source=cache_layout(self.blocks[0], source),
            target=cache_layout(self.blocks[1], target),
            wire=wire,
            tokens=max(1, nbytes // token_bytes // whole) * whole,
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


def relayout_rows(pair: Pair, nbytes: int, count: int) -> Iterator[dict[str, Scalar]]:
    """Each variant by itself."""
    for variant in VARIANTS:
        setting = variant.setting(nbytes)
        pair.open(setting, [TRANSPORT])
        pair.transfer(TRANSPORT, setting.tokens, 2)
        batch = pair.transfer(TRANSPORT, setting.tokens, count)
        size = setting.nbytes(setting.tokens)
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


def relayout_claims(plain: Pair, relaid: Pair, nbytes: int, pairs: int) -> list[Claim]:
    """The part of a transfer's time that digest and re-layout take, by interleaved pairs: with the
    compiled pack, where there is one, and with numpy.
    """
    numpy_id = "relayout_overhead"
    claims = []
    if compiled_pack() is not None:
        overhead = _overhead(plain, relaid, RELAID, nbytes, pairs)
        claims.append(_claim(overhead, "relayout_overhead", GOAL_OVERHEAD_COMPILED))
        numpy_id = "relayout_overhead_numpy"
    overhead = _overhead(plain, relaid, RELAID_NUMPY, nbytes, pairs)
    return [*claims, _claim(overhead, numpy_id, GOAL_OVERHEAD)]


def _overhead(plain: Pair, relaid: Pair, variant: Variant, nbytes: int, pairs: int) -> Interval:
    sides = [(plain, PLAIN.setting(nbytes)), (relaid, variant.setting(nbytes))]
    for pair, setting in sides:
        pair.open(setting, [TRANSPORT])
        pair.transfer(TRANSPORT, setting.tokens, 2)

    def seconds(pair: Pair, setting: Setting) -> float:
        return statistics.median(pair.transfer(TRANSPORT, setting.tokens, 3).latencies_s)

    plain_s, relaid_s = interleaved_pairs(
        lambda: seconds(*sides[0]), lambda: seconds(*sides[1]), pairs
    )
    return bootstrap_median(
        [1 - copies / whole for copies, whole in zip(plain_s, relaid_s, strict=True)]
    )


def _claim(overhead: Interval, id: str, goal: float) -> Claim:
    return claim_from(overhead, id=id, better=Better.LOWER, goal=goal)
