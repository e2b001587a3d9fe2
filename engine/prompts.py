"""Which prompts compute how many tokens in the next step. Same for both roles.

A prompt longer than what is left of the step's budget takes the rest and goes on in the next step
(chunked prefill). Just before its first chunk it is matched with the cache once more: another one
may have computed its beginning while it waited. One whose next block is computed in this very step,
for another prompt, lets it go ahead and takes the block from the cache in the next step. So equal
prompts that arrive together are computed once.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.core.ids import BlockHash
from kvferry.engine.prompt_order import PATIENCE_STEPS, Wait, overtaken, prompt_order
from kvferry.engine.sequences import Sequences, WorkerSequence


class PromptPlanner:
    """Shares out the prefill budget of one worker's steps."""

    def __init__(self, sequences: Sequences, max_tokens: int) -> None:
        """``max_tokens`` per step at most."""
        self._sequences = sequences
        self.patience = PATIENCE_STEPS * max_tokens

    def remaining(self, seq: WorkerSequence) -> int:
        """Tokens still to compute."""
        table = self._sequences.table
        return int(table.length[seq.row] - table.computed[seq.row])

    def wait(self, seq: WorkerSequence) -> Wait:
        time_left_s = seq.deadline_s - self._sequences.clock()
        return Wait(self.remaining(seq), time_left_s, seq.overtaken)

    def plan(
        self, prompts: Sequence[WorkerSequence], max_tokens: int, max_seqs: int
    ) -> tuple[list[WorkerSequence], list[int]]:
        """Prompts for the next step and the tokens of each; ``prompts`` in order of arrival."""
        if not prompts or max_tokens < 1 or max_seqs < 1:
            return [], []
        chosen: dict[int, int] = {}
        coming: set[BlockHash] = set()
        left = max_tokens
        for i in prompt_order([self.wait(seq) for seq in prompts], self.patience):
            if self._waits_for(prompts[i], coming):
                continue
            chosen[i] = min(self.remaining(prompts[i]), left)
            left -= chosen[i]
            if left == 0 or len(chosen) == max_seqs:
                break
            coming.update(self._blocks_of(prompts[i], chosen[i]))
        if left == 0 or len(chosen) < len(prompts):
            self._count_overtaken(prompts, chosen)
        return [prompts[i] for i in chosen], list(chosen.values())

    def _waits_for(self, seq: WorkerSequence, coming: set[BlockHash]) -> bool:
        """Whether the next block of a prompt that has not begun is among the ``coming`` ones."""
        if not self._sequences.pool.prefix_cache or not self._sequences.is_untouched(seq):
            return False
        self._sequences.match_again(seq)
        # The last position is computed in any case, and so is the block that it is in.
        last = (seq.length - 1) // self._sequences.table.block_size
        return seq.published < last and seq.hashes[seq.published] in coming

    def _blocks_of(self, seq: WorkerSequence, count: int) -> list[BlockHash]:
        """Full blocks of a prompt that its next ``count`` tokens are part of."""
        size = self._sequences.table.block_size
        start = int(self._sequences.table.computed[seq.row])
        return seq.hashes[start // size : -(-(start + count) // size)]

    def _count_overtaken(self, prompts: Sequence[WorkerSequence], chosen: dict[int, int]) -> None:
        counts = [chosen.get(i, 0) for i in range(len(prompts))]
        for seq, by in zip(
            prompts, overtaken([self.remaining(seq) for seq in prompts], counts), strict=True
        ):
            seq.overtaken += by
