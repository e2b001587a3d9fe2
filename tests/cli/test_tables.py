from __future__ import annotations

import json
from collections.abc import AsyncIterator

from rich.console import Console
from rich.table import Table

from kvferry.cli.answer import read_answer
from kvferry.cli.console import Stages
from kvferry.cli.links import link_table
from kvferry.cli.status import status_json, status_table
from kvferry.cli.timeline import timeline_table
from kvferry.core.request import FinishReason, TextDelta, Timeline
from kvferry.proto import kvferry_pb2 as pb

TIMELINE = Timeline(
    queue_s=0.001,
    reserve_s=0.002,
    prefill_wait_s=0.003,
    prefill_s=0.020,
    transfer_transport="shm",
    transfer_bytes=23_600_000,
    transfer_scatter_s=0.01,
    transfer_packed_bytes=24_000_000,
    transfer_pack_s=0.005,
    transfer_credit_s=0.0021,
    transfer_resends=1,
    transfer_wall_s=0.012,
    transfer_exposed_s=0.0004,
    ttft_s=0.0271,
    decode_s=0.9,
    prompt_tokens=40,
    cached_tokens_prefill=32,
    output_tokens=10,
    attempts=2,
    prefill_worker="prefill-0",
    decode_worker="decode-0",
)


def text_of(table: Table, width: int = 200) -> str:
    console = Console(width=width)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def test_the_timeline_names_every_station() -> None:
    text = text_of(timeline_table(TIMELINE))
    for part in (
        "router 1.0, reservation 2.0, prefill worker 3.0, 2 attempts",
        "8 tokens computed, 32 from the prefix cache, on prefill-0",
        "23.6 MB over shm, packed at 4.80 GB/s, scattered at 2.36 GB/s, waited 2.1 ms for memory, "
        "1 slabs resent, exposed 0.4 ms",
        "10 tokens, TTFT 27.1 ms, TPOT 100.0 ms, on decode-0",
    ):
        assert part in text


def test_a_local_prefill_has_no_transfer() -> None:
    assert "none" in text_of(timeline_table(Timeline(output_tokens=1)))


def status() -> pb.StatusResponse:
    return pb.StatusResponse(
        model="tiny",
        ready=True,
        workers=[
            pb.WorkerStatus(
                worker_id="decode-0",
                role="decode",
                state="ready",
                blocks=pb.BlockCounts(free=1234, in_use=7),
                block_size=16,
            ),
            pb.WorkerStatus(worker_id="prefill-0", role="prefill", state="catching_up"),
        ],
    )


def link(decode: str, transport: str, **fields: float | str | bool) -> pb.LinkStatus:
    return pb.LinkStatus(
        prefill_worker="prefill-0", decode_worker=decode, transport=transport, **fields
    )


def test_links_have_a_row_per_pair_and_transport() -> None:
    links = [
        link("decode-0", "shm", rate=3.5e9, peak=7e9, chosen=True),
        link("decode-0", "tcp", rate=1.25e9, peak=0.0),
        link("decode-1", "shm", reason="another host"),
        link("decode-1", "tcp", rate=1e9, peak=4e9, chosen=True),
    ]
    rows = [line for line in text_of(link_table(links)).splitlines() if "│" in line]
    cells = [[cell.strip() for cell in row.split("│")[1:-1]] for row in rows]
    assert cells == [
        ["prefill-0 ─▶ decode-0", "shm", "3.50", "50%", "chosen"],
        ["", "tcp", "1.25", "–", ""],
        ["prefill-0 ─▶ decode-1", "shm", "–", "–", "another host"],
        ["", "tcp", "1.00", "25%", "chosen"],
    ]


def test_status_lists_prefill_before_decode_with_blocks_by_state() -> None:
    text = text_of(status_table(status()))
    assert text.index("prefill-0") < text.index("decode-0")
    assert "1,234" in text
    assert "1,234 free, 7 in use, of 16 tokens" in text


def test_names_of_workers_are_whole_on_a_narrow_terminal() -> None:
    assert "prefill-0" in text_of(status_table(status()), width=60)


def test_status_json_keeps_zeros() -> None:
    values = json.loads(json.dumps(status_json(status())))
    assert values["queued"] == 0
    assert values["workers"][0]["blocks"]["fenced"] == 0


async def deltas() -> AsyncIterator[TextDelta]:
    yield TextDelta(index=0, text=" Par", token_ids=(1, 2))
    yield TextDelta(index=1, text="another choice", token_ids=(9,))
    yield TextDelta(index=0, text="is", token_ids=(3,))
    yield TextDelta(index=0, finish_reason=FinishReason.STOP, timeline=TIMELINE)


async def test_an_answer_is_shown_as_it_comes_and_kept_whole() -> None:
    shown: list[str] = []
    answer = await read_answer(deltas(), shown.append)
    assert shown == [" Par", "is"]
    assert (answer.text, answer.token_ids, answer.finish_reason) == (" Paris", [1, 2, 3], "stop")
    values = json.loads(json.dumps(answer.to_json()))
    assert values["timeline"]["prefill_worker"] == "prefill-0"


def test_stages_print_one_line_each_when_they_end() -> None:
    console = Console(width=80, force_terminal=False)
    with console.capture() as captured, Stages(console) as stages:
        stages("loading the model")
        stages("starting prefill-0")
        stages.finish()
        stages("draining")
    lines = captured.get().splitlines()
    assert [line.split(" (")[0] for line in lines] == [
        "✓ loading the model",
        "✓ starting prefill-0",
        "✓ draining",
    ]


def test_the_stage_that_failed_is_marked() -> None:
    console = Console(width=80, force_terminal=False)
    with console.capture() as captured:
        try:
            with Stages(console) as stages:
                stages("starting prefill-0")
                raise OSError
        except OSError:
            pass
    assert captured.get().startswith("✗ starting prefill-0")
