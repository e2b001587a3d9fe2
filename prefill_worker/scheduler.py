"""How much is computed before a prompt that comes in now. Pure: numbers in, numbers out.

The order of prompts within the steps is that of ``engine.prompt_order``, for both roles.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvferry.engine.prompt_order import Wait, is_before


def tokens_before(newcomer: Wait, waits: Iterable[Wait], patience: int) -> int:
    """Tokens still to compute of those prompts that go before ``newcomer``."""
    return sum(wait.remaining for wait in waits if is_before(wait, newcomer, patience))
