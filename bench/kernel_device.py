"""Check and time cases on a device, beside the limits of that very device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from kvferry.bench.kernel_cases.case import Case, Limit, Work
from kvferry.bench.kernel_timing import Timer, Timing, contender, copies_beyond_l2, measure
from kvferry.kernels.chips import Chip

OURS = "kvferry"
PIECE = 1 << 24
"""Elements that are compared at a time: in float64 they take eight times their space."""
MEASURE_S = 0.15
"""Device time of the counted rounds of a case with its peers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Where cases run. The clock is of the host, in seconds."""

    device: torch.device
    chip: Chip
    timer: Timer
    clock: Callable[[], float]
    copy_bytes: int = 2 << 30
    """Read plus written by the copy that is the limit of bandwidth."""
    product_size: int = 8192
    """Of the square matrix product that is the limit of compute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLimits:
    """What shares are measured against."""

    copy_bytes_per_s: float
    """Read plus written."""
    matmul_flops_per_s: float


@dataclass(slots=True, kw_only=True, eq=False)
class Result:
    """What became of a case."""

    case: Case
    error: float | None = None
    """Relative; None when it was not checked."""
    timings: dict[str, Timing] = field(default_factory=dict)
    """OURS and the peers that ran."""
    copies: int = 0
    notes: list[str] = field(default_factory=list)
    """What could not be done, and why."""

    @property
    def is_wrong(self) -> bool:
        """Checked, and not within the tolerance; a NaN is wrong."""
        return self.error is not None and not self.error <= self.case.tolerance

    def share(self, limits: DeviceLimits) -> float | None:
        """Achieved rate over the case's limit; None when it was not timed."""
        if OURS not in self.timings:
            return None
        seconds = self.timings[OURS].seconds
        if self.case.limit is Limit.COPY:
            return self.case.nbytes / seconds / limits.copy_bytes_per_s
        return self.case.flops / seconds / limits.matmul_flops_per_s

    @property
    def peer_speedup(self) -> float | None:
        """Time of the fastest peer over ours."""
        peers = [timing.seconds for name, timing in self.timings.items() if name != OURS]
        if OURS not in self.timings or not peers:
            return None
        return min(peers) / self.timings[OURS].seconds


def measure_device_limits(bench: Bench) -> DeviceLimits:
    """A large copy and a large bf16 product of the vendor's library."""
    source = torch.zeros(bench.copy_bytes // 2, dtype=torch.uint8, device=bench.device)
    target = torch.zeros_like(source)
    size = bench.product_size
    left, right = (
        torch.randn(size, size, device=bench.device, dtype=torch.bfloat16) for _ in range(2)
    )
    out = torch.zeros_like(left)
    calls = {
        "copy": lambda: target.copy_(source),
        "product": lambda: torch.matmul(left, right, out=out),
    }
    contenders = {name: contender(bench.timer, [call]) for name, call in calls.items()}
    found = measure(contenders, MEASURE_S)
    return DeviceLimits(
        copy_bytes_per_s=2 * source.numel() / found["copy"].seconds,
        matmul_flops_per_s=2 * size**3 / found["product"].seconds,
    )


def run_case(case: Case, bench: Bench) -> Result:
    """Check one case, then time it beside its peers. What fails becomes a note."""
    result = Result(case=case)
    try:
        work = case.make(bench.device, bench.chip)
        result.error = check(work)
        if result.is_wrong:
            result.notes.append(f"wrong: error {result.error:.3g} > {case.tolerance:.3g}")
            return result
        _time(case, work, bench, result)
    # Triton's errors have no base class but this; whatever it is, the other cases go on.
    except Exception as error:
        result.notes.append(f"cannot: {_one_line(error)}")
    return result


def check(work: Work) -> float:
    """The largest relative error of the outputs.

    The reference runs first, for launches may write where they read. Raises ValueError when it
    gives other shapes, or the very tensors that the launches write.
    """
    expected = list(work.expected())
    if len(expected) != len(work.outputs):
        raise ValueError(f"{len(expected)} references of {len(work.outputs)} outputs")
    written = {output.untyped_storage().data_ptr() for output in work.outputs if output.numel()}
    if any(tensor.untyped_storage().data_ptr() in written for tensor in expected):
        raise ValueError("the reference returns what the launches write")
    for launch in work.launches:
        launch.run()
    pairs = zip(work.outputs, expected, strict=True)
    return max((relative_error(out, tensor) for out, tensor in pairs), default=0.0)


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """max |out - expected| / max |finite expected|; NaN when one is NaN where the other is not.

    Of integers, which are ids, bytes and digests, the share of elements that differ; int8 alone
    holds quantised numbers. Raises ValueError for other shapes or types.
    """
    if out.shape != expected.shape or out.dtype != expected.dtype:
        raise ValueError(
            f"{out.dtype} {tuple(out.shape)}, expected {expected.dtype} {tuple(expected.shape)}"
        )
    if not out.numel():
        return 0.0
    if not out.is_floating_point() and out.dtype is not torch.int8:
        return int((out != expected).count_nonzero()) / out.numel()
    worst, largest = 0.0, torch.finfo(torch.float64).tiny
    pieces = zip(out.reshape(-1).split(PIECE), expected.reshape(-1).split(PIECE), strict=True)
    for ours, theirs in pieces:
        ours, theirs = ours.double(), theirs.double()
        same = (ours == theirs) | (ours.isnan() & theirs.isnan())
        difference = float(torch.where(same, 0.0, (ours - theirs).abs()).max())
        # A NaN stays, whatever comes after it.
        worst = difference if not difference <= worst and worst == worst else worst
        largest = max(largest, float(torch.where(theirs.isfinite(), theirs.abs(), 0.0).max()))
    return worst / largest


def run_cases(
    cases: Sequence[Case],
    bench: Bench,
    deadline: float,
    say: Callable[[str], object] = lambda text: None,
) -> list[Result]:
    """Results in the order of the cases. Those with goals run first; what the clock leaves no time
    for is noted as skipped.

    ``say`` gets each name before and each result after its run: a kernel that hangs or breaks the
    device is known by name then, and what came before it is not lost.
    """
    order = sorted(range(len(cases)), key=lambda n: not _has_goal(cases[n]))
    results: dict[int, Result] = {}
    for number in order:
        if bench.clock() >= deadline:
            results[number] = Result(case=cases[number], notes=["skipped: out of time"])
        else:
            say(f"{cases[number].kernel}: {cases[number].name}: ")
            results[number] = run_case(cases[number], bench)
            say(_in_short(results[number]) + "\n")
    return [results[number] for number in range(len(cases))]


def _in_short(result: Result) -> str:
    times = [f"{name} {timing.seconds * 1e6:.1f} µs" for name, timing in result.timings.items()]
    error = [] if result.error is None else [f"error {result.error:.2g}"]
    return ", ".join([*times, *error, *result.notes])


def _has_goal(case: Case) -> bool:
    return not (case.goal is None and case.peer_goal is None and case.not_slower_than is None)


def _time(case: Case, work: Work, bench: Bench, result: Result) -> None:
    result.copies = copies_beyond_l2(case.nbytes, bench.chip.l2_nbytes)
    works = [work]
    works += [case.make(bench.device, bench.chip) for _ in range(result.copies - 1)]
    contenders = {OURS: contender(bench.timer, [_launcher(each) for each in works])}
    for name in work.peers:
        try:
            contenders[name] = contender(bench.timer, [each.peers[name] for each in works])
        except Exception as error:
            result.notes.append(f"{name} cannot: {_one_line(error)}")
    result.timings = measure(contenders, MEASURE_S)


def _launcher(work: Work) -> Callable[[], None]:
    def launch_all() -> None:
        for launch in work.launches:
            launch.run()

    return launch_all


def _one_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
