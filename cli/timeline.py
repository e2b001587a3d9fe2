"""Where one request's time went, as a table."""

from __future__ import annotations

from rich.table import Table

from kvferry.core.request import Timeline
from kvferry.core.units import format_bytes


def timeline_table(timeline: Timeline) -> Table:
    """One row per station of the request, in the order in which it passes them."""
    table = Table(title="where the time went", title_justify="left")
    table.add_column("station")
    table.add_column("ms", justify="right")
    table.add_column("what")
    for station, seconds, what in _rows(timeline):
        table.add_row(station, f"{seconds * 1e3:,.1f}", what)
    return table


def _rows(timeline: Timeline) -> list[tuple[str, float, str]]:
    computed = timeline.prompt_tokens - timeline.cached_tokens_prefill
    prefill = f"{computed} tokens computed, {timeline.cached_tokens_prefill} from the prefix cache"
    if timeline.prefill_worker:
        prefill += f", on {timeline.prefill_worker}"
    decode = (
        f"{timeline.output_tokens} tokens, TTFT {timeline.ttft_s * 1e3:,.1f} ms, "
        f"TPOT {timeline.tpot_s * 1e3:,.1f} ms"
    )
    if timeline.decode_worker:
        decode += f", on {timeline.decode_worker}"
    queued = timeline.queue_s + timeline.reserve_s + timeline.prefill_wait_s
    waits = (
        f"router {timeline.queue_s * 1e3:,.1f}, reservation {timeline.reserve_s * 1e3:,.1f}, "
        f"prefill worker {timeline.prefill_wait_s * 1e3:,.1f}"
    )
    if timeline.attempts > 1:
        waits += f", {timeline.attempts} attempts"
    return [
        ("queue", queued, waits),
        ("prefill", timeline.prefill_s, prefill),
        ("KV transfer", timeline.transfer_wall_s, _transfer(timeline)),
        ("decode", timeline.decode_s, decode),
    ]


def _transfer(timeline: Timeline) -> str:
    if not timeline.transfer_bytes:
        # Either nothing had to move, or the decode worker held all of it.
        return "none"
    parts = [f"{format_bytes(timeline.transfer_bytes)} over {timeline.transfer_transport}"]
    if timeline.transfer_packed_bytes:
        parts.append(f"packed at {timeline.pack_gb_per_s:.2f} GB/s")
    parts.append(f"scattered at {timeline.scatter_gb_per_s:.2f} GB/s")
    if timeline.transfer_credit_s >= 0.5e-3:
        parts.append(f"waited {timeline.transfer_credit_s * 1e3:,.1f} ms for memory")
    if timeline.transfer_resends:
        parts.append(f"{timeline.transfer_resends} slabs resent")
    parts.append(f"exposed {timeline.transfer_exposed_s * 1e3:,.1f} ms")
    return ", ".join(parts)
