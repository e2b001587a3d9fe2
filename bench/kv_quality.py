"""What a model loses when its KV travels in a narrower type: perplexity and top-1 agreement.

A text is read in windows. The context of each is prefilled in one float32 pool and carried to
another, of another block size, by the very pack and scatter of the KV plane; what follows the
context is then scored there, as a decode worker would compute it. Only the element type on the wire
differs from row to row.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from kvferry.bench.kv_quality_text import TEXT
from kvferry.bench.model_option import add_model, prepared
from kvferry.bench.options import finished, option_parser, positive_count, run_options
from kvferry.bench.report import Better, Claim, Report, Scalar
from kvferry.cache.paged import PagedKV
from kvferry.core.errors import StartupError
from kvferry.core.span import Span
from kvferry.engine.plan import SamplingRows, StepPlan
from kvferry.engine.runner import attention_for
from kvferry.engine.step_tensors import StepTensors
from kvferry.kv_transfer.jobs import BlockTable
from kvferry.kv_transfer.layout import KvLayout, head_nbytes
from kvferry.kv_transfer.memory import Form, PagedKvMemory
from kvferry.kv_transfer.plan import cut
from kvferry.models.decoder import Decoder
from kvferry.models.load import load_model
from kvferry.models.tokenizer import Tokenizer

EXACT = "float32"
WIRES = ("bfloat16", "float16", "float8_e4m3fn", "int8")
BLOCK_SIZES = (16, 32)
"""Of the pool that computes the context, and of the one that goes on from it."""
SLAB_BYTES = 2 << 20
CONFIDENCE = 1.96


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens whose KV is carried, then those that are scored."""

    context: np.ndarray
    scored: np.ndarray
    """The first one follows the context; the last one is predicted, not read."""


class Pool:
    """A float32 cache for one sequence, its blocks in random order."""

    def __init__(self, decoder: Decoder, block_size: int, num_tokens: int) -> None:
        spec, count = decoder.spec, -(-num_tokens // block_size)
        self._decoder, self._block_size = decoder, block_size
        self._kv = PagedKV.allocate(
            num_layers=spec.num_layers,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            block_size=block_size,
            num_blocks=max(count, 4),
            dtype=torch.float32,
        )
        self.layout = KvLayout(
            num_layers=spec.num_layers,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            block_size=block_size,
            dtype=EXACT,
        )
        ids = np.random.default_rng(block_size).permutation(count).astype(np.int32)
        generations = np.zeros(max(count, 4), np.uint32)
        self.blocks = BlockTable(block_ids=ids, generations=generations[ids])
        self.memory = PagedKvMemory(self._kv.slots, self.layout, generations)

    @torch.inference_mode()
    def read(self, tokens: np.ndarray, context_len: int) -> torch.Tensor:
        """Compute tokens after ``context_len`` others: the logits [T, V] of all of them."""
        plan = StepPlan(
            step=0,
            token_ids=tokens.astype(np.int64),
            query_lens=np.array([len(tokens)], np.int32),
            context_lens=np.array([context_len], np.int32),
            block_tables=self.blocks.block_ids[None],
            sampled=np.zeros(1, np.int32),
            sampling=SamplingRows.greedy(1),
        )
        tensors = StepTensors.build(plan, self._block_size, "cpu")
        attend = attention_for(self._decoder, self._kv)(tensors)
        return self._decoder.logits(self._decoder(tensors.token_ids, tensors.positions, attend))


def carry(source: Pool, target: Pool, num_tokens: int, wire: str) -> None:
    """Through slabs, as a transfer does. Raises RuntimeError when a digest does not match."""
    form = Form(wire, "xxh3")
    head_bytes = head_nbytes(source.layout.head_dim, wire)
    for move in cut(source.layout.whole, Span(0, num_tokens), head_bytes, SLAB_BYTES):
        slab = memoryview(bytearray(move.nbytes))
        packed = source.memory.pack(source.blocks, move, form, slab)
        if target.memory.scatter(target.blocks, move, form, slab) != packed:
            raise RuntimeError(f"a slab of {wire} changed on its way")


@dataclass(slots=True)
class Score:
    """Of all scored positions with one type on the wire."""

    losses: list[np.ndarray]
    """-log p of the token that stands there, in nats."""
    choices: list[np.ndarray]
    """The most likely token."""

    def add(self, logits: torch.Tensor, expected: np.ndarray) -> None:
        """logits: [T, V]; expected: [T]."""
        log_p = torch.log_softmax(logits.double(), dim=-1)
        rows = torch.arange(len(expected))
        self.losses.append(-log_p[rows, torch.from_numpy(expected)].numpy())
        self.choices.append(logits.argmax(-1).numpy())

    @property
    def loss(self) -> np.ndarray:
        return np.concatenate(self.losses)

    @property
    def choice(self) -> np.ndarray:
        return np.concatenate(self.choices)


def measure(decoder: Decoder, windows: list[Window]) -> dict[str, Score]:
    """A score per type on the wire."""
    scores = {wire: Score([], []) for wire in (EXACT, *WIRES)}
    for window in windows:
        context_len = len(window.context)
        longest = context_len + len(window.scored)
        source = Pool(decoder, BLOCK_SIZES[0], longest)
        source.read(window.context, 0)
        for wire, score in scores.items():
            target = Pool(decoder, BLOCK_SIZES[1], longest)
            carry(source, target, context_len, wire)
            score.add(target.read(window.scored[:-1], context_len), window.scored[1:])
    return scores


def rows_of(scores: dict[str, Score], layout: KvLayout) -> list[dict[str, Scalar]]:
    """A table row per type."""
    exact = scores[EXACT]
    exact_bytes = layout.whole.token_bytes(head_nbytes(layout.head_dim, EXACT))
    rows: list[dict[str, Scalar]] = []
    for wire, score in scores.items():
        nbytes = layout.whole.token_bytes(head_nbytes(layout.head_dim, wire))
        rows.append(
            {
                "wire": wire,
                "bytes per token": nbytes,
                "of float32": nbytes / exact_bytes,
                "perplexity": float(np.exp(score.loss.mean())),
                "perplexity +%": _perplexity_percent(score, exact)[0],
                "±": _perplexity_percent(score, exact)[1],
                "same top-1 %": 100 * float((score.choice == exact.choice).mean()),
                "n": len(score.loss),
            }
        )
    return rows


def claims_of(scores: dict[str, Score]) -> list[Claim]:
    """Reported, not promised: what is lost is the user's to choose."""
    exact, claims = scores[EXACT], []
    for wire in WIRES:
        score, count = scores[wire], len(exact.loss)
        delta, spread = _perplexity_percent(score, exact)
        same = float((score.choice == exact.choice).mean())
        agreement_spread = CONFIDENCE * math.sqrt(same * (1 - same) / count)
        claims += [
            Claim(
                id=f"kv_perplexity_{wire}",
                value=delta,
                better=Better.LOWER,
                n=count,
                spread=spread,
                unit="%",
            ),
            Claim(
                id=f"kv_top1_{wire}",
                value=100 * same,
                better=Better.HIGHER,
                n=count,
                spread=100 * agreement_spread,
                unit="%",
            ),
        ]
    return claims


def _perplexity_percent(score: Score, exact: Score) -> tuple[float, float]:
    """By how much perplexity rises, and half the width of the interval of that: of paired
    positions.
    """
    difference = score.loss - exact.loss
    mean, error = difference.mean(), difference.std(ddof=1) / math.sqrt(len(difference))
    return 100 * math.expm1(mean), 100 * CONFIDENCE * float(error) * math.exp(mean)


def windows_of(tokens: list[int], context: int, scored: int) -> Iterator[Window]:
    """Every token after the first ``context`` + 1 is scored once, but for a rest."""
    ids = np.array(tokens, np.int64)
    for begin in range(0, len(ids) - context - scored, scored):
        split, end = begin + context, begin + context + scored + 1
        yield Window(ids[begin:split], ids[split:end])


def run(args: list[str]) -> Report:
    """Score the text with each type on the wire."""
    parser = option_parser("kv_quality", __doc__.partition("\n")[0])
    add_model(parser)
    parser.add_argument("--text", type=_text, metavar="FILE", help="what to read (default: ours)")
    parser.add_argument("--context", type=positive_count, default=256, help="tokens carried")
    parser.add_argument("--scored", type=positive_count, default=64, help="tokens scored after it")
    options = parser.parse_args(args)
    text = options.text or TEXT
    options.text = "ours" if options.text is None else "a file"
    plain = run_options(options)
    torch.set_num_threads(options.threads)
    folder = prepared(options.model)
    tokens = Tokenizer(folder).encode(text)
    if options.quick:
        # A tiny model knows few tokens.
        tokens, options.context, options.scored = list(range(min(40, len(tokens)))), 24, 8
    windows = list(windows_of(tokens, options.context, options.scored))
    if not windows:
        raise StartupError(f"the text has {len(tokens)} tokens, one window needs more")
    decoder = load_model(folder, torch.float32)
    scores = measure(decoder, windows)
    layout = Pool(decoder, BLOCK_SIZES[0], 1).layout
    return Report(
        bench="kv_quality",
        rows=rows_of(scores, layout),
        claims=claims_of(scores),
        options=finished(plain),
    )


def _text(name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"{name}: {error}") from None
