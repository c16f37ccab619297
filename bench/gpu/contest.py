"""Contenders that do the same work take turns: milliseconds forward and forward + backward, memory and error of each."""

import dataclasses
import statistics
import time
from collections.abc import Callable

import torch


@dataclasses.dataclass
class Contender:
    label: str
    make: Callable  # -> a function without arguments that runs the forward pass
    leaves: tuple  # what gradients are wanted of
    masked: bool = True  # which of the references its results are compared with


@dataclasses.dataclass
class Started:
    label: str
    forward: Callable
    both: Callable
    memory: int
    error: tuple | None
    forward_laps: list = dataclasses.field(default_factory=list)
    both_laps: list = dataclasses.field(default_factory=list)


def synchronize():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def lap(function):
    """The times before and after one call, which are known after a synchronisation."""
    if not torch.cuda.is_available():
        start = time.perf_counter()
        function()
        return start, time.perf_counter()
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    function()
    stop.record()
    return start, stop


def spread(laps):
    """Median and quartiles in milliseconds."""
    events = torch.cuda.is_available()
    times = [start.elapsed_time(stop) if events else 1000 * (stop - start) for start, stop in laps]
    low, middle, high = statistics.quantiles(times, n=4)
    return middle, low, high


def peak_memory(function):
    """Bytes beyond what is allocated before, results included."""
    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = function()
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated() - before


def error(x, reference):
    return float((x.double() - reference).norm() / reference.norm())


def start(contender, dout, references):
    """Compiles and warms up; compares with the reference, (output, gradients), that is there for it."""
    run, leaves = contender.make(), contender.leaves

    def forward():
        with torch.no_grad():
            return run()

    def both():
        return torch.autograd.grad(run(), leaves, dout)

    for _ in range(3):
        forward()
        both()
    memory, errors, reference = peak_memory(both), None, references.get(contender.masked)
    if reference is not None:
        errors = (error(forward(), reference[0]), max(error(x, r) for x, r in zip(both(), reference[1])))
    return Started(contender.label, forward, both, memory, errors)


def contest(contenders, dout, references, repeats):
    """A row for each that can run, printed as it is returned. references: results with the mask (True) and without (False)."""
    started = []
    for contender in contenders:
        try:
            started.append(start(contender, dout, references))
        except Exception as problem:  # a peer that cannot run here is reported, not fatal
            reason = (str(problem).splitlines() or [type(problem).__name__])[0]
            print(f"  {contender.label:34} failed: {reason[:100]}", flush=True)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    # In turns, so that the chip's clock and temperature are the same for all.
    for _ in range(repeats):
        for one in started:
            one.forward_laps.append(lap(one.forward))
            one.both_laps.append(lap(one.both))
    synchronize()
    rows = []
    for one in started:
        f, fb = spread(one.forward_laps), spread(one.both_laps)
        text = "" if one.error is None else f"{one.error[0]:.1e} / {one.error[1]:.1e}"
        print(f"  {one.label:34} {f[0]:8.3f} ({f[1]:.3f}-{f[2]:.3f}) {fb[0]:10.3f} ({fb[1]:.3f}-{fb[2]:.3f}) "
              f"{one.memory / 2**20:9.1f}  {text}", flush=True)
        rows.append({"what": one.label, "forward": f, "forward_backward": fb, "memory": one.memory, "error": one.error})
    return rows


def compare(rows, ours, peers):
    """Prints the ratios of ours to each of the peers that ran, and returns (label, label, forward, both)."""
    by, ratios = {row["what"]: row for row in rows}, []
    for label in ours:
        for peer in peers:
            if label in by and peer in by:
                f, fb = (by[label][what][0] / by[peer][what][0] for what in ("forward", "forward_backward"))
                print(f"  {label} / {peer}: {f:.2f} forward, {fb:.2f} forward+backward")
                ratios.append((label, peer, f, fb))
    return ratios
