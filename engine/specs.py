"""What a worker refuses to begin: sequences that no correct router sends.

Checked before anything is reserved, so that a bad message costs one answer and never a step: a
value outside the tables, or outside the vocabulary, would fail its neighbours in the batch or the
whole worker.
"""

from __future__ import annotations

import math
import sys

import numpy as np

from kvferry.core.sampling import MAX_CHOICES
from kvferry.proto import worker_pb2 as pb

INT32_END = 2**31
"""Ids and counts are int32 in the tables."""
_COUNTS = ("top_k", "sample_index", "logprobs")
_LARGEST = sys.float_info.max
_RANGES = (
    ("temperature", 0.0, _LARGEST),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -_LARGEST, _LARGEST),
    ("frequency_penalty", -_LARGEST, _LARGEST),
    ("repetition_penalty", 0.0, _LARGEST),
)
"""Least and largest value of each: finite ones."""


def spec_fault(key: pb.Key, spec: pb.SequenceSpec, vocab_size: int) -> str | None:
    """What is wrong with a sequence, field first, or None."""
    sampling, length = spec.sampling, len(spec.token_ids)
    if key.attempt >= INT32_END:
        return f"attempt: {key.attempt} is too large"
    if not 1 <= spec.prompt_len <= length:
        return f"prompt_len: {spec.prompt_len} is not within the {length} tokens"
    if length >= spec.prompt_len + sampling.max_tokens:
        return f"max_tokens: {sampling.max_tokens} leaves nothing to generate"
    if spec.num_samples > 1 and length != spec.prompt_len:
        return "num_samples: only a prompt has several first tokens"
    if spec.num_samples > MAX_CHOICES:
        return f"num_samples: {spec.num_samples} is more than {MAX_CHOICES}"
    if math.isnan(spec.deadline_s):
        return "deadline_s: is not a number"
    if not math.isfinite(spec.age_s):
        return "age_s: is not finite"
    return _ids_fault(spec, vocab_size) or _sampling_fault(sampling)


def _ids_fault(spec: pb.SequenceSpec, vocab_size: int) -> str | None:
    # Sampling ignores ids that the model lacks; its embedding cannot.
    if spec.token_ids and np.asarray(spec.token_ids).max() >= vocab_size:
        return f"token_ids: a token id is not below {vocab_size}"
    stop_ids, biased_ids = spec.sampling.stop_token_ids, spec.sampling.logit_bias
    if stop_ids and max(stop_ids) >= INT32_END:
        return f"stop_token_ids: a token id is not below {INT32_END}"
    if biased_ids and max(biased_ids) >= INT32_END:
        return f"logit_bias: a token id is not below {INT32_END}"
    return None


def _sampling_fault(sampling: pb.Sampling) -> str | None:
    for name in _COUNTS:
        if getattr(sampling, name) >= INT32_END:
            return f"{name}: {getattr(sampling, name)} is too large"
    for name, low, high in _RANGES:
        if not low <= getattr(sampling, name) <= high:  # nor is NaN
            return f"{name}: {getattr(sampling, name)} is out of range"
    if not sampling.repetition_penalty > 0:
        return "repetition_penalty: must be above 0"
    if not all(map(math.isfinite, sampling.logit_bias.values())):
        return "logit_bias: a bias is not finite"
    return None
