"""Times the CUDA launchers alone, per kernel, beside cuDNN and FlashAttention-2 without a mask:
python3 bench/gpu/kernels.py LIBRARY [--path 80|90] [--profile] [--masks] [--energy]"""
import argparse
import math
import os
import statistics
import sys
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "../../tests/cuda"))
from kernels import Kernels  # noqa: E402

SHAPES = {
    "a": (256, 6, 196, 64),
    "b": (64, 6, 1024, 64),
    "c": (128, 3, 1024, 64),
    "e": (4, 12, 4096, 64),
    "s": (256, 6, 197, 64),  # with a class token
    "l": (64, 6, 1025, 64),
    "t": (128, 3, 1025, 64),
    "w": (64, 3, 1024, 128),  # wide heads
}


def median(function, repeats=30, warmup=5):
    for _ in range(warmup):
        function()
    times = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(True), torch.cuda.Event(True)
        start.record()
        function()
        stop.record()
        times.append((start, stop))
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in times)


def kernel_times(function, repeats=5):
    """Milliseconds of each of our kernels in a call of function."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as prof:
        for _ in range(repeats):
            function()
        torch.cuda.synchronize()
    for event in prof.key_averages():
        total = getattr(event, "device_time_total", 0)
        if "violin" in event.key and total > 0:
            print(f"    {total / event.count / 1000:.3f} ms  {event.key[:90]}", flush=True)


class Energy:
    """What a call costs when it runs for long: at the limit of power, milliseconds follow millijoules."""

    def __init__(self, seconds=0.7):
        import pynvml  # torch's own way to NVML

        pynvml.nvmlInit()
        device = pynvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device())
        self.joules = lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(device) / 1000
        self.seconds = seconds

    def __call__(self, name, function):
        def run(count):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(count):
                function()
            torch.cuda.synchronize()
            return time.perf_counter() - start

        run(5)
        count = max(20, int(self.seconds / (run(20) / 20)))
        run(count // 3)
        before = self.joules()
        seconds = run(count)
        joules = self.joules() - before
        print(f"    {1000 * joules / count:7.1f} mJ {1000 * seconds / count:7.3f} ms {joules / seconds:4.0f} W  {name}", flush=True)


def attention_energy(kernels, q, k, v, gain, dout, path):
    energy = Energy()
    x = [t.detach().contiguous().requires_grad_() for t in (q, k, v)]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        energy("cudnn forward", lambda: torch.nn.functional.scaled_dot_product_attention(*x))
        out = torch.nn.functional.scaled_dot_product_attention(*x)
        energy("cudnn backward", lambda: torch.autograd.grad(out, x, dout, retain_graph=True))
    for tables in ((gain,), ()):
        name = f"sm{path} {'gain' if tables else 'none'}"
        out, lse = kernels.forward(q, k, v, *tables, path=path)
        energy(f"{name} forward", lambda: kernels.forward(q, k, v, *tables, path=path))
        parts = {"backward": (1, 1, 1, 1, 0, 0), "dQ and the table's": (1, 0, 0, 1, 0, 0), "dK, dV": (0, 1, 1, 0, 0, 0)}
        for part, need in parts.items():
            energy(f"{name} {part}",
                   lambda: kernels.backward(q, k, v, out, lse, dout, *tables, path=path, poison=False, need=need))


def time_masks(kernels):
    """decay_mask and its gradient, and the same as packed gains with alpha: rows, columns and six random orders, the worst
    for banks."""
    for tokens, heads, prefix in ((1024, 36, 0), (1024, 72, 1), (196, 72, 1)):
        side = math.isqrt(tokens)
        i = torch.arange(tokens, device="cuda")
        orders = [i, i % side * side + i // side] + [torch.randperm(tokens, device="cuda") for _ in range(6)]
        ranks = torch.stack(orders).int().view(1, 8, 1, tokens)
        decay = -0.01 * torch.rand(8, heads, device="cuda")
        edge = -torch.rand(heads, device="cuda") if prefix else None
        dout = torch.randn(1, heads, prefix + tokens, prefix + tokens, device="cuda")
        mask = (ranks, decay, None, prefix, edge)
        print(f"mask of {tokens} patches + {prefix}, {heads} heads")
        kernel_times(lambda: (kernels.mask_forward(*mask), kernels.mask_backward(dout, *mask)))
        gain = (*mask, torch.rand(heads, device="cuda"))
        kernel_times(lambda: (kernels.gain_forward(torch.bfloat16, *gain), kernels.gain_backward(dout, *gain)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("library")
    parser.add_argument("--path", type=int, nargs="*", default=[90, 80])
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--shapes", default="abceslw", help="letters: a, b, c, e as in docs/kernels.md; s, l, t: 197 and 1025 tokens; w: heads of 128")
    parser.add_argument("--once", action="store_true", help="one forward and one backward with a gain table, for profilers")
    parser.add_argument("--energy", action="store_true", help="millijoules per call instead, each for 0.7 s (NVML)")
    parser.add_argument("--masks", action="store_true", help="decay_mask instead of attention")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to measure")
        return
    kernels = Kernels(args.library)
    if args.masks:
        time_masks(kernels)
        return
    if not args.energy:
        print("ms: forward / backward / sum")
    for name in args.shapes:
        B, h, N, d = SHAPES[name]
        q, k, v = torch.randn(B, N, 3, h, d, device="cuda").bfloat16().permute(2, 0, 3, 1, 4)
        gain = torch.rand(1, h, N, N, device="cuda")
        dout = torch.randn(B, N, h, d, device="cuda").bfloat16().transpose(1, 2)
        if args.once:
            out, lse = kernels.forward(q, k, v, gain)
            kernels.backward(q, k, v, out, lse, dout, gain)
            torch.cuda.synchronize()
            continue
        if args.energy:
            print(f"{name}: {B} x {h} x {N} x {d}")
            for path in args.path:
                attention_energy(kernels, q, k, v, gain, dout, path)
            continue
        row = []
        if not args.no_peers:
            x = [t.detach().contiguous().requires_grad_() for t in (q, k, v)]
            for label, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("fa2", SDPBackend.FLASH_ATTENTION)):
                with sdpa_kernel(backend):
                    f = median(lambda: torch.nn.functional.scaled_dot_product_attention(*x))
                    out = torch.nn.functional.scaled_dot_product_attention(*x)
                    bw = median(lambda: torch.autograd.grad(out, x, dout, retain_graph=True))
                row.append(f"{label} {f:.3f}/{bw:.3f}/{f + bw:.3f}")
        for path in args.path:
            for tables in ((gain,), ()):
                out, lse = kernels.forward(q, k, v, *tables, path=path)
                f = median(lambda: kernels.forward(q, k, v, *tables, path=path))
                bw = median(lambda: kernels.backward(q, k, v, out, lse, dout, *tables, path=path, poison=False))
                row.append(f"sm{path} {'gain' if tables else 'none'} {f:.3f}/{bw:.3f}/{f + bw:.3f}")
        print(name, " | ".join(row), flush=True)
        if args.profile:
            out, lse = kernels.forward(q, k, v, gain)
            for path in args.path:
                kernel_times(lambda: (kernels.forward(q, k, v, gain, path=path),
                                      kernels.backward(q, k, v, out, lse, dout, gain, path=path, poison=False)))


if __name__ == "__main__":
    main()
