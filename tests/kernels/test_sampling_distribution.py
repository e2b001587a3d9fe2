"""The rejection rule yields the target's distribution, and coupled drafts change no token.

Tokens come from a Markov chain, for which the distribution of whole sequences is known: the logits
of the next token depend on the last. Every chi-square test has a false-alarm rate of 1e-6.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvferry.kernels.sampling import reference
from kvferry.kernels.sampling.tensors import DraftTensors, SamplingTensors, VerifiedTokens

torch.set_num_threads(1)

FALSE_ALARM = 1e-6
VOCAB = 4
LENGTH = 3
RUNS = 40_000
LEAST_COUNT = 50
ROWS = 3
"""Two drafts and the bonus."""
TEMPERATURE = 0.8

Drafts = tuple[torch.Tensor, torch.Tensor | None]
Drafter = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Drafts]
"""(last token, length, seed) of all runs -> drafts [runs, ROWS] and what they were drawn from."""
Verify = Callable[[torch.Tensor, SamplingTensors, DraftTensors, int], VerifiedTokens]


def p_value(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """Of the chi-square test that ``counts`` are draws with these probabilities. Outcomes that are
    rare are one outcome: the distribution of the statistic is that of large counts.
    """
    assert int(counts[expected == 0].sum()) == 0
    mean, order = (expected * counts.sum()).sort()
    rare = max(int((mean.cumsum(0) < LEAST_COUNT).sum()) + 1, int((mean < LEAST_COUNT).sum()))
    if rare >= len(mean):
        return 1.0
    pooled = [torch.cat([x[:rare].sum().unsqueeze(0), x[rare:]]) for x in (mean, counts[order])]
    statistic = ((pooled[1] - pooled[0]) ** 2 / pooled[0]).sum()
    half_freedom = torch.tensor((len(pooled[0]) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half_freedom, statistic / 2))


def params_of(position: torch.Tensor, seed: torch.Tensor, top_k: int) -> SamplingTensors:
    ones = torch.ones(len(seed))
    return SamplingTensors(
        temperature=ones * TEMPERATURE,
        top_k=torch.full((len(seed),), top_k, dtype=torch.int32),
        top_p=ones,
        min_p=ones * 0,
        seed=seed,
        sample_index=torch.zeros(len(seed), dtype=torch.int32),
        position=position,
    )


def drawn_by(model: torch.Tensor) -> Drafter:
    """Drafts of a model, which samples with the noise of the positions that it drafts for, as it
    must where drafts are coupled.
    """

    def draft(last: torch.Tensor, length: torch.Tensor, seed: torch.Tensor) -> Drafts:
        tokens, probs = [], []
        for j in range(ROWS):
            last_logits = model[last]
            last = reference.sample(last_logits, params_of(length + j, seed, 0), VOCAB).token_ids
            tokens.append(last)
            probs.append((last_logits / TEMPERATURE).softmax(dim=1))
        return torch.stack(tokens, dim=1), torch.stack(probs, dim=1)

    return draft


def repeated(last: torch.Tensor, length: torch.Tensor, seed: torch.Tensor) -> Drafts:
    """Drafts that are certain of themselves, right or wrong: the last token again."""
    return last.unsqueeze(1).expand(-1, ROWS), None


def generate(
    target: torch.Tensor, top_k: int, drafter: Drafter, verify: Verify, seed: torch.Tensor
) -> tuple[torch.Tensor, float]:
    """LENGTH tokens after token 0 for each seed, and how often the first draft was kept."""
    runs = len(seed)
    tokens = torch.zeros(runs, LENGTH + ROWS, dtype=torch.int64)
    last, length = torch.zeros(runs, dtype=torch.int64), torch.zeros(runs, dtype=torch.int64)
    first_kept = -1.0
    while len(going := (length < LENGTH).nonzero().flatten()):
        now, at, key = last[going], length[going], seed[going]
        drafts, probs = drafter(now, at, key)
        contexts = torch.cat([now.unsqueeze(1), drafts[:, : ROWS - 1]], dim=1).flatten()
        found = verify(
            target[contexts],
            params_of(
                (at.unsqueeze(1) + torch.arange(ROWS)).flatten(),
                key.repeat_interleave(ROWS),
                top_k,
            ),
            DraftTensors(
                offsets=torch.arange(len(going) + 1, dtype=torch.int32) * ROWS,
                token_ids=drafts.flatten(),
                probs=None if probs is None else probs.flatten(0, 1),
            ),
            VOCAB,
        )
        if first_kept < 0:
            first_kept = float((found.num_accepted > 0).double().mean())
        for j in range(ROWS):
            emits = found.num_accepted >= j
            tokens[going[emits], at[emits] + j] = found.token_ids[emits, j]
        length[going] += found.num_accepted + 1
        last[going] = tokens[going, length[going] - 1]
    return tokens[:, :LENGTH], first_kept


@pytest.fixture(params=[0, 3], ids=["all", "top-k"])
def chain(request: pytest.FixtureRequest) -> tuple[torch.Tensor, int, torch.Tensor]:
    """A target's logits, its top-k, and the probabilities that they make: [last, next]."""
    target, top_k = torch.randn(VOCAB, VOCAB), int(request.param)
    x = target.double() / TEMPERATURE
    if top_k:
        x = x.masked_fill(x < x.topk(top_k, dim=1).values[:, -1:], -torch.inf)
    return target, top_k, x.softmax(dim=1)


@pytest.mark.parametrize("with_model", [True, False], ids=["drawn", "certain"])
def test_rejection_yields_the_target(
    chain: tuple[torch.Tensor, int, torch.Tensor], with_model: bool
) -> None:
    """With the probabilities that drafts were drawn from, and without any (fault B024)."""
    target, top_k, probs = chain
    draft_model = target + torch.randn(VOCAB, VOCAB)
    drafter = drawn_by(draft_model) if with_model else repeated
    seed = torch.randint(-(2**63), 2**63 - 1, (RUNS,))
    tokens, kept = generate(target, top_k, drafter, reference.verify_rejection, seed)
    codes = (tokens * VOCAB ** torch.arange(LENGTH - 1, -1, -1)).sum(dim=1)
    counts = torch.bincount(codes, minlength=VOCAB**LENGTH).double()
    first = probs[0]
    joint = first[:, None, None] * probs[:, :, None] * probs[None, :, :]
    assert p_value(counts, joint.flatten()) > FALSE_ALARM
    # And drafts are kept as often as they can be.
    q = (draft_model[0].double() / TEMPERATURE).softmax(dim=0)
    rate = float(torch.minimum(first, q).sum() if with_model else first[0])
    accepted = torch.tensor([kept, 1 - kept], dtype=torch.float64) * RUNS
    assert p_value(accepted, torch.tensor([rate, 1 - rate], dtype=torch.float64)) > FALSE_ALARM


def test_coupled_yields_the_run_without_drafts(
    chain: tuple[torch.Tensor, int, torch.Tensor],
) -> None:
    target, top_k, _ = chain
    seed = torch.randint(-(2**63), 2**63 - 1, (500,))
    last, alone = torch.zeros(500, dtype=torch.int64), []
    for position in range(LENGTH):
        params = params_of(torch.full((500,), position), seed, top_k)
        last = reference.sample(target[last], params, VOCAB).token_ids
        alone.append(last)
    drafters = (drawn_by(target), drawn_by(target + torch.randn(VOCAB, VOCAB)), repeated)
    for drafter in drafters:
        tokens, kept = generate(target, top_k, drafter, reference.verify_coupled, seed)
        assert torch.equal(tokens, torch.stack(alone, dim=1))
        assert drafter is not drafters[0] or top_k or kept == 1.0
