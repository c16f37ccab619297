"""Attention with a mask on one GPU, against its peers on the same tensors:

    python3 bench/gpu/attention.py [build/libviolin_ops.so] [--shapes abce] [--repeats 30] [--layout heads|packed] [--json FILE]

For each shape (B, h, N, d) in bfloat16, with a float32 gain table per head and gradients for q, k, v and the table: milliseconds
forward and forward + backward (median, and the middle half of the runs), the largest memory that forward + backward takes beyond
the inputs, and the error of the output and of the worst gradient against float64, relative in norm. cuDNN and FlashAttention-2 have
no mask: their lines are what a mask costs nothing against; the last line compares memory with cuDNN's plus the table and its gradient.
FlexAttention multiplies by a bfloat16 mask; it, the compiled and the plain formula give all gradients. "violin, mask packed" has its
gain in the 16-bit records that the kernels read, as violin.freeze keeps them, and gives the same gradients; "violin" makes them in every call.
"""
import argparse
import json
import os
import statistics

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

SHAPES = {"a": (256, 6, 196, 64), "b": (64, 6, 1024, 64), "c": (128, 3, 1024, 64), "e": (4, 12, 4096, 64)}


def lap(function):
    """Events around one call; their time is known after a synchronisation."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    function()
    stop.record()
    return start, stop


def spread(laps):
    """Median and quartiles in milliseconds."""
    low, middle, high = statistics.quantiles([start.elapsed_time(stop) for start, stop in laps], n=4)
    return middle, low, high


def peak_memory(function):
    """Bytes beyond what is allocated before, results included."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = function()
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated() - before


def formula(q, k, v, gain):
    """As one writes it: products in the inputs' precision, mask and softmax in float32."""
    logits = (q @ k.transpose(-2, -1)).float() * (q.size(-1) ** -0.5) * gain
    return torch.softmax(logits, -1).to(v.dtype) @ v


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


def error(x, ref):
    return float((x.double() - ref).norm() / ref.norm())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", nargs="?", default="build/libviolin_ops.so")
    parser.add_argument("--shapes", default="abce")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--peers", default="cudnn,flash,flex,compiled,plain", help="which peers to run")
    parser.add_argument("--layout", default="heads", choices=("heads", "packed"),
                        help="q, k, v contiguous [B,h,N,d], or views of one projection [B,N,3,h,d]")
    parser.add_argument("--no-error", action="store_true")
    parser.add_argument("--json")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to measure")
        return
    torch.ops.load_library(os.path.abspath(args.library))
    torch._dynamo.config.cache_size_limit = 64
    peers = args.peers.split(",")
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    rows = []
    for name in args.shapes:
        B, h, N, d = SHAPES[name]
        torch.manual_seed(0)
        views = torch.randn(B, N, 3, h, d, device="cuda").bfloat16().permute(2, 0, 3, 1, 4)
        q, k, v = ((t.detach() if args.layout == "packed" else t.detach().contiguous()).requires_grad_() for t in views)
        distance = (torch.arange(N, device="cuda")[:, None] - torch.arange(N, device="cuda")).abs()
        rate = torch.linspace(0.5, 8, h, device="cuda")[:, None, None] / N
        gain = torch.exp(-rate * distance).requires_grad_()  # float32 [h,N,N]
        short = gain.detach().bfloat16().requires_grad_()
        dout = torch.randn(B, h, N, d, device="cuda").bfloat16()
        ref = None if args.no_error else reference(q, k, v, gain, dout)

        def flex_attention():
            from torch.nn.attention.flex_attention import flex_attention as flex
            compiled = torch.compile(flex, dynamic=False)

            def score(s, b, head, i, j):
                return s * short[head, i, j]
            return lambda: compiled(q, k, v, score_mod=score)

        def with_backend(backend):
            def run():
                with sdpa_kernel(backend):
                    return F.scaled_dot_product_attention(q, k, v)
            return run

        def compiled_formula():
            compiled = torch.compile(formula, dynamic=False)
            return lambda: compiled(q, k, v, gain)

        packed = torch.ops.violin._pack_gain(gain.detach(), q)
        handle = torch.zeros((), device="cuda").expand(h, N, N).requires_grad_()  # takes the gradient of a packed gain
        # label, function, leaves, whether the mask takes part
        runs = [("violin", lambda: (lambda: torch.ops.violin.attention(q, k, v, gain)), (q, k, v, gain), True),
                ("violin, mask packed", lambda: (lambda: torch.ops.violin.attention(q, k, v, packed, handle=handle)),
                 (q, k, v, handle), True),
                ("violin, no mask", lambda: (lambda: torch.ops.violin.attention(q, k, v)), (q, k, v), False)]
        if "cudnn" in peers:
            runs.append(("cuDNN, no mask", lambda: with_backend(SDPBackend.CUDNN_ATTENTION), (q, k, v), False))
        if "flash" in peers:
            runs.append(("FlashAttention-2, no mask", lambda: with_backend(SDPBackend.FLASH_ATTENTION), (q, k, v), False))
        if "flex" in peers:
            runs.append(("FlexAttention, bf16 mask", flex_attention, (q, k, v, short), True))
        if "compiled" in peers:
            runs.append(("formula, compiled", compiled_formula, (q, k, v, gain), True))
        if "plain" in peers:
            runs.append(("formula, plain", lambda: (lambda: formula(q, k, v, gain)), (q, k, v, gain), True))

        print(f"\n{name} B={B} h={h} N={N} d={d}  {'ms forward':>22} {'forward+backward':>26} {'MiB':>9}  error out / gradients")
        contenders = []
        for label, make, leaves, masked in runs:
            try:
                run = make()

                def forward(run=run):
                    with torch.no_grad():
                        return run()

                def both(run=run, leaves=leaves):
                    return torch.autograd.grad(run(), leaves, dout)

                for _ in range(3):
                    forward()
                    both()
                memory = peak_memory(both)
                errors = None
                if ref is not None and masked:
                    grads = both()
                    errors = (error(forward(), ref[0]), max(error(g, r) for g, r in zip(grads, ref[1])))
                    del grads
                contenders.append((label, forward, both, memory, errors, [], []))
            except Exception as problem:  # a peer that cannot run here is reported, not fatal
                print(f"  {label:26} failed: {str(problem).splitlines()[0][:100]}", flush=True)
            torch.cuda.empty_cache()
        # In turns, so that the chip's clock and temperature are the same for all.
        for _ in range(args.repeats):
            for _, forward, both, _, _, forward_laps, both_laps in contenders:
                forward_laps.append(lap(forward))
                both_laps.append(lap(both))
        torch.cuda.synchronize()
        for label, _, _, memory, errors, forward_laps, both_laps in contenders:
            f, fb = spread(forward_laps), spread(both_laps)
            text = "" if errors is None else f"{errors[0]:.1e} / {errors[1]:.1e}"
            print(f"  {label:26} {f[0]:8.3f} ({f[1]:.3f}-{f[2]:.3f}) {fb[0]:10.3f} ({fb[1]:.3f}-{fb[2]:.3f}) "
                  f"{memory / 2**20:9.1f}  {text}",
                  flush=True)
            rows.append({"shape": name, "what": label, "forward": f, "forward_backward": fb, "memory": memory, "error": errors})
        del contenders
        torch.cuda.empty_cache()
        by = {r["what"]: r for r in rows if r["shape"] == name}
        for ours in ("violin", "violin, mask packed"):
            for peer in ("cuDNN, no mask", "FlashAttention-2, no mask", "FlexAttention, bf16 mask", "formula, plain"):
                if ours in by and peer in by:
                    f, fb = (by[ours][what][0] / by[peer][what][0] for what in ("forward", "forward_backward"))
                    print(f"  {ours} / {peer}: {f:.2f} forward, {fb:.2f} forward+backward")
        if "violin" in by and "cuDNN, no mask" in by:
            tables = 2 * gain.numel() * gain.element_size()
            ratio = by["violin"]["memory"] / (by["cuDNN, no mask"]["memory"] + tables)
            print(f"  memory of violin / (cuDNN + table and its gradient): {ratio:.2f}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
