"""From logits to tokens.

R sampled rows, V vocabulary ids, C candidates. A row's token is a function of its own logits, its
parameters and its noise, which is keyed by (seed, sample index, position, vocabulary id) alone:
nothing here may depend on which rows share the step.

NOTE on the algorithm. With E exponentially distributed, ``argmin E / p`` is a draw from p; in log
space it is ``argmax(log p - log E)``, in which normalising p is a constant that can be left out.
Filters are one threshold per row on x = logits / temperature: top-k, then top-p of what top-k
leaves, then min-p, keep the ids with ``x >= threshold`` (so ids that tie at the threshold stay in
together, whatever order a sort gave them). Most thresholds lie within the C largest logits, found
without a sort; a row whose threshold does not is drawn on its own over the whole vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.engine.logit_edits import apply_edits
from kvferry.engine.plan import RowLogprobs, SamplingRows, StepResult
from kvferry.kernels.sampling.philox import all_words, neg_log_exponential, uniform_words

NUM_CANDIDATES = (256, 4096)
"""Candidates looked at first, and for the rows that are not content with these."""
NOISE_AT_ONCE = 65536
"""Ids whose noise is computed at once at most: more would not stay in the processor's cache."""


def sample(logits: torch.Tensor, rows: SamplingRows, vocab_size: int) -> StepResult:
    """Draw one token per row of ``logits`` [R, >= vocab_size]; ids from vocab_size on are never
    drawn.

    Log-probabilities are those of the model's own distribution over the vocabulary: before edits,
    temperature and filters. A row with NaN or infinite logits gets token 0 and is listed as
    invalid; it does not touch the others.
    """
    logits = logits[:, :vocab_size]
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    invalid = _invalid_rows(logits)
    if invalid or rows.edits:
        logits = logits.clone()
        logits[list(invalid)] = 0.0
    wanted = [row for row in rows.logprobs if row not in invalid]
    raw = torch.log_softmax(logits[wanted].double(), dim=-1) if wanted else None
    apply_edits(logits, rows.edits)
    tokens = _choose(logits, rows)
    result = StepResult(token_ids=tokens)
    if raw is not None:
        result.logprobs = _logprobs(raw, wanted, rows, tokens)
    if invalid:
        result.token_ids[list(invalid)] = 0
        result.invalid = invalid
    return result


def _invalid_rows(logits: torch.Tensor) -> tuple[int, ...]:
    # One sum finds that all is well; it can overflow for finite logits, so a bad sum is only a
    # suspicion.
    if logits.device.type == "cpu":
        with np.errstate(over="ignore", invalid="ignore"):
            is_well = bool(np.isfinite(logits.numpy().sum()))
    else:
        is_well = bool(torch.isfinite(logits.sum()))
    if is_well:
        return ()
    bad = ~torch.isfinite(logits).all(dim=-1)
    return tuple(bad.nonzero().flatten().tolist())


def _logprobs(
    raw: torch.Tensor, wanted: list[int], rows: SamplingRows, tokens: NDArray[np.int64]
) -> dict[int, RowLogprobs]:
    most = min(max(rows.logprobs[row] for row in wanted), raw.shape[-1])
    values, ids = (part.tolist() for part in raw.topk(most, dim=-1))
    logprobs = {}
    for i, row in enumerate(wanted):
        token = int(tokens[row])
        count = rows.logprobs[row]
        top = tuple(zip(ids[i][:count], values[i][:count], strict=True))
        logprobs[row] = RowLogprobs(token_id=token, logprob=float(raw[i, token]), top=top)
    return logprobs


def _choose(logits: torch.Tensor, rows: SamplingRows) -> NDArray[np.int64]:
    """Token ids [R]; the lowest id among equals where temperature is 0."""
    random = np.flatnonzero(rows.temperature > 0)
    if not random.size:
        return _largest(logits)
    if random.size == len(rows.temperature):
        return np.asarray(_draw(logits, _Draws.select(rows, random, logits.device)).cpu().numpy())
    tokens = np.empty(len(rows.temperature), dtype=np.int64)
    greedy = np.flatnonzero(rows.temperature <= 0)
    tokens[greedy] = _largest(logits[torch.from_numpy(greedy)])
    drawn = _draw(logits[torch.from_numpy(random)], _Draws.select(rows, random, logits.device))
    tokens[random] = drawn.cpu().numpy()
    return tokens


def _largest(logits: torch.Tensor) -> NDArray[np.int64]:
    # On the host numpy's is several times as fast, and wakes no threads that would then spin beside
    # those of the next step.
    if logits.device.type == "cpu":
        return np.asarray(logits.numpy().argmax(-1))
    return np.asarray(logits.argmax(dim=-1).cpu().numpy())


@dataclass(slots=True)
class _Draws:
    """Parameters of the rows that are drawn at random, each [R]."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seed: torch.Tensor
    sample_index: torch.Tensor
    position: torch.Tensor

    @classmethod
    def select(cls, rows: SamplingRows, index: NDArray[np.intp], device: torch.device) -> _Draws:
        def to_torch(values: NDArray[np.generic], dtype: type[np.generic]) -> torch.Tensor:
            return torch.from_numpy(values[index].astype(dtype)).to(device)

        return cls(
            temperature=to_torch(rows.temperature, np.float64),
            top_k=to_torch(rows.top_k, np.int64),
            top_p=to_torch(rows.top_p, np.float64),
            min_p=to_torch(rows.min_p, np.float64),
            seed=torch.from_numpy(rows.seed[index].view(np.int64)).to(device),
            sample_index=to_torch(rows.sample_index, np.int64),
            position=to_torch(rows.position, np.int64),
        )

    def __getitem__(self, index: torch.Tensor) -> _Draws:
        return _Draws(
            temperature=self.temperature[index],
            top_k=self.top_k[index],
            top_p=self.top_p[index],
            min_p=self.min_p[index],
            seed=self.seed[index],
            sample_index=self.sample_index[index],
            position=self.position[index],
        )

    def noise(self, vocab_ids: torch.Tensor) -> torch.Tensor:
        """``-log E`` of ids [R, C], float64."""
        words = uniform_words(self.seed, self.sample_index, self.position, vocab_ids)
        return neg_log_exponential(words)

    def full_noise(self, vocab_size: int) -> torch.Tensor:
        words = all_words(self.seed, self.sample_index, self.position, vocab_size)
        return neg_log_exponential(words)


def _draw(logits: torch.Tensor, draws: _Draws) -> torch.Tensor:
    """Token ids int64 [R]."""
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    filtered = (draws.top_k > 0) | (draws.top_p < 1) | (draws.min_p > 0)
    pending = filtered.nonzero().flatten()
    for num_candidates in NUM_CANDIDATES:
        if len(pending):
            pending = _draw_top(logits, draws, pending, num_candidates, tokens)
    for row in pending.unsqueeze(1):
        tokens[row] = _draw_whole(logits[row], draws[row])
    unfiltered = (~filtered).nonzero().flatten()
    for rows in unfiltered.split(max(1, NOISE_AT_ONCE // logits.shape[-1])):
        scaled = logits[rows].double() / draws.temperature[rows].unsqueeze(1)
        tokens[rows] = (scaled + draws[rows].full_noise(logits.shape[-1])).argmax(dim=-1)
    return tokens


def _draw_top(
    logits: torch.Tensor,
    draws: _Draws,
    rows: torch.Tensor,
    num_candidates: int,
    tokens: torch.Tensor,
) -> torch.Tensor:
    """Fill ``tokens`` of ``rows`` whose survivors are all in the top; return the others."""
    part, values = draws[rows], logits[rows]
    top, ids = values.topk(min(num_candidates, values.shape[-1]), dim=-1)
    scaled = top.double() / part.temperature.unsqueeze(1)
    threshold, complete = _thresholds(scaled, _log_totals(values, part), part)
    complete |= ids.shape[-1] == values.shape[-1]
    found = complete.nonzero().flatten()
    if len(found):
        chosen = _draw_candidates(scaled[found], ids[found], threshold[found], part[found])
        tokens[rows[found]] = chosen
    return rows[~complete]


def _log_totals(logits: torch.Tensor, draws: _Draws) -> torch.Tensor:
    """logsumexp of x over the whole vocabulary, [R], where top-p without top-k needs it; else 0."""
    totals = torch.zeros_like(draws.top_p)
    needed = ((draws.top_p < 1) & (draws.top_k == 0)).nonzero().flatten()
    if len(needed):
        scaled = logits[needed].double() / draws.temperature[needed].unsqueeze(1)
        totals[needed] = scaled.logsumexp(dim=-1)
    return totals


def _thresholds(
    scaled: torch.Tensor, log_totals: torch.Tensor, draws: _Draws
) -> tuple[torch.Tensor, torch.Tensor]:
    """The x from which on ids survive, [R], -inf where all do; and where that is certain.

    ``scaled`` [R, C] holds the C largest x, falling. It is certain with C = V, and else where the
    threshold is above the last of them, and so is that of top-k, which top-p builds on.
    """
    count = scaled.shape[-1]
    by_k = scaled.gather(1, draws.top_k.clamp(1, count).unsqueeze(1) - 1)
    by_k = by_k.masked_fill(draws.top_k.unsqueeze(1) == 0, -torch.inf)
    kept = scaled.masked_fill(scaled < by_k, -torch.inf)
    log_norm = torch.where(draws.top_k > 0, kept.logsumexp(dim=-1), log_totals)
    probability = (kept - log_norm.unsqueeze(1)).exp()
    before = probability.cumsum(dim=-1) - probability
    nucleus = (before < draws.top_p.unsqueeze(1)) & (scaled >= by_k)
    by_p = scaled.gather(1, nucleus.sum(dim=-1, keepdim=True).clamp(min=1) - 1)
    by_p = by_p.masked_fill(draws.top_p.unsqueeze(1) >= 1, -torch.inf)
    by_min_p = scaled[:, :1] + draws.min_p.unsqueeze(1).log()
    threshold = torch.cat([by_k, by_p, by_min_p], dim=1).amax(dim=-1)
    last = scaled[:, -1]
    k_certain = (draws.top_k == 0) | (draws.top_p >= 1) | (by_k.squeeze(1) > last)
    return threshold, (threshold > last) & k_certain


def _draw_candidates(
    scaled: torch.Tensor, ids: torch.Tensor, threshold: torch.Tensor, draws: _Draws
) -> torch.Tensor:
    """Tokens [R] from candidates [R, C] in falling order that hold all survivors."""
    survives = scaled >= threshold.unsqueeze(1)
    width = int(survives.sum(dim=-1).max())
    scores = scaled[:, :width] + draws.noise(ids[:, :width])
    best = scores.masked_fill(~survives[:, :width], -torch.inf).argmax(dim=-1, keepdim=True)
    return ids.gather(1, best).squeeze(1)


def _draw_whole(logits: torch.Tensor, draw: _Draws) -> torch.Tensor:
    """Token [1] of one row [1, V] whose survivors may be anywhere in the vocabulary."""
    vocab_size = logits.shape[-1]
    scaled = logits.double() / draw.temperature
    if draw.top_k > 0 or draw.top_p < 1:
        falling = logits.sort(dim=-1, descending=True).values.double() / draw.temperature
        threshold, _ = _thresholds(falling, scaled.logsumexp(dim=-1), draw)
    else:
        threshold = scaled.max() + draw.min_p.log()
    ids = (scaled[0] >= threshold).nonzero().flatten()
    # Noise of the whole vocabulary costs as much as noise of a quarter of its ids.
    few = len(ids) * 4 < vocab_size
    noise = draw.noise(ids.unsqueeze(0)) if few else draw.full_noise(vocab_size)[:, ids]
    return ids[(scaled[:, ids] + noise).argmax(dim=-1)]
