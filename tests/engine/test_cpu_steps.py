"""Whole steps in float32 on the CPU's own code: a request's logits are the same bits alone, among
others, and however its prompt is cut into chunks.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from kvferry.bench.engine_check import CONFIG, random_decoder
from kvferry.cache.paged import PagedKV
from kvferry.engine.cpu_attention import CompiledAttention
from kvferry.engine.plan import SamplingRows, StepPlan
from kvferry.engine.runner import ModelRunner, attention_for
from kvferry.kernels.cpu.library import cpu_ops
from kvferry.kernels.cpu.panels import packed
from kvferry.kernels.ops import Backend
from kvferry.models.decoder import Decoder, Layer, Linear
from kvferry.models.fused_layers import FusedLayer, fuse_layers
from kvferry.models.spec import parse_spec

pytestmark = pytest.mark.skipif(cpu_ops() is None, reason="the installation built no library")

BLOCKS = 12
SPEC = parse_spec(
    CONFIG
    | {"hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2, "vocab_size": 256}
    | {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32}
)


def decoder_on(backend: Backend, dtype: torch.dtype = torch.float32) -> Decoder:
    """The same weights each time; in panels for the CPU's own code."""
    source = random_decoder(SPEC, seed=3)
    decoder = Decoder(SPEC, backend)
    weights = {name: tensor.to(dtype) for name, tensor in source.state_dict().items()}
    decoder.load_state_dict(weights, assign=True)
    if backend is Backend.CPU:
        for module in decoder.modules():
            if isinstance(module, Linear):
                module.weight = nn.Parameter(packed(module.weight), requires_grad=False)
        fuse_layers(decoder)
    return decoder.requires_grad_(False)


class Sequences:
    """Some sequences in one cache, all of whose steps are sampled."""

    def __init__(self, decoder: Decoder, count: int, dtype: torch.dtype = torch.float32) -> None:
        kv = PagedKV.allocate(
            num_layers=SPEC.num_layers,
            num_kv_heads=SPEC.num_kv_heads,
            head_dim=SPEC.head_dim,
            block_size=16,
            num_blocks=count * BLOCKS,
            dtype=dtype,
        )
        self._runner = ModelRunner(decoder, kv, SPEC.vocab_size)
        tables = np.random.default_rng(count).permutation(count * BLOCKS)
        self._tables = tables.reshape(count, BLOCKS).astype(np.int32)
        self._lengths = np.zeros(count, np.int32)

    @torch.inference_mode()
    def step(self, new: dict[int, np.ndarray]) -> dict[int, torch.Tensor]:
        """Sequence -> logits after its new tokens."""
        seqs = np.array(list(new))
        plan = StepPlan(
            step=0,
            token_ids=np.concatenate(list(new.values())),
            query_lens=np.array([len(part) for part in new.values()], np.int32),
            context_lens=self._lengths[seqs],
            block_tables=self._tables[seqs],
            sampled=np.arange(len(seqs), dtype=np.int32),
            sampling=SamplingRows.greedy(len(seqs)),
        )
        self._lengths[seqs] += plan.query_lens
        return dict(zip(new, self._runner.logits(plan).clone(), strict=True))


def tokens(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(SPEC.vocab_size, size=count)


PROMPT = tokens(150, seed=1)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return decoder_on(Backend.CPU)


def alone(decoder: Decoder) -> list[torch.Tensor]:
    """Logits after 140 tokens of the prompt at once, and after each of those that follow."""
    one = Sequences(decoder, 1)
    return [one.step({0: part})[0] for part in (PROMPT[:140], *np.split(PROMPT[140:], 10))]


def test_fused_layers_change_no_bit(decoder: Decoder) -> None:
    """Against the same layers one operation at a time, whose parameters they are."""
    plain = Decoder(SPEC, Backend.CPU)
    assert dict(decoder.named_parameters()).keys() == dict(plain.named_parameters()).keys()
    for name, parameter in decoder.named_parameters():
        setattr(plain.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], parameter)
    assert all(isinstance(layer, Layer) for layer in plain.model.layers)
    assert all(isinstance(layer, FusedLayer) for layer in decoder.model.layers)
    assert all(map(torch.equal, alone(decoder), alone(plain)))


def test_the_cpus_own_code_attends(decoder: Decoder) -> None:
    kv = PagedKV.allocate(
        num_layers=2, num_kv_heads=2, head_dim=32, block_size=16, num_blocks=8, dtype=torch.float32
    )
    assert isinstance(attention_for(decoder, kv), CompiledAttention)
    plain = decoder_on(Backend.CPU, torch.float32).double()
    assert not isinstance(attention_for(plain, kv), CompiledAttention)


@pytest.mark.parametrize("chunks", [(1,) * 150, (16, 16, 118), (139, 11), (63, 1, 1, 75, 10)])
def test_chunks_change_no_bit(decoder: Decoder, chunks: tuple[int, ...]) -> None:
    one = Sequences(decoder, 1)
    wanted = dict(zip(range(140, 151), alone(decoder), strict=True))
    done = 0
    for count in chunks:
        logits = one.step({0: PROMPT[done : done + count]})[0]
        done += count
        if done in wanted:
            assert torch.equal(logits, wanted[done]), done
    assert done == 150


def test_neighbours_change_no_bit(decoder: Decoder) -> None:
    """One request among up to 22: prompts while it decodes, decodes while it is a prompt."""
    many = Sequences(decoder, 32)
    many.step({seq: tokens(10 + seq, seed=seq) for seq in range(1, 12)})
    got = []
    for number, part in enumerate((PROMPT[:140], *np.split(PROMPT[140:], 10))):
        new = {seq: tokens(1, seed=seq) for seq in range(1, 12 + number)}
        new |= {0: part, 12 + number: tokens(1 + 13 * number, seed=number)}
        got.append(many.step(new)[0])
    assert all(map(torch.equal, got, alone(decoder)))


def test_threads_change_no_bit(decoder: Decoder) -> None:
    before = torch.get_num_threads()
    runs = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        runs.append(alone(decoder))
    torch.set_num_threads(before)
    assert all(map(torch.equal, runs[0], runs[1]))
    assert all(map(torch.equal, runs[0], runs[2]))


@pytest.mark.parametrize(
    ("dtype", "bound"),
    [
        (torch.float32, 1e-5),
        (torch.bfloat16, 3e-2),
        (torch.float16, 4e-3),
        (torch.int8, 4e-2),
        (torch.float8_e4m3fn, 1e-1),
    ],
)
def test_logits_are_those_of_float64(decoder: Decoder, dtype: torch.dtype, bound: float) -> None:
    """Relative to the largest; types of the cache below float32 round its elements."""
    exact = Sequences(decoder_on(Backend.TORCH, torch.float64), 1, torch.float64)
    ours = Sequences(decoder, 1, dtype)
    for part in (PROMPT[:100], PROMPT[100:101], PROMPT[101:]):
        wanted, got = exact.step({0: part})[0], ours.step({0: part})[0]
        assert (got - wanted).abs().max() <= bound * wanted.abs().max()


STEPS_WITH_TORCHS_THREADS_ASLEEP = """
import sys, time
from pathlib import Path
import numpy as np, torch
from kvferry.engine.plan import SamplingRows
from kvferry.engine.sampler import sample
from kvferry.kernels.ops import Backend
from test_cpu_steps import Sequences, decoder_on, tokens

def threads():
    return {task.name for task in Path("/proc/self/task").iterdir()}

def processor_ns(ids):
    tasks = Path("/proc/self/task")
    return sum(int((tasks / name / "schedstat").read_text().split()[0]) for name in ids)

torch.set_num_threads(2)
before = threads()
torch.ones(1 << 22).sum()
torchs = threads() - before
assert torchs, "torch has no threads here"
some = Sequences(decoder_on(Backend.CPU), 8)
some.step({seq: tokens(20, seed=seq) for seq in range(8)})
time.sleep(0.5)
used = processor_ns(torchs)
for number in range(100):
    some.step({seq: tokens(1, seed=number) for seq in range(8)})
    sample(torch.randn(8, 1000), SamplingRows.greedy(8), 1000)
used = processor_ns(torchs) - used
assert used == 0, f"{used} ns"
"""


def test_decode_steps_wake_none_of_torchs_threads() -> None:
    """They would spin for a while, on the processors that the library's threads want."""
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]
    subprocess.run(
        [sys.executable, "-c", STEPS_WITH_TORCHS_THREADS_ASLEEP],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        check=True,
        timeout=300,
    )
