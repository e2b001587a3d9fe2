"""A request on its way: its prompt, what was emitted, and what is left to do.

A new attempt starts from prompt + emitted tokens and keeps the boundary between them, so that
positions, noise, penalties, min_tokens and max_tokens go on as if nothing had happened.
"""

from __future__ import annotations

import time

from kvferry.cache.hashing import chain_hashes
from kvferry.core.ids import BlockHash, RequestId
from kvferry.core.request import GenerateRequest, TokenStep
from kvferry.proto import worker_pb2 as pb
from kvferry.router.siblings import Siblings


class Progress:
    """One choice of one request."""

    def __init__(
        self,
        request: GenerateRequest,
        sample_index: int,
        number: RequestId,
        siblings: Siblings | None = None,
    ) -> None:
        """``siblings``: of a prompt with several choices."""
        self.number = number
        self.sample_index = sample_index
        self.siblings = siblings
        self.attempt = 0
        self.given_back = 0
        """Attempts that ended because a worker ran out of blocks."""
        self.tokens = list(request.prompt_token_ids)
        self._request = request
        assert request.sampling.max_tokens is not None, "intake fills in max_tokens"
        self._max_tokens = request.sampling.max_tokens
        self._prompt_len = len(self.tokens)
        self._taken_in = time.monotonic()
        self._deadline = self._taken_in + (request.deadline_s or float("inf"))
        self._chains: dict[tuple[BlockHash, int], list[BlockHash]] = {}

    @property
    def last_token_next(self) -> bool:
        """Whether the next token is the last one that may follow."""
        return self._prompt_len + self._max_tokens - len(self.tokens) <= 1

    @property
    def num_samples(self) -> int:
        """First tokens to ask for with the prompt, of as many sample indexes."""
        siblings = self.siblings
        if siblings is None or self.sample_index or siblings.is_settled:
            return 1
        return siblings.num_choices if len(self.tokens) == self._prompt_len else 1

    def add(self, step: TokenStep) -> None:
        self.tokens.extend(step.token_ids)
        self._chains.clear()

    def chain(self, root: BlockHash, block_size: int) -> list[BlockHash]:
        """Hashes of the full blocks known so far; computed once per root, block size and
        attempt.
        """
        if (root, block_size) not in self._chains:
            self._chains[root, block_size] = chain_hashes(root, self.tokens, block_size)
        return self._chains[root, block_size]

    def key(self) -> pb.Key:
        return pb.Key(request=self.number, attempt=self.attempt)

    def spec(self) -> pb.SequenceSpec:
        """What a worker has to know."""
        sampling = self._request.sampling
        now = time.monotonic()
        return pb.SequenceSpec(
            token_ids=self.tokens,
            prompt_len=self._prompt_len,
            deadline_s=self._deadline - now,
            age_s=now - self._taken_in,
            given_back=self.given_back,
            num_samples=self.num_samples,
            sampling=pb.Sampling(
                max_tokens=self._max_tokens,
                min_tokens=sampling.min_tokens,
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                min_p=sampling.min_p,
                seed=(sampling.seed or 0) % 2**64,
                presence_penalty=sampling.presence_penalty,
                frequency_penalty=sampling.frequency_penalty,
                repetition_penalty=sampling.repetition_penalty,
                stop_token_ids=sampling.stop_token_ids,
                ignore_eos=sampling.ignore_eos,
                logit_bias=sampling.logit_bias,
                logprobs=sampling.logprobs,
                sample_index=self.sample_index,
            ),
        )
