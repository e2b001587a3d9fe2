"""Tokens that a device is still drawing."""

from __future__ import annotations

import torch

from kvferry.engine.host_copy import HostCopy, to_host
from kvferry.engine.kernel_sampler import Drawn
from kvferry.engine.plan import RowLogprobs, StepResult


class Event:
    """Passes when somebody waits for it; only then is there anything to read."""

    def __init__(self, arrive: object) -> None:
        self.passed = False
        self._arrive = arrive

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self._arrive()
        self.passed = True


def test_nothing_is_read_before_the_copy_is_done() -> None:
    late = [torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.bool)]
    late += [torch.zeros(2), torch.zeros(2, 2, dtype=torch.int32), torch.zeros(2, 2)]

    def arrive() -> None:
        late[0].copy_(torch.tensor([7, 0, 9]))
        late[1].copy_(torch.tensor([False, True, False]))
        late[2].copy_(torch.tensor([-0.5, -9.0]))
        late[3].copy_(torch.tensor([[9, 4], [1, 1]]))
        late[4].copy_(torch.tensor([[-0.5, -1.5], [-9.0, -9.0]]))

    # Rows 2 and 1 want log-probabilities; row 1 has none to give.
    drawn = Drawn(HostCopy(tuple(late), Event(arrive)), {2: 1, 1: 2})
    assert not drawn.done()
    result = drawn.wait()
    assert drawn.done()
    assert result.token_ids.tolist() == [7, 0, 9]
    assert result.invalid == (1,)
    assert result.logprobs == {2: RowLogprobs(token_id=9, logprob=-0.5, top=((9, -0.5),))}


def test_on_the_cpu_there_is_nothing_to_copy() -> None:
    tokens, invalid = torch.tensor([3, 4]), torch.tensor([False, False])
    copy = to_host([tokens, invalid])
    assert copy.done()
    assert copy.wait()[0] is tokens
    result = Drawn(copy, {}).wait()
    assert isinstance(result, StepResult)
    assert (result.token_ids.tolist(), result.invalid, result.logprobs) == ([3, 4], (), {})
