"""What peers print, and programs that stand for them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.bench import vllm_peer
from kvferry.bench.peers import f32_gguf, llama_rates, parse_llama, parse_vllm, vllm_rates
from kvferry.bench.throughput import Sizes
from kvferry.core.errors import StartupError

SIZES = Sizes(prefill_len=512, prompt_len=256, num_tokens=64, batches=(1, 8), repeats=2)

# The format of llama-batched-bench --output-format jsonl: one object per line among log lines.
LLAMA = """\
llama_model_loader: loaded meta data with 34 key-value pairs
{"n_kv_max": 2560, "n_batch": 2048, "n_ubatch": 512, "flash_attn": -1, "is_pp_shared": 0, \
"n_gpu_layers": -1, "n_threads": 2, "n_threads_batch": 2, "pp": 256, "tg": 63, "pl": 1, \
"n_kv": 319, "t_pp": 0.800000, "speed_pp": 320.000000, "t_tg": 2.100000, "speed_tg": 30.000000, \
"t": 2.900000, "speed": 110.000000}
{"n_kv_max": 2560, "n_batch": 2048, "n_ubatch": 512, "flash_attn": -1, "is_pp_shared": 0, \
"n_gpu_layers": -1, "n_threads": 2, "n_threads_batch": 2, "pp": 256, "tg": 63, "pl": 8, \
"n_kv": 2552, "t_pp": 6.400000, "speed_pp": 320.000000, "t_tg": 5.600000, "speed_tg": 90.000000, \
"t": 12.000000, "speed": 212.700000}
{not json

llama_perf_context_print:        load time =     100.00 ms
"""


def program(path: Path, body: str) -> str:
    """A Python script that a shell could run."""
    path.write_text(f"#!{sys.executable}\n{body}")
    path.chmod(0o755)
    return str(path)


def test_llama_measurements_are_found_among_log_lines() -> None:
    found = parse_llama(LLAMA)
    assert [(run["pl"], run["speed_pp"], run["speed_tg"]) for run in found] == [
        (1, 320.0, 30.0),
        (8, 320.0, 90.0),
    ]


def test_llama_without_measurements_is_an_error() -> None:
    with pytest.raises(StartupError, match="no measurement"):
        parse_llama("error: unable to load model\n")


def test_llama_is_asked_for_the_same_sizes(tmp_path: Path) -> None:
    log = tmp_path / "log"
    body = f"import sys\nopen({str(log)!r}, 'a').write(' '.join(sys.argv[1:]) + chr(10))\n"
    binary = program(tmp_path / "llama-batched-bench", f"{body}print({LLAMA!r})\n")
    rates = llama_rates(binary, Path("model.gguf"), SIZES, threads=2)
    assert rates.decode == {1: [30.0, 30.0], 8: [90.0, 90.0]}
    asked = log.read_text().splitlines()
    assert len(asked) == 2 * SIZES.repeats
    assert all("-m model.gguf -c 2560 -ub 512 -t 2 -tb 2" in line for line in asked)
    assert "-npp 512 -ntg 1 -npl 1" in asked[0]
    assert "-npp 256 -ntg 63 -npl 1,8" in asked[1]


def test_the_float32_gguf_is_made_by_the_neighbour(tmp_path: Path) -> None:
    program(
        tmp_path / "llama-quantize",
        "import shutil, sys\nassert sys.argv[1] == '--allow-requantize' and sys.argv[4] == 'F32'\n"
        "shutil.copy(sys.argv[2], sys.argv[3])\n",
    )
    source = tmp_path / "model.gguf"
    source.write_text("weights")
    (tmp_path / "out").mkdir()
    made = f32_gguf(str(tmp_path / "llama-batched-bench"), source, tmp_path / "out")
    assert made.parent == tmp_path / "out"
    assert made.read_text() == "weights"


def test_vllm_result_is_the_marked_line() -> None:
    result = {"name": "vLLM 1", "prefill": [400.0], "decode": {"1": [12.0], "32": [130.0]}}
    rates = parse_vllm(f"INFO warming up\nRESULT {json.dumps(result)}\nINFO bye\n")
    assert (rates.name, rates.prefill) == ("vLLM 1", [400.0])
    assert rates.decode == {1: [12.0], 32: [130.0]}
    with pytest.raises(StartupError, match="no result"):
        parse_vllm("INFO warming up\n")


def test_vllm_gets_its_sizes_on_stdin(tmp_path: Path) -> None:
    """An interpreter that echoes what our script would read."""
    python = program(
        tmp_path / "python",
        "import json, sys\nwanted = json.load(sys.stdin)\n"
        "print('RESULT ' + json.dumps({'name': sys.argv[-1], 'prefill': [wanted['prefill_len']],"
        " 'decode': {b: [wanted['vocab_size']] for b in wanted['batches']}}))\n",
    )
    rates = vllm_rates(python, tmp_path, 96, SIZES, threads=2)
    assert rates.name.endswith("vllm_peer.py")
    assert rates.prefill == [512]
    assert rates.decode == {1: [96], 8: [96]}


class FakeVllm:
    """Counts what it is asked to generate."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, int]] = []

    def generate(self, prompts: list[Any], sampling: Any, use_tqdm: bool) -> None:
        (length,) = {len(prompt["prompt_token_ids"]) for prompt in prompts}
        self.asked.append((len(prompts), length, sampling.max_tokens))


def test_the_vllm_script_measures_by_the_same_definitions() -> None:
    engine = FakeVllm()
    module = SimpleNamespace(__version__="0", SamplingParams=lambda **kw: SimpleNamespace(**kw))
    wanted = {"prefill_len": 12, "prompt_len": 8, "num_tokens": 4, "batches": [2], "repeats": 2}
    found = vllm_peer.measure(module, engine, wanted | {"vocab_size": 50})
    assert found["name"] == "vLLM 0"
    assert (len(found["prefill"]), len(found["decode"][2])) == (2, 2)
    assert engine.asked[2:] == [(2, 8, 4), (2, 8, 1)] * 2 + [(1, 12, 1)] * 2


@pytest.mark.parametrize("binary", ["/nonexistent", "failing"])
def test_a_peer_that_fails_is_named_with_its_last_words(tmp_path: Path, binary: str) -> None:
    if binary == "failing":
        binary = program(tmp_path / "failing", "raise SystemExit('no such model')\n")
    with pytest.raises(StartupError, match=r"could not be run|no such model"):
        llama_rates(binary, Path("model.gguf"), SIZES, threads=1)
