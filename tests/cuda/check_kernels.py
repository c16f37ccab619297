"""Checks the CUDA kernels against float64: python3 tests/cuda/check_kernels.py LIBRARY [--repeat N] [--only TEXT] [--tiles N]

The criterion is that of the operators: the error of a kernel is at most twice the error of the plain formula with q, k, v in
the same precision and table and softmax in float32, plus a tiny term. Also: every run gives the same bits.

LIBRARY is libviolin_cuda_kernels_api.so, for a GPU, or libviolin_cuda_emulated.so, which runs the same kernels on the processor:
small cases only, and the repeated runs in other orders of threads and copies.
"""
import argparse
import itertools
import math
import sys

import torch

from check_rows import check_rows
from kernels import Kernels, unpacked

NAMES = ("out", "lse", "dq", "dk", "dv", "dgain", "dbias", "dgate")


def plain(q, k, v, gain, bias, gate, scale, groups):
    """The formula as one writes it: products in the inputs' precision, the rest in at least float32."""
    wide = torch.promote_types(q.dtype, torch.float32)
    B = q.size(0)
    full = [None if t is None else t.repeat(B // groups, 1, 1, 1) for t in (gain, bias, gate)]
    z = (q @ k.transpose(-2, -1)).to(wide) * scale
    if full[0] is not None:
        z = z * full[0]
    if full[1] is not None:
        z = z + full[1]
    lse = torch.logsumexp(z, -1)
    w = torch.softmax(z, -1)
    if full[2] is not None:
        w = w * full[2]
    return w.to(q.dtype) @ v, lse


def run_plain(inputs, tables, dout, scale, groups, dtype):
    wide = torch.promote_types(dtype, torch.float32)
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in inputs)
    t = [None if x is None else x.detach().to(wide).requires_grad_() for x in tables]
    out, lse = plain(q, k, v, *t, scale, groups)
    wanted = [q, k, v] + [x for x in t if x is not None]
    grads = iter(torch.autograd.grad(out, wanted, dout.to(dtype)))
    return [out.detach(), lse.detach()] + [next(grads) for _ in range(3)] + [None if x is None else next(grads) for x in t]


def error(x, ref):
    if x is None:
        return 0.0
    e = (x.double() - ref).norm() / ref.norm().clamp_min(1e-300)
    return float(e) if torch.isfinite(e) else math.inf


def make(case, dtype, seed, device):
    B, h, nq, nk, d, G, tables, layout = case
    g = torch.Generator(device).manual_seed(seed)
    rand = lambda *s: torch.randn(*s, generator=g, device=device)
    if layout == "packed":  # [B,N,3,h,d]
        q, k, v = rand(B, nq, 3, h, d).to(dtype).permute(2, 0, 3, 1, 4)
    elif layout == "tokens":  # [B,N,h,d]
        q, k, v = (rand(B, n, h, d).to(dtype).transpose(1, 2) for n in (nq, nk, nk))
    elif layout == "odd":  # rows 1 number longer than d: no 16-byte alignment
        q, k, v = (rand(B, h, n, d + 1).to(dtype)[..., :d] for n in (nq, nk, nk))
    else:
        q, k, v = (rand(B, h, n, d).to(dtype) for n in (nq, nk, nk))
    if "n" in tables:
        q, k = 6 * q.abs(), -6 * k.abs()
    dout = rand(B, nq, h, d).to(dtype).transpose(1, 2)
    wide = torch.promote_types(dtype, torch.float32)
    th = 1 if "1" in tables else h
    shape = (G, th, nq, nk)
    gain = bias = gate = None
    if "m" in tables:  # a mask close to 1, as fresh parameters give
        gain = 1 - 2e-3 * torch.rand(*shape, generator=g, device=device, dtype=wide)
    if "g" in tables:  # decays of both signs
        i = torch.arange(nq, device=device)[:, None]
        j = torch.arange(nk, device=device)[None]
        rate = 0.2 * torch.rand(G, th, 1, 1, generator=g, device=device, dtype=wide)
        sign = torch.randn(G, th, 1, 1, generator=g, device=device, dtype=wide).sign()
        gain = sign * 1.3 * torch.exp(-rate * (i - j).abs()) + 0.05 * torch.randn(*shape, generator=g, device=device, dtype=wide)
    if "d" in tables:  # a decay so fast that whole tiles are smaller than any normal number
        far = (torch.arange(nq, device=device)[:, None] - torch.arange(nk, device=device)[None]).abs()
        gain = (0.5 ** far.to(wide)).expand(shape).contiguous()
    if "b" in tables:
        bias = torch.randn(*shape, generator=g, device=device, dtype=wide)
        if "x" in tables and nk > 2:
            bias[..., ::3] = -math.inf
            bias[..., nq // 2, :] = 0
    if "s" in tables:
        gate = torch.rand(*shape, generator=g, device=device, dtype=wide)
    return (q, k, v), (gain, bias, gate), dout


CASES = [
    # B, h, Nq, Nk, d, G, tables, layout
    (2, 3, 64, 64, 64, 1, "", "plain"), (2, 3, 64, 64, 64, 1, "g", "plain"), (3, 2, 196, 196, 64, 1, "g", "packed"),
    (5, 2, 197, 197, 64, 1, "g", "tokens"), (4, 2, 1, 1, 64, 1, "g", "plain"), (4, 2, 49, 49, 32, 2, "g", "packed"),
    (2, 2, 1024, 1024, 64, 1, "m", "packed"), (6, 2, 300, 300, 64, 3, "g", "tokens"), (7, 1, 130, 257, 64, 1, "g", "plain"),
    (4, 3, 196, 196, 64, 1, "g1", "packed"), (9, 2, 65, 65, 40, 1, "g", "packed"), (2, 2, 1025, 1025, 64, 1, "g", "packed"),
    (2, 2, 196, 196, 64, 1, "b", "packed"), (2, 2, 100, 77, 64, 1, "bx", "plain"), (2, 2, 196, 196, 64, 1, "s", "packed"),
    (4, 2, 150, 150, 64, 2, "gbs", "packed"), (2, 2, 150, 131, 128, 1, "gbs", "tokens"), (2, 2, 150, 131, 96, 1, "gs", "tokens"),
    (2, 2, 150, 131, 32, 1, "gb", "tokens"), (2, 2, 70, 70, 17, 1, "gbs", "odd"), (2, 2, 70, 70, 64, 1, "g", "odd"),
    (2, 2, 70, 70, 100, 1, "g", "odd"), (2, 2, 70, 70, 3, 1, "gbs", "plain"), (33, 2, 66, 66, 64, 1, "g", "packed"),
    (40, 1, 197, 197, 64, 1, "gbs", "packed"), (1, 1, 5, 1296, 64, 1, "g", "plain"), (2, 1, 1296, 9, 64, 1, "g", "plain"),
    (70, 6, 196, 196, 64, 1, "m", "packed"), (3, 2, 300, 300, 64, 1, "d", "packed"), (2, 1, 400, 330, 128, 1, "d", "tokens"),
    # Several rounds of a persistent grid, with blocks of tiles that are not full and last tiles that are narrow.
    (60, 6, 300, 300, 64, 1, "g", "packed"), (24, 6, 1025, 1025, 64, 1, "g", "packed"), (200, 6, 65, 65, 64, 1, "g", "tokens"),
    (150, 6, 40, 40, 32, 1, "g", "packed"), (90, 6, 197, 197, 64, 1, "", "tokens"),
    # Fewer items of dQ than clusters for them, and one tile of keys in many rounds.
    (92, 3, 197, 197, 64, 1, "g", "packed"), (600, 2, 64, 64, 64, 1, "g", "packed"),
    # a few rows past the last whole tile: queries, keys, both
    (5, 3, 257, 257, 64, 1, "g", "packed"), (4, 2, 260, 388, 40, 2, "g1", "tokens"), (6, 2, 70, 1026, 32, 1, "", "tokens"),
    (3, 2, 1028, 64, 64, 1, "g", "tokens"), (140, 2, 321, 321, 64, 1, "m", "packed"),
    # one query or two past an even number of tiles
    (6, 2, 258, 70, 40, 3, "g1", "tokens"), (4, 3, 130, 64, 32, 2, "g", "tokens"), (5, 2, 129, 200, 64, 1, "", "tokens"),
    (3, 2, 385, 385, 64, 1, "g", "packed"),
    # few images and keys in fours, where the forward pass reads the table as it is: images, queries and keys left over
    (4, 2, 512, 512, 64, 1, "g", "packed"), (7, 2, 250, 516, 64, 1, "g", "tokens"), (16, 1, 1000, 1000, 40, 1, "g1", "packed"),
    (3, 2, 2240, 2240, 64, 1, "m", "plain"), (5, 3, 40, 4, 64, 1, "g", "plain"), (40, 1, 130, 2560, 64, 1, "g", "tokens"),
    # heads of two parts: whole tiles, narrow last tiles, many rounds, few images, more keys than a persistent grid takes
    (2, 3, 64, 64, 128, 1, "g", "plain"), (3, 2, 196, 196, 80, 1, "g", "packed"), (5, 2, 197, 197, 96, 1, "g", "tokens"),
    (2, 2, 1025, 1025, 128, 1, "m", "packed"), (60, 6, 300, 300, 128, 1, "g", "packed"), (200, 6, 65, 65, 72, 1, "g", "tokens"),
    (6, 2, 258, 70, 104, 3, "g1", "tokens"), (7, 1, 130, 257, 112, 1, "", "plain"), (1, 1, 5, 1296, 128, 1, "g", "plain"),
    (1, 1, 2200, 2100, 88, 1, "g", "tokens"), (600, 2, 64, 64, 128, 1, "g", "packed"), (90, 6, 197, 197, 128, 1, "", "tokens"),
    # the same in small: tables as they are, tails, rounds, parts, groups
    (3, 1, 132, 132, 64, 1, "g", "packed"), (5, 1, 129, 129, 64, 1, "g", "tokens"), (2, 2, 130, 67, 40, 2, "g", "tokens"),
    (17, 1, 70, 70, 64, 1, "m", "packed"), (9, 2, 70, 70, 64, 1, "", "packed"), (17, 1, 65, 65, 128, 1, "g", "packed"),
    (4, 1, 64, 580, 64, 1, "g", "tokens"), (5, 1, 130, 66, 80, 1, "m", "tokens"), (1, 1, 300, 260, 64, 1, "d", "tokens"),
    (4, 1, 80, 70, 64, 2, "gbs", "tokens"), (1, 1, 400, 330, 128, 1, "d", "tokens"), (40, 1, 64, 64, 64, 1, "g", "packed"),
    # logits so far below 0 that a key past the end would have an infinite weight
    (2, 1, 70, 70, 64, 1, "n", "plain"),
]


def small_enough(kernels, elements, tiles):
    """Whether as many elements of tables as there are for all images are few enough for an emulated device."""
    return not kernels.emulated or elements <= tiles * 64 * 64


def check_attention(kernels, repeat, only, tiles):
    failures, count, worst = 0, 0, {}
    for (number, case), (dtype, path) in itertools.product(
            enumerate(CASES), ((torch.bfloat16, 90), (torch.float16, 90), (torch.bfloat16, 80), (torch.float16, 80),
                               (torch.float32, 80), (torch.float64, 80))):
        name = f"{'x'.join(map(str, case[:6]))} {case[6] or 'none'} {case[7]} {str(dtype)[6:]} sm{path}"
        B, h, nq, nk = case[:4]
        if dtype == torch.float64 and "n" in case[6]:
            continue  # the formula has the same bits as the truth there, and logits of 200 have large roundings
        slow = 5 if dtype in (torch.float32, torch.float64) else 1  # without products of whole tiles
        if (only and only not in name) or not small_enough(kernels, slow * B * h * max(nq, 64) * max(nk, 64), tiles):
            continue
        inputs, tables, dout = make(case, dtype, 1000 + number, kernels.device)
        G, scale = case[5], 1 / math.sqrt(case[4])
        ref = run_plain(inputs, tables, dout, scale, G, torch.float64)
        base = run_plain(inputs, tables, dout, scale, G, dtype)
        full = [None if t is None else t for t in tables]
        out, lse = kernels.forward(*inputs, *full, path=path)
        forward_sm90 = kernels.used_sm90
        if path == 90 and not forward_sm90:
            continue
        grads = kernels.backward(*inputs, out, lse, dout, *full, path=path)
        count += 1
        if case[6].endswith("1") or "1" in case[6]:  # the operator sums a table without heads over the heads
            grads = list(grads[:3]) + [None if g is None else g.sum(1, keepdim=True) for g in grads[3:]]
        results = [out, lse, *grads]
        tiny = {torch.bfloat16: 2e-4, torch.float16: 3e-5, torch.float32: 2e-7, torch.float64: 5e-15}[dtype]
        row = []
        for n, x, r, p in zip(NAMES, results, ref, base):
            if r is None:
                continue
            finite = torch.isfinite(r)
            if not finite.all():
                ok = bool((torch.isfinite(x) == finite).all())
                r, x, p = r[finite], x[finite], p[finite]
            else:
                ok = True
            e, pe = error(x, r), error(p, r)
            if float(r.norm()) == 0:
                e = pe = float(x.norm())
            ratio = e / (2 * pe + tiny)
            key = (str(dtype)[6:], path, n)
            if ratio >= worst.get(key, (0, ''))[0]:
                worst[key] = (ratio, name)
            if not ok or not ratio <= 1:
                row.append(f"{n} {e:.2e} (plain {pe:.2e})")
        same = True
        for turn in range(repeat):
            kernels.order(1 + turn + repeat * number)
            o2, l2 = kernels.forward(*inputs, *full, path=path)
            g2 = kernels.backward(*inputs, out, lse, dout, *full, path=path)
            pairs = zip((out, lse, *grads[:3]), (o2, l2, *g2[:3]))
            same = same and all(torch.equal(a, b) for a, b in pairs)
            if "1" not in case[6]:
                same = same and all(a is None or torch.equal(a, b) for a, b in zip(grads[3:], g2[3:]))
        kernels.order(0)
        if row or not same:
            failures += 1
            print("FAIL", name, "bits differ" if not same else "", "; ".join(row), flush=True)
    if not count:
        failures += 1
        print(f"FAIL no case of attention was run ({only or 'all'})", flush=True)
    print("largest error / allowed error, per precision and path:")
    for key in sorted({k[:2] for k in worst}, key=str):
        print(" ", key[0], f"sm{key[1]}", "  ".join(f"{n} {worst[(*key, n)][0]:.2f}" for n in NAMES if (*key, n) in worst))
    return failures


def check_wanted(kernels):
    """Whichever gradients are wanted, they have the bits that they have when all are."""
    failures = 0
    # Over more images on a device that has more to offer.
    for (B, N), path in itertools.product(((3, 129), (2, 72)) if kernels.emulated else ((5, 257), (5, 200)), (90, 80)):
        q, k, v = torch.randn(B, N, 3, 2, 64, device=kernels.device).bfloat16().permute(2, 0, 3, 1, 4)
        gain = torch.rand(1, 2, N, N, device=kernels.device)
        dout = torch.randn(B, N, 2, 64, device=kernels.device).bfloat16().transpose(1, 2)
        out, lse = kernels.forward(q, k, v, gain, path=path)
        everything = kernels.backward(q, k, v, out, lse, dout, gain, path=path)
        for need in ((1, 0, 0, 0), (0, 0, 0, 1), (1, 0, 0, 1), (0, 1, 1, 0), (1, 1, 1, 0), (0, 1, 0, 1)):
            some = kernels.backward(q, k, v, out, lse, dout, gain, path=path, need=(*need, 0, 0))
            if not all(x is None or torch.equal(x, y) for x, y in zip(some, everything)):
                failures += 1
                print(f"FAIL gradients wanted {need}, {N} tokens, sm{path}", flush=True)
    return failures


def check_not_numbers(kernels):
    """A gain that is not a number reaches the rows that it stands in, and no others of the output, and all keys of its head."""
    failures = 0
    for dtype, path in (*itertools.product((torch.bfloat16, torch.float16), (80, 90)), (torch.float32, 80)):
        q, k, v = torch.randn(2, 130, 3, 2, 64, device=kernels.device).to(dtype).permute(2, 0, 3, 1, 4)
        gain = torch.rand(1, 2, 130, 130, device=kernels.device)
        gain[0, 1, 100, 7] = math.nan
        out, lse = kernels.forward(q, k, v, gain, path=path)
        dv = kernels.backward(q, k, v, out, lse, torch.ones_like(out), gain, path=path)[2]
        rows = out.isnan().any(-1)  # [B,h,N]
        # Beside float16 the whole tile of 64 x 64 is none.
        expected = torch.zeros_like(rows)
        expected[:, 1, 64:128] = True
        reached = bool(rows[:, 1, 100].all()) and bool(lse[:, 1, 100].isnan().all()) and bool(dv[:, 1].isnan().all())
        if not reached or bool((rows & ~expected).any()):
            failures += 1
            print("FAIL not a number", dtype, f"sm{path}", flush=True)
    return failures


def check_far_curve(kernels):
    """log M where a curve of weight 0 lies far above the one that counts, and where all decays are minus infinity."""
    ranks = torch.arange(200, device=kernels.device).repeat(2, 1).view(1, 2, 1, 200).int()
    weight = torch.tensor([[0.0], [1.0]], device=kernels.device)
    log_decay = torch.tensor([[-0.01], [-1.0]], device=kernels.device)
    out = kernels.mask_forward(ranks, log_decay, weight, log_space=True)
    far = (ranks[0, 0, 0][:, None] - ranks[0, 0, 0][None]).abs().float()
    gradient = kernels.mask_backward(torch.ones_like(out), ranks, log_decay, weight, log_space=True)[0]
    nothing = kernels.mask_forward(ranks, torch.full_like(log_decay, -math.inf), None, log_space=True)
    ok = (torch.allclose(out[0, 0], -far, rtol=1e-5, atol=1e-5)
          and torch.allclose(gradient[:, 0], torch.stack([far.sum() * 0, far.sum()]), rtol=1e-5)
          and bool((nothing[0, 0] == -math.inf).fill_diagonal_(True).all()))
    if not ok:
        print("FAIL log M with a curve of weight 0, or of no decay", flush=True)
    return int(not ok)


def mask_reference(ranks, log_decay, weight, prefix, prefix_decay, log_space):
    G, C, A, N = ranks.shape
    far = (ranks[..., :, None] - ranks[..., None, :]).abs().to(log_decay.dtype)  # [G,C,A,N,N]
    if log_decay.dim() == 3:
        x = torch.einsum("gcanm,cah->gchnm", far, log_decay)
    else:
        x = torch.einsum("gcnm,ch->gchnm", far.sum(2), log_decay)
    w = torch.full((C, log_decay.size(-1)), 1 / C, dtype=x.dtype, device=x.device) if weight is None else weight
    if log_space:
        m = torch.logsumexp(x + w.log()[None, :, :, None, None], 1)
    else:
        m = (w[None, :, :, None, None] * x.exp()).sum(1)
    size = prefix + N
    edge = torch.zeros(log_decay.size(-1), dtype=x.dtype, device=x.device) if prefix_decay is None else prefix_decay
    edge = edge if log_space else edge.exp()
    out = edge[None, :, None, None].expand(G, -1, size, size).clone()
    eye = torch.arange(prefix, device=x.device)
    out[:, :, eye, eye] = 0.0 if log_space else 1.0
    out[:, :, prefix:, prefix:] = m
    return out


def check_mask(kernels, only, tiles):
    failures = 0
    # spread 1: ranks are permutations, the gradient goes through histograms; 4: ranks with gaps; 0: with ties
    for spread, G, C, A, N, h, prefix, per_axis, weighted, learned, log_space, dtype in [
            (4, 1, 8, 1, 196, 6, 0, 0, 0, 0, 0, torch.float32), (4, 1, 8, 1, 196, 6, 1, 0, 1, 1, 0, torch.float32),
            (4, 2, 3, 2, 60, 12, 2, 1, 1, 1, 0, torch.float32), (4, 1, 8, 1, 100, 3, 1, 0, 1, 0, 1, torch.float32),
            (4, 2, 11, 3, 33, 9, 5, 1, 1, 1, 1, torch.float64), (4, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, torch.float32),
            (4, 3, 8, 2, 64, 16, 1, 0, 1, 1, 0, torch.float64), (4, 1, 8, 1, 1024, 6, 0, 0, 0, 0, 0, torch.float32),
            (1, 1, 8, 1, 196, 6, 1, 0, 1, 1, 0, torch.float32), (1, 1, 8, 1, 1024, 6, 0, 0, 0, 0, 0, torch.float32),
            (1, 3, 5, 1, 700, 3, 2, 0, 1, 1, 0, torch.float64), (1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, torch.float32),
            (1, 1, 3, 1, 4096, 2, 0, 0, 1, 0, 0, torch.float32), (1, 1, 2, 1, 2049, 1, 1, 0, 1, 0, 0, torch.float64),
            (1, 1, 8, 1, 5000, 1, 0, 0, 0, 0, 0, torch.float32), (0, 1, 3, 1, 300, 2, 0, 0, 1, 0, 0, torch.float32),
            (1, 2, 3, 2, 60, 12, 2, 1, 1, 1, 0, torch.float32), (0, 1, 2, 2, 400, 3, 1, 0, 1, 1, 0, torch.float32)]:
        name = (f"mask ranks{spread} G{G} C{C} A{A} N{N} h{h} P{prefix} axis{per_axis} w{weighted} cls{learned} "
                f"log{log_space} {dtype}")
        if (only and only not in name) or not small_enough(kernels, G * h * C * (prefix + N) ** 2 // 3, tiles):
            continue
        g = torch.Generator(kernels.device).manual_seed(7)
        ranks = torch.stack([torch.randperm(max(spread, 1) * N, generator=g, device=kernels.device)[:N] for _ in range(G * C * A)])
        ranks = ranks if spread else ranks // 2
        ranks = ranks.view(G, C, A, N).int()
        shape = (C, A, h) if per_axis else (C, h)
        rand = lambda *s: torch.rand(*s, generator=g, device=kernels.device, dtype=torch.float64)
        leaves = [-min(0.05, 10 / N) * rand(*shape), rand(C, h) + 0.1 if weighted else None, -rand(h) if learned else None]
        leaves = [None if x is None else x.to(dtype) for x in leaves]
        size = prefix + N
        dout = torch.randn(G, h, size, size, generator=g, device=kernels.device, dtype=torch.float64).to(dtype)

        def reference(t):
            x = [None if y is None else y.to(t).requires_grad_() for y in leaves]
            out = mask_reference(ranks, x[0], x[1], prefix, x[2], bool(log_space))
            used = [y for y in x if y is not None]
            grads = iter(torch.autograd.grad(out, used, dout.to(t), allow_unused=True))
            return [out.detach()] + [None if y is None else next(grads) for y in x]

        ref, base = reference(torch.float64), reference(dtype)
        args = (ranks, leaves[0], leaves[1], prefix, leaves[2], bool(log_space))
        ours = [kernels.mask_forward(*args), *kernels.mask_backward(dout, *args)]
        kernels.order(3)
        again = [kernels.mask_forward(*args), *kernels.mask_backward(dout, *args)]
        kernels.order(0)
        tiny = 3e-7 if dtype == torch.float32 else 1e-14
        row = []
        for n, x, r, p, y in zip(("out", "dlog_decay", "dweight", "dprefix"), ours, ref, base, again):
            if x is None:
                continue
            if r is None:
                r = torch.zeros_like(x).double()
                p = r
            if float(r.norm()) == 0:
                e, pe = float(x.norm()), float(p.norm())
            else:
                e, pe = error(x, r), error(p, r)
            if not e <= 2 * pe + tiny or not torch.equal(x, y):
                row.append(f"{n} {e:.2e} (plain {pe:.2e}){'' if torch.equal(x, y) else ' bits differ'}")
        if row:
            failures += 1
            print("FAIL", name, "; ".join(row), flush=True)
    return failures


def check_smaller_devices(kernels):
    """Where blocks have less shared memory, as on Ampere and on its smaller chips, kernels take other tiles or gather from the
    cache."""
    failures = 0
    for kib in (163, 99):
        kernels.offer_shared(kib << 10)
        failures += check_mask(kernels, "", 12) + check_gain(kernels, "", 12) + check_attention(kernels, 1, "sm80", 4)
    kernels.offer_shared(227 << 10)
    return failures


def check_far_ranks(kernels):
    """Whatever comes of distances that 32 bits do not hold: no kernel looks beyond its rows of powers."""
    failures = 0
    ranks = torch.arange(8, dtype=torch.int32, device=kernels.device)
    far, low = ranks.clone(), ranks.clone()
    far[3], low[3] = 2**31 - 1, -(2**31)
    for name, axes in (("one axis", [low]), ("two axes", [far, far])):
        ranks = torch.stack(axes)[None, None]
        decay = torch.full((1, 2), -0.1, device=kernels.device)
        out = kernels.mask_forward(ranks, decay)
        gradient = kernels.mask_backward(torch.ones_like(out), ranks, decay)[0]
        if not (bool(torch.isfinite(out).all()) and bool(torch.isfinite(gradient).all())):
            failures += 1
            print(f"FAIL far ranks, {name}: {out[0, 0, 3].tolist()}, {gradient.tolist()}", flush=True)
    return failures


def check_scratch(kernels):
    """At most twice the table or 64 MiB, the gain coming packed in 16 bits, of however many images. Over few heads and many
    tokens strips alone are more; such a call is not cut into pieces for nothing."""
    failures = 0
    shapes = ((64, 6, 1024), (64, 6, 1025), (64, 6, 1370), (64, 3, 1370), (128, 3, 1370), (64, 12, 1370), (4, 12, 4096),
              (16, 6, 2305), (256, 6, 197), (32, 16, 577), (1, 6, 1025), (128, 6, 1025), (512, 6, 1025), (4096, 6, 1024),
              (8192, 6, 197), (16384, 6, 65), (2999, 12, 197))
    for (B, h, N), d, (dtype, path) in itertools.product(
            shapes, (64, 128), ((torch.bfloat16, 90), (torch.bfloat16, 80), (torch.float32, 80), (torch.float64, 80))):
        allowed = max(2 * h * N * N * (8 if dtype == torch.float64 else 4), 64 << 20)
        used = kernels.backward_scratch(B, h, N, d, path, dtype)
        if used > allowed:
            failures += 1
            print(f"FAIL scratch of {B} x {h} x {N} x {d}, {dtype}, sm{path}: {used / 1e6:.1f} MB, {allowed / 1e6:.1f} allowed",
                  flush=True)
    for B, h, N in ((16, 3, 1601), (256, 3, 1601), (1024, 1, 2305)):
        used, whole = kernels.backward_scratch(B, h, N), kernels.backward_scratch(B, h, N, room=1 << 40)
        if used != whole or used > 2 * max(2 * h * N * N * 4, 64 << 20):
            failures += 1
            print(f"FAIL scratch of {B} x {h} x {N}: {used / 1e6:.1f} MB, {whole / 1e6:.1f} of all images at once", flush=True)
    return failures


def check_pieces(kernels):
    """Images that come in pieces because scratch has no room for all at once: their gradients are the same but for the order of
    keys, and so are those of the tables but for the order of images."""
    failures = 0
    # Sums in place and padded, a tail, tables for groups of images; a last piece with fewer images. More on a real device.
    cases = [(9, 1, 64, 128, 1, "g", torch.bfloat16, 90), (40, 1, 129, 17, 1, "g", torch.float16, 90),
             (80, 1, 70, 17, 2, "g", torch.bfloat16, 90), (90, 1, 64, 17, 1, "gs", torch.bfloat16, 80),
             (90, 1, 40, 10, 2, "g", torch.float16, 80), (90, 2, 20, 9, 1, "gb", torch.float32, 80),
             (90, 1, 20, 9, 2, "gbs", torch.float64, 80)]
    if not kernels.emulated:
        cases += [(16384, 6, 65, 65, 1, "g", torch.bfloat16, 90), (8202, 6, 193, 193, 2, "g", torch.bfloat16, 90),
                  (512, 6, 1025, 1025, 1, "g", torch.bfloat16, 90), (30000, 6, 130, 130, 1, "gs", torch.bfloat16, 80)]
    for B, h, nq, nk, G, names, dtype, path in cases:
        inputs, tables, dout = make((B, h, nq, nk, 64, G, names, "tokens"), dtype, 5, kernels.device)
        out, lse = kernels.forward(*inputs, *tables, path=path)
        gain = tables[0]
        all_at_once = kernels.backward(*inputs, out, lse, dout, *tables, path=path, room=1 << 40)
        most, room = kernels.scratch, 0
        if B < 512:  # as much as less than half of the images take
            part = (x[: B // G // 3 * G] for x in (*inputs, out, lse, dout))
            kernels.backward(*part, *tables, path=path, room=1 << 40)
            room = kernels.scratch + 4 * 3 * gain.numel() * (2 if dtype == torch.float64 else 1) + 768
        pieces = kernels.backward(*inputs, out, lse, dout, *tables, path=path, room=room)
        again = kernels.backward(*inputs, out, lse, dout, *tables, path=path, room=room)
        wrong = [] if kernels.scratch < most else [f"scratch {kernels.scratch} of {most}"]
        for name, x, y, z in zip(NAMES[2:], pieces, all_at_once, again):
            if x is None:
                continue
            allowed = 2e-6 if name in NAMES[5:] else 3e-4 if dtype in (torch.bfloat16, torch.float16) and path == 90 else 0
            if not (torch.equal(x, z) and error(x, y.double()) <= allowed):
                wrong.append(f"{name} {error(x, y.double()):.1e}")
        if wrong:
            failures += 1
            print(f"FAIL pieces of {B} x {h} x {nq} x {nk}, G{G}, {names}, {dtype}, sm{path}:", "; ".join(wrong), flush=True)
    return failures


def check_choice(kernels):
    """Which heads the Hopper kernels take: multiples of 8 up to 128 at addresses that bulk copies can read. And when their
    forward pass reads a table as it is, without scratch for records: few images, keys in fours."""
    reads = {(B, N, d): kernels.forward_scratch(B, 12, N, d) == 0 for B in (2, 3, 16, 17, 64, 65) for N in (197, 1024, 4096)
             for d in (64, 80)}
    wrong = [case for case, yes in reads.items()
             if yes != (case[1] % 4 == 0 and case[2] == 64 and 3 <= case[0] <= max(16, case[1] // 64))]
    wrong += [d for d in range(1, 140) if kernels.takes_sm90(d) != [d % 8 == 0 and d <= 128] * 2]
    wrong += ["addresses"] if any(kernels.takes_sm90(64, (1 << 20) + 8)) else []
    if wrong:
        print("FAIL choice of kernels:", wrong, flush=True)
    return len(wrong)


def check_gain(kernels, only, tiles):
    """Gains that masks make, as records: within what 16 bits resolve of float64; their gradients as good as float32's."""
    failures = 0
    for spread, G, C, N, h, prefix, weighted, learned, scaled, offset, dtype in [
            (1, 1, 8, 196, 6, 1, 0, 0, 1, 0, torch.bfloat16), (1, 1, 8, 196, 6, 0, 0, 0, 0, 0, torch.bfloat16),
            (1, 1, 8, 1024, 3, 1, 1, 1, 1, 1, torch.bfloat16), (1, 1, 8, 1024, 3, 0, 1, 0, 1, 0, torch.float16),
            (4, 2, 3, 60, 5, 2, 1, 1, 1, 1, torch.float16), (1, 1, 1, 1, 1, 0, 0, 0, 1, 0, torch.bfloat16),
            (1, 1, 19, 150, 2, 70, 1, 1, 1, 0, torch.float16), (0, 3, 9, 300, 4, 5, 1, 1, 1, 0, torch.bfloat16),
            (1, 1, 2, 4096, 1, 0, 0, 0, 1, 0, torch.bfloat16), (1, 1, 4, 64, 2, 0, 0, 0, 1, 1, torch.bfloat16),
            (1, 1, 2, 200, 3, 1, 0, 1, 1, 0, torch.bfloat16), (1, 1, 9, 70, 2, 70, 1, 1, 1, 0, torch.bfloat16)]:
        name = f"gain ranks{spread} G{G} C{C} N{N} h{h} P{prefix} w{weighted} cls{learned} alpha{scaled} +{offset} {dtype}"
        if (only and only not in name) or not small_enough(kernels, G * h * C * (prefix + N) ** 2 // 3, tiles):
            continue
        g = torch.Generator(kernels.device).manual_seed(7)
        ranks = torch.stack([torch.randperm(max(spread, 1) * N, generator=g, device=kernels.device)[:N] for _ in range(G * C)])
        ranks = (ranks if spread else ranks // 2).view(G, C, 1, N).int()
        rand = lambda *s: torch.rand(*s, generator=g, device=kernels.device)
        leaves = [-min(0.05, 10 / N) * rand(C, h), rand(C, h) - 0.2 if weighted else None, -rand(h) if learned else None,
                  2 * rand(h) - 1 if scaled else None]
        if C > 1:
            leaves[0][0, 0] = -math.inf  # only a token itself
        size = prefix + N
        dgain = torch.randn(G, h, size, size, generator=g, device=kernels.device)

        def reference(t):
            x = [None if y is None else y.to(t).requires_grad_() for y in leaves]
            table = mask_reference(ranks, x[0].clamp_min(-1e4), x[1], prefix, x[2], False)
            table = (table if x[3] is None else table * x[3][:, None, None]) + offset
            used = [y for y in x if y is not None]
            grads = iter(torch.autograd.grad(table, used, dgain.to(t), allow_unused=True))
            return [table.detach()] + [None if y is None else next(grads) for y in x]

        ref, base = reference(torch.float64), reference(torch.float32)
        args = (ranks, leaves[0], leaves[1], prefix, leaves[2], leaves[3], offset)
        records = kernels.gain_forward(dtype, *args)
        table, allowed = unpacked(records, dtype, size)
        wrong = float(((table - ref[0]).abs() - allowed - 2e-6 * ref[0].abs()).max())
        row = [] if wrong <= 0 else [f"out: {wrong:.2e} more than 16 bits may differ"]
        grads = kernels.gain_backward(dgain, *args[:-1])
        # The same from layers of a head each.
        kernels.order(4)
        again = kernels.gain_backward([x.contiguous() for x in dgain.split(1, 1)], *args[:-1])
        for n, x, r, p, y in zip(("dlog_decay", "dweight", "dprefix", "dalpha"), grads, ref[1:], base[1:], again):
            if x is None:
                continue
            r, p = (torch.zeros_like(x).double() if t is None else t for t in (r, p))
            e, pe = (error(t, r) if float(r.norm()) else float(t.norm()) for t in (x, p))
            if not e <= 2 * pe + 2e-6 or not torch.equal(x, y):
                row.append(f"{n} {e:.2e} (plain {pe:.2e}){'' if torch.equal(x, y) else ' bits differ'}")
        if not torch.equal(records, kernels.gain_forward(dtype, *args)):
            row.append("records: bits differ")
        kernels.order(0)
        if row:
            failures += 1
            print("FAIL", name, "; ".join(row), flush=True)
    return failures


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("library")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", default="")
    parser.add_argument("--tiles", type=int, default=40, help="an emulated device takes cases up to so many tiles of 64 x 64")
    args = parser.parse_args()
    kernels = Kernels(args.library)
    if not kernels.emulated and not torch.cuda.is_available():
        failures = check_scratch(kernels) + check_choice(kernels)  # of a device as large as an H200
        if not failures:
            print("scratch and choice are right; no CUDA device: the GPU tests are skipped")
        return 1 if failures else 0
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    failures = check_mask(kernels, args.only, args.tiles) + check_gain(kernels, args.only, args.tiles)
    failures += check_rows(kernels, args.only)
    failures += check_attention(kernels, args.repeat, args.only, args.tiles)
    if kernels.emulated and not args.only:
        failures += check_smaller_devices(kernels)
    if not args.only:
        failures += check_far_ranks(kernels)
        failures += check_wanted(kernels) + check_not_numbers(kernels) + check_far_curve(kernels) + check_scratch(kernels)
        failures += check_pieces(kernels) + check_choice(kernels)
    print("failures:", failures)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
