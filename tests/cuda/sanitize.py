"""Every CUDA kernel once on small shapes, for compute-sanitizer: compute-sanitizer --tool racecheck python3 tests/cuda/sanitize.py LIBRARY

`make gpu-sanitize` runs it under all tools. Types after the library, such as float32: attention in those alone. What the
kernels compute is not looked at here: check_kernels.py does that.
"""
import sys

import torch

from kernels import Kernels

SHAPES = [  # B, h, N, d
    (2, 1, 128, 64),
    (5, 2, 197, 64),  # a narrow last tile
    (5, 2, 196, 64),  # a table that is read as it is
    (6, 1, 130, 40),  # a tail of two queries
    (70, 2, 65, 64),  # several rounds of a persistent grid
    (5, 2, 197, 80),  # heads of two parts
    (70, 2, 65, 128),
    (6, 1, 130, 96),
]


def attention(kernels, types):
    for B, h, N, d in SHAPES:
        q, k, v = torch.randn(B, N, 3, h, d, device=kernels.device).permute(2, 0, 3, 1, 4)
        dout = torch.randn(B, N, h, d, device=kernels.device).transpose(1, 2)
        gain = torch.rand(1, h, N, N, device=kernels.device)
        calls = [(dtype, path, tables) for dtype in (torch.bfloat16, torch.float16)
                 for path, tables in ((90, (gain,)), (90, ()), (80, (gain,)), (80, ()), (80, (gain, gain, gain)))]
        # Kernels of ordinary arithmetic: fewer of them, they are slow under the tools.
        calls += [(dtype, 80, tables) for dtype in (torch.float32, torch.float64)
                  for tables in ((), (gain,), (gain, gain, gain)) if B < 10]
        for dtype, path, tables in calls:
            if str(dtype).removeprefix("torch.") not in types:
                continue
            x = [t.to(dtype) for t in (q, k, v, dout)]
            t = [t.to(torch.promote_types(dtype, torch.float32)) for t in tables]
            out, lse = kernels.forward(*x[:3], *t, path=path)
            kernels.backward(*x[:3], out, lse, x[3], *t, path=path)
            if len(tables) == 1 and B > 10:  # in pieces
                kernels.backward(*x[:3], out, lse, x[3], *t, path=path, room=kernels.scratch * 3 // 4)
        synchronize(kernels)
        print(f"attention {B} x {h} x {N} x {d}", flush=True)


def few_keys(kernels):
    for path in (80, 90):
        q, k, v = torch.randn(3, 2, 2, 9, 64, device=kernels.device).bfloat16()
        gain = torch.rand(1, 2, 9, 9, device=kernels.device)
        out, lse = kernels.forward(q, k, v, gain, path=path)
        kernels.backward(q, k, v, out, lse, torch.randn_like(out), gain, path=path)
    synchronize(kernels)
    print("attention over a few keys", flush=True)


def masks(kernels):
    for N, prefix in ((196, 1), (64, 0)):
        rand = lambda *shape: torch.rand(*shape, device=kernels.device)
        ranks = torch.stack([torch.randperm(N, device=kernels.device) for _ in range(3)]).int().view(1, 3, 1, N)
        decay = -0.1 * rand(3, 4)
        edge = -rand(4) if prefix else None
        mask = (ranks, decay, rand(3, 4), prefix, edge)
        dout = torch.randn(1, 4, prefix + N, prefix + N, device=kernels.device)
        kernels.mask_forward(*mask)
        kernels.mask_backward(dout, *mask)
        by_axis = (torch.stack((ranks[0, :2, 0], ranks[0, 1:, 0]))[None], -0.1 * rand(2, 2, 4), rand(2, 4), prefix, edge)
        for ranks_and_rates, log_space in ((mask, True), (by_axis, False), (by_axis, True)):
            kernels.mask_forward(*ranks_and_rates, log_space)
            kernels.mask_backward(dout, *ranks_and_rates, log_space)
        wide = [x.double() if torch.is_tensor(x) and x.is_floating_point() else x for x in mask]
        kernels.mask_forward(*wide)
        kernels.mask_backward(dout.double(), *wide)
        alpha = rand(4)
        for dtype in (torch.bfloat16, torch.float16):
            kernels.gain_forward(dtype, *mask, alpha)
        kernels.gain_backward(dout, *mask, alpha)
        synchronize(kernels)
        print(f"masks of {N} + {prefix}", flush=True)


def rows(kernels):
    x = torch.randn(70, 192, device=kernels.device)
    weight, bias = torch.rand(2, 192, device=kernels.device)
    for dtype in (torch.float32, torch.bfloat16):
        y, mean, rstd = kernels.norm_forward(x, weight, bias, dtype)
        kernels.norm_backward(torch.randn_like(y), x, mean, rstd, weight)
        kernels.column_sums(y)
    synchronize(kernels)
    print("layer norm and sums over rows", flush=True)


def synchronize(kernels):
    if not kernels.emulated:
        torch.cuda.synchronize()


def main():
    kernels = Kernels(sys.argv[1])
    if not kernels.emulated and not torch.cuda.is_available():
        print("no CUDA device: nothing to run")
        return
    if not (types := sys.argv[2:]):
        types = ("bfloat16", "float16", "float32", "float64")
        masks(kernels)
        rows(kernels)
        few_keys(kernels)
    attention(kernels, types)


if __name__ == "__main__":
    main()
