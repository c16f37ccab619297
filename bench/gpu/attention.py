"""Attention with a mask on one GPU, against its peers on the same tensors:

    python3 bench/gpu/attention.py [build/libviolin_ops.so] [--shapes abce] [--repeats 30] [--layout heads|packed|both]
                                   [--mask table|learned|both] [--peers cudnn,flash,flex,compiled,plain] [--no-error]
                                   [--dtype bfloat16|float16|float32] [--sweep] [--smoke] [--json FILE]

For each shape (B, h, N, d), in bfloat16 by default: milliseconds forward and forward + backward (median, and the middle half of the
runs), the largest memory that forward + backward takes beyond the inputs, and the error of the output and of the worst
gradient against float64, relative in norm. cuDNN and FlashAttention-2 (in float32 torch's memory-efficient attention, without
TF32) have no mask: their lines are what a mask costs nothing against. Two tables:

table    The mask is a float32 gain per head, with gradients for q, k, v and the gain. FlexAttention multiplies by a
         bfloat16 mask; it, the compiled and the plain formula give all gradients. "violin, mask packed" has its gain in
         the 16-bit records that the kernels read, as violin.freeze keeps them, and gives the same gradients; "violin"
         makes them in every call. The last line compares memory with cuDNN's plus the table and its gradient.
learned  The mask is made of its parameters in every call, as a training step does: decays of eight curves and alpha, with
         gradients for q, k, v and these. "violin" makes the gain packed, as models do; "violin, mask as a table" by
         decay_mask. For the others torch makes it, gamma ** distance for every curve and their mean, as it is written
         ("mask in torch", "formula, plain") or compiled.

--sweep: other shapes instead, 65,536 tokens with 6 heads each: sequences of 49 to 4,096 tokens with heads of 64 numbers, and heads
of 32 to 128 with 1,024 tokens; at the end, a line for each with the time per logit, in which a cliff would show.

--smoke: a tiny shape on any device, to see that the script runs."""

import argparse
import itertools
import json
import math
import os
import sys

import torch
import torch.nn.functional as F
from contest import Contender, compare, contest
from torch.nn.attention import SDPBackend, sdpa_kernel

SHAPES = {"a": (256, 6, 196, 64), "b": (64, 6, 1024, 64), "c": (128, 3, 1024, 64), "e": (4, 12, 4096, 64)}
SWEEP = {f"{N}x{d}": (65536 // N, 6, N, d)
         for N, d in [*((N, 64) for N in (49, 64, 65, 128, 129, 196, 197, 256, 257, 400, 576, 577, 784, 1024, 1025, 1296, 1369, 2304,
                                          2305, 4096)),
                      *((1024, d) for d in (32, 40, 48, 72, 80, 96, 128))]}
SMOKE = {"smoke": (2, 2, 16, 8)}
SMOKE_SWEEP = {"16x8": (2, 2, 16, 8), "17x8": (2, 2, 17, 8)}
CURVES = 8


def formula(q, k, v, gain):
    """As one writes it: products in the inputs' precision, mask and softmax in float32."""
    logits = (q @ k.transpose(-2, -1)).float() * (q.size(-1) ** -0.5) * gain
    return torch.softmax(logits, -1).to(v.dtype) @ v


def mask_formula(distance, beta, alpha):
    """alpha times the mean over the curves of gamma ** distance; distance [C,N,N], beta [C,h], alpha [h]."""
    powers = torch.stack([torch.sigmoid(b)[:, None, None] ** x for b, x in zip(beta, distance)])
    return alpha[:, None, None] * powers.mean(0)


def reference(q, k, v, gain, dout):
    """float64, one image at a time so that it fits."""
    x = [t.detach().double() for t in (q, k, v)]
    table = gain.detach().double().requires_grad_()
    outs, grads, total = [], [], torch.zeros_like(table)
    for b in range(q.size(0)):
        leaves = [t[b].clone().requires_grad_() for t in x]
        logits = (leaves[0] @ leaves[1].transpose(-2, -1)) * (q.size(-1) ** -0.5) * table
        out = torch.softmax(logits, -1) @ leaves[2]
        *g, gt = torch.autograd.grad(out, [*leaves, table], dout[b].double())
        outs.append(out.detach())
        grads.append(g)
        total += gt
    return torch.stack(outs), [torch.stack(g) for g in zip(*grads)] + [total]


def without_mask(inputs):
    """The same for a gain of 1, whose own gradient nobody wants."""
    out, grads = reference(*inputs.qkv, torch.ones(1, 1, 1, device=inputs.device), inputs.dout)
    return out, grads[:3]


class Inputs:
    """q, k, v and the gradient of the output of one shape."""

    def __init__(self, shape, layout, device, dtype):
        B, h, N, d = self.shape = shape
        torch.manual_seed(0)
        views = torch.randn(B, N, 3, h, d, device=device).to(dtype).permute(2, 0, 3, 1, 4)
        self.qkv = tuple(
            (t.detach() if layout == "packed" else t.detach().contiguous()).requires_grad_() for t in views
        )
        self.dout = torch.randn(B, h, N, d, device=device).to(dtype)
        self.device = device
        self.packs = device == "cuda" and dtype.itemsize == 2  # gains as records


def flex(q, k, v, mask):
    """mask [h,N,N] multiplies the logits; only compiled is it fused."""
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention(q, k, v, score_mod=lambda s, b, head, i, j: s * mask[head, i, j])


def compiled(function, *inputs):
    fast = torch.compile(function, dynamic=False)
    return lambda: fast(*inputs)


def unmasked(qkv, peers):
    def with_backend(backend):
        def run():
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(*qkv)

        return run

    yield Contender("violin, no mask", lambda: lambda: torch.ops.violin.attention(*qkv), qkv, masked=False)
    if qkv[0].dtype == torch.float32:
        yield Contender("memory-efficient, no mask", lambda: with_backend(SDPBackend.EFFICIENT_ATTENTION), qkv, masked=False)
        return
    for name, label, backend in (("cudnn", "cuDNN, no mask", SDPBackend.CUDNN_ATTENTION),
                                 ("flash", "FlashAttention-2, no mask", SDPBackend.FLASH_ATTENTION)):
        if name in peers:
            yield Contender(label, lambda backend=backend: with_backend(backend), qkv, masked=False)


def with_table(inputs, gain, peers):
    """Contenders that are given the gain, float32 [h,N,N]."""
    ops, qkv = torch.ops.violin, inputs.qkv
    leaves = (*qkv, gain)
    yield Contender("violin", lambda: lambda: ops.attention(*qkv, gain), leaves)
    if inputs.packs:
        packed = ops._pack_gain(gain.detach(), qkv[0])
        handle = torch.zeros((), device="cuda").expand(gain.shape).requires_grad_()  # takes the gradient of a packed gain
        yield Contender("violin, mask packed", lambda: lambda: ops.attention(*qkv, packed, handle=handle), (*qkv, handle))
    yield from unmasked(qkv, peers)
    if "flex" in peers:
        short = gain.detach().bfloat16().requires_grad_()
        yield Contender("FlexAttention, bf16 mask", lambda: compiled(flex, *qkv, short), (*qkv, short))
    if "compiled" in peers:
        yield Contender("formula, compiled", lambda: compiled(formula, *qkv, gain), leaves)
    if "plain" in peers:
        yield Contender("formula, plain", lambda: lambda: formula(*qkv, gain), leaves)


class Mask:
    """Parameters of a mask over eight orders of N tokens: rows, columns and six random ones."""

    def __init__(self, inputs):
        _, h, N, _ = inputs.shape
        side, i = math.isqrt(N), torch.arange(N)
        orders = [i, i % side * side + i // side] + [torch.randperm(N) for _ in range(CURVES - 2)]
        self.ranks = torch.stack(orders).int().to(inputs.device)  # [C,N]
        self.distance = (self.ranks[:, :, None] - self.ranks[:, None, :]).abs().float()  # [C,N,N]
        self.beta = torch.empty(CURVES, h).uniform_(5, 9).to(inputs.device).requires_grad_()
        self.alpha = (1 + 0.1 * torch.randn(h)).to(inputs.device).requires_grad_()

    def gain64(self):
        """float64, without a gradient, curve by curve so that it fits."""
        rate, mean = F.logsigmoid(self.beta.detach().double()), 0
        for r, x in zip(rate, self.distance):
            mean = mean + torch.exp(r[:, None, None] * x) / CURVES
        return self.alpha.detach().double()[:, None, None] * mean

    def gradients64(self, dgain):
        """Of beta and alpha."""
        alpha = self.alpha.detach().double()
        dbeta, dalpha = [], 0
        for b, x in zip(self.beta.detach().double(), self.distance):
            powers = torch.exp(F.logsigmoid(b)[:, None, None] * x) / CURVES
            dalpha = dalpha + (dgain * powers).sum((1, 2))
            dbeta.append(alpha * torch.sigmoid(-b) * (dgain * powers * x).sum((1, 2)))
        return [torch.stack(dbeta), dalpha]


def with_parameters(inputs, mask, peers):
    """Contenders that make the gain of the mask's parameters in every call."""
    ops, qkv = torch.ops.violin, inputs.qkv
    leaves = (*qkv, mask.beta, mask.alpha)

    def packed():
        gain, handle = ops._decay_gain(mask.ranks, F.logsigmoid(mask.beta), None, 0, None, mask.alpha, False, qkv[0].dtype)
        return ops.attention(*qkv, gain, handle=handle)

    def table():
        gain = mask.alpha[:, None, None] * ops.decay_mask(mask.ranks, F.logsigmoid(mask.beta))
        return ops.attention(*qkv, gain)

    if inputs.packs:
        yield Contender("violin", lambda: packed, leaves)
    yield Contender("violin, mask as a table", lambda: table, leaves)
    yield from unmasked(qkv, peers)
    parameters = (mask.distance, mask.beta, mask.alpha)

    def flex_whole(q, k, v, *parameters):
        return flex(q, k, v, mask_formula(*parameters).bfloat16())

    def flex_alone():
        fast = torch.compile(flex, dynamic=False)
        return lambda: fast(*qkv, mask_formula(*parameters).bfloat16())

    def formula_whole(q, k, v, *parameters):
        return formula(q, k, v, mask_formula(*parameters))

    if "flex" in peers:
        yield Contender("FlexAttention, mask in torch", flex_alone, leaves)
        yield Contender("FlexAttention, compiled mask", lambda: compiled(flex_whole, *qkv, *parameters), leaves)
    if "compiled" in peers:
        yield Contender("formula, compiled", lambda: compiled(formula_whole, *qkv, *parameters), leaves)
    if "plain" in peers:
        yield Contender("formula, plain", lambda: lambda: formula_whole(*qkv, *parameters), leaves)


def measure_table(inputs, args, peers):
    _, h, N, _ = inputs.shape
    i = torch.arange(N, device=inputs.device)
    rate = torch.linspace(0.5, 8, h, device=inputs.device)[:, None, None] / N
    gain = torch.exp(-rate * (i[:, None] - i).abs()).requires_grad_()  # float32 [h,N,N]
    truths = {} if args.no_error else {True: reference(*inputs.qkv, gain, inputs.dout), False: without_mask(inputs)}
    rows = contest(with_table(inputs, gain, peers), inputs.dout, truths, args.repeats)
    compare(rows, ("violin", "violin, mask packed"),
            ("cuDNN, no mask", "FlashAttention-2, no mask", "memory-efficient, no mask", "FlexAttention, bf16 mask",
             "formula, compiled", "formula, plain"))
    memory = {row["what"]: row["memory"] for row in rows}
    if memory.get("violin") and memory.get("cuDNN, no mask"):
        tables = 2 * gain.numel() * gain.element_size()
        ratio = memory["violin"] / (memory["cuDNN, no mask"] + tables)
        print(f"  memory of violin / (cuDNN + table and its gradient): {ratio:.2f}")
    return rows


def measure_learned(inputs, args, peers):
    mask, truths = Mask(inputs), {}
    if not args.no_error:
        out, (*dqkv, dgain) = reference(*inputs.qkv, mask.gain64(), inputs.dout)
        truths = {True: (out, [*dqkv, *mask.gradients64(dgain)]), False: without_mask(inputs)}
    rows = contest(with_parameters(inputs, mask, peers), inputs.dout, truths, args.repeats)
    compare(rows, ("violin", "violin, mask as a table"),
            ("cuDNN, no mask", "memory-efficient, no mask", "FlexAttention, mask in torch", "FlexAttention, compiled mask",
             "formula, compiled", "formula, plain"))
    return rows


def summarise(shapes, results):
    """A line for each shape: time per logit, and the ratio to a peer without a mask."""
    print(f"\n  {'tokens x dim':12} {'ps per logit, forward':>22} {'both':>8}   violin / cuDNN without a mask, forward, both")
    for name, layout, kind in dict.fromkeys((r["shape"], r["layout"], r["mask"]) for r in results):
        B, h, N, _ = shapes[name]
        by = {r["what"]: r for r in results if (r["shape"], r["layout"], r["mask"]) == (name, layout, kind)}
        ours, peer = by.get("violin") or by.get("violin, mask as a table"), by.get("cuDNN, no mask")
        if ours is None:
            continue
        times = [1e9 * ours[what][0] / (B * h * N * N) for what in ("forward", "forward_backward")]
        ratios = [f"{ours[what][0] / peer[what][0]:.2f}" for what in ("forward", "forward_backward")] if peer else ["none here"]
        print(f"  {name:12} {times[0]:22.2f} {times[1]:8.2f}   {', '.join(ratios)}  ({layout}, mask {kind})")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", nargs="?", default="build/libviolin_ops.so")
    parser.add_argument("--shapes", default="abce", help="letters: a 196 tokens, b and c 1024, e 4096")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--peers", default="cudnn,flash,flex,compiled,plain", help="which peers to run")
    parser.add_argument("--layout", default="heads", choices=("heads", "packed", "both"),
                        help="q, k, v contiguous [B,h,N,d], or views of one projection [B,N,3,h,d] as models have them")
    parser.add_argument("--mask", default="both", choices=("table", "learned", "both"), help="which of the two tables")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"),
                        help="of q, k and v; in float32 the peer without a mask is torch's memory-efficient attention")
    parser.add_argument("--no-error", action="store_true")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--json")
    args = parser.parse_args()
    shapes = SWEEP if args.sweep else {name: SHAPES[name] for name in args.shapes if name in SHAPES}
    if args.smoke:
        shapes = SMOKE_SWEEP if args.sweep else SMOKE
    if unknown := set(args.shapes) - set(SHAPES):
        parser.error(f"--shapes: no shape {', '.join(sorted(unknown))}; there are {', '.join(SHAPES)}")
    if args.repeats < 2:
        parser.error("--repeats: at least 2, for a median and quartiles")
    if not torch.cuda.is_available() and not args.smoke:
        print("no CUDA device: nothing to measure (--smoke runs a tiny shape on the CPU)")
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.ops.load_library(os.path.abspath(args.library))
    torch._dynamo.config.cache_size_limit = 64
    print(torch.cuda.get_device_name() if device == "cuda" else "CPU", "torch", torch.__version__)
    measures = {"table": measure_table, "learned": measure_learned}
    layouts = ("heads", "packed") if args.layout == "both" else (args.layout,)
    kinds = tuple(measures) if args.mask == "both" else (args.mask,)
    results = []
    for name, layout, kind in itertools.product(shapes, layouts, kinds):
        B, h, N, d = shapes[name]
        title = f"{name} B={B} h={h} N={N} d={d}, {layout}, {'mask given' if kind == 'table' else 'mask made in every call'}"
        print(f"\n{title}\n  {'':34} {'ms forward':>22} {'forward+backward':>26} {'MiB':>8}   error out / gradients", flush=True)
        rows = measures[kind](Inputs(shapes[name], layout, device, getattr(torch, args.dtype)), args, args.peers.split(","))
        results += [{"shape": name, "layout": layout, "mask": kind, **row} for row in rows]
        torch._dynamo.reset()
        if device == "cuda":
            torch.cuda.empty_cache()
    if args.sweep:
        summarise(shapes, results)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    sys.exit(main())
