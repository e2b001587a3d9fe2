"""Layers fused from outside: the same numbers, and left alone where they are not the plain ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from kvferry.bench.engine_check import CONFIG, random_decoder
from kvferry.kernels.cpu.library import cpu_ops
from kvferry.kernels.cpu.panels import packed
from kvferry.kernels.ops import Backend
from kvferry.models.decoder import Decoder, Heads, Linear
from kvferry.models.fused_layers import FusedLayer, fuse_layers
from kvferry.models.spec import parse_spec

pytestmark = pytest.mark.skipif(cpu_ops() is None, reason="the installation built no library")

SMALL = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "vocab_size": 64}
SMALL |= {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16}
BIASED = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "attention_bias": True}
BIASED |= {"mlp_bias": True}


def decoder_of(config: dict[str, object], *, adjacent: bool) -> Decoder:
    """On the CPU's column, in panels; ``adjacent``: one after the other, as in a packed file."""
    spec = parse_spec(CONFIG | SMALL | config)
    decoder = Decoder(spec, Backend.CPU)
    decoder.load_state_dict(random_decoder(spec, seed=1).state_dict(), assign=True)
    linears = [module for module in decoder.modules() if isinstance(module, Linear)]
    panels = [packed(linear.weight) for linear in linears]
    if adjacent:
        sizes = [part.numel() for part in panels]
        parts = torch.cat([part.flatten() for part in panels]).split(sizes)
        panels = [part.view(old.shape) for part, old in zip(parts, panels, strict=True)]
    for linear, part in zip(linears, panels, strict=True):
        linear.weight = nn.Parameter(part, requires_grad=False)
    return decoder.requires_grad_(False)


def hidden(decoder: Decoder, count: int) -> Tensor:
    """With something of the right shape for attention."""

    def attend(layer: int, heads: Heads) -> Tensor:
        q, k = heads.rotated()
        out = q + (k + heads.v).repeat_interleave(3, dim=1) * (layer + 1)
        return out.transpose(0, 1).contiguous().transpose(0, 1)

    token_ids = torch.arange(count) % 64
    with torch.inference_mode():
        return decoder(token_ids, torch.arange(count), attend).clone()


@pytest.mark.parametrize("adjacent", [True, False])
@pytest.mark.parametrize("config", [{}, BIASED], ids=["qk-norm", "biased"])
def test_the_same_bits_at_any_number_of_rows(config: dict[str, object], adjacent: bool) -> None:
    decoder = decoder_of(config, adjacent=adjacent)
    counts = (5, 1, 64, 65, 300, 7)
    wanted = [hidden(decoder, count) for count in counts]
    fuse_layers(decoder)
    assert all(isinstance(layer, FusedLayer) for layer in decoder.model.layers)
    assert all(torch.equal(hidden(decoder, n), w) for n, w in zip(counts, wanted, strict=True))


def test_layers_that_are_not_plain_stay_as_they_are() -> None:
    replaced = decoder_of({}, adjacent=True)
    replaced.model.layers[1].mlp.down_proj = nn.Identity()
    unpacked = decoder_of({}, adjacent=True)
    unpacked.model.layers[2].self_attn.k_proj.weight = nn.Parameter(torch.randn(32, 48))
    for decoder in (replaced, unpacked):
        fuse_layers(decoder)
        assert not any(isinstance(layer, FusedLayer) for layer in decoder.model.layers)
