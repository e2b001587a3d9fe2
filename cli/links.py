"""The ways of KV between prefill and decode workers, as a table."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table

from kvferry.proto.kvferry_pb2 import LinkStatus


def link_table(links: Iterable[LinkStatus]) -> Table:
    """One row per pair of workers and transport; the chosen one is marked."""
    table = Table(title="KV links", title_justify="left")
    table.add_column("from, to")
    table.add_column("transport")
    table.add_column("GB/s", justify="right")
    table.add_column("of the medium's peak", justify="right")
    table.add_column("")
    pair = ""
    for link in links:
        before, pair = pair, f"{link.prefill_worker} ─▶ {link.decode_worker}"
        if before and before != pair:
            table.add_section()
        name = pair if pair != before else ""
        rate = f"{link.rate / 1e9:.2f}" if link.rate else "–"
        share = f"{100 * link.rate / link.peak:.0f}%" if link.rate and link.peak else "–"
        table.add_row(name, link.transport, rate, share, "chosen" if link.chosen else link.reason)
    return table
