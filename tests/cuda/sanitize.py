"""Every CUDA kernel once on small shapes, for compute-sanitizer: compute-sanitizer --tool racecheck python3 tests/cuda/sanitize.py LIBRARY

`make gpu-sanitize` runs it under all tools. What the kernels compute is not looked at here: check_kernels.py does that.
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


def attention(kernels):
    for B, h, N, d in SHAPES:
        q, k, v = torch.randn(B, N, 3, h, d, device="cuda").bfloat16().permute(2, 0, 3, 1, 4)
        dout = torch.randn(B, N, h, d, device="cuda").bfloat16().transpose(1, 2)
        gain = torch.rand(1, h, N, N, device="cuda")
        for path, tables in ((90, (gain,)), (90, ()), (80, (gain,)), (80, ()), (80, (gain, gain, gain))):
            out, lse = kernels.forward(q, k, v, *tables, path=path)
            kernels.backward(q, k, v, out, lse, dout, *tables, path=path)
        torch.cuda.synchronize()
        print(f"attention {B} x {h} x {N} x {d}", flush=True)


def masks(kernels):
    for N, prefix in ((196, 1), (64, 0)):
        ranks = torch.stack([torch.randperm(N, device="cuda") for _ in range(3)]).int().view(1, 3, 1, N)
        decay = -0.1 * torch.rand(3, 4, device="cuda")
        edge = -torch.rand(4, device="cuda") if prefix else None
        mask = (ranks, decay, torch.rand(3, 4, device="cuda"), prefix, edge)
        dout = torch.randn(1, 4, prefix + N, prefix + N, device="cuda")
        kernels.mask_forward(*mask)
        kernels.mask_backward(dout, *mask)
        alpha = torch.rand(4, device="cuda")
        for dtype in (torch.bfloat16, torch.float16):
            kernels.gain_forward(dtype, *mask, alpha)
        kernels.gain_backward(dout, *mask, alpha)
        torch.cuda.synchronize()
        print(f"masks of {N} + {prefix}", flush=True)


def main():
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to run")
        return
    kernels = Kernels(sys.argv[1])
    masks(kernels)
    attention(kernels)


if __name__ == "__main__":
    main()
