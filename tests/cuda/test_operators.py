"""The operators on a CUDA device: python3 tests/cuda/test_operators.py [build/libviolin_ops.so] [--repeat N] [--emulated LIBRARY]

Every case of tests/attention_cases.json against float64 (the error may be twice that of the plain formula in the same precision,
in norm and at its largest, plus a few roundings),
the same bits on every run under changing load, other streams, a CUDA graph, gradients in float64 by differences, the checks of
torch.library. VIOLIN_PATH=sm80 or reference runs the same on the other paths. Without a device it says so and succeeds.

--emulated libviolin_cuda_emulated.so: on the processor, whose tensors then go the way of CUDA tensors down to the kernels; the
smaller cases only, and without what only a device has.
"""
import argparse
import ctypes
import itertools
import json
import math
import os
import sys
import threading

import torch

from kernels import start_emulator

HERE = os.path.dirname(os.path.abspath(__file__))
EPSILON = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-23, torch.float64: 2.0**-52}
NAMES = ("out", "dq", "dk", "dv", "dgain", "dbias", "dgate")
FAILURES = []
DEVICE = "cuda"
EMULATED = None  # the library of the emulated device that is used instead of a GPU
MOST_TILES = 8  # of 64 x 64 logits that a case may have there


def on_device(large, small):
    """Sizes for a GPU, or for an emulated one."""
    return small if EMULATED else large


def order(seed):
    """In which order an emulated device runs its threads; a GPU takes its own."""
    if EMULATED:
        EMULATED.emulator_order(seed)


def check(condition, what):
    if not condition:
        FAILURES.append(what)
        print("FAIL", what, flush=True)


def expand(table):
    for case in table["cases"]:
        full = {**table["defaults"], **case}
        lists = [k for k, v in full.items() if isinstance(v, list) and (k != "beta" or isinstance(v[0], list))]
        for choice in itertools.product(*(full[k] for k in lists)):
            chosen = {**full, **dict(zip(lists, choice))}
            chosen["name"] = ", ".join([full["name"]] + [f"{k} {v}" for k, v in zip(lists, choice)])
            yield chosen


def decay_mask(case, wide):
    """[h,N,N] from the curves of the package on a grid near to a square, with prefix tokens."""
    tokens = case["queries"] - case["prefix"]
    height = max(x for x in range(1, int(math.sqrt(tokens)) + 1) if tokens % x == 0)
    ranks = torch.ops.violin.curve_ranks("violin", [height, tokens // height]).to(DEVICE)
    low, high = case["beta"]
    beta = torch.linspace(low, high, ranks.size(0) * case["heads"], dtype=torch.float64).view(ranks.size(0), -1)
    log_decay = -torch.nn.functional.softplus(-beta)
    return torch.ops.violin.decay_mask(ranks, log_decay.to(DEVICE, wide), None, case["prefix"])


def make(case, seed):
    """The same on every device."""
    g = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, case["dtype"])
    wide = torch.promote_types(dtype, torch.float32)
    B, h, nq, d = case["batch"], case["heads"], case["queries"], case["dim"]
    nk = case["keys"] or nq
    rand = lambda *s: torch.randn(*s, generator=g).to(DEVICE)
    layout = case["layout"]
    if layout == "packed" and nq == nk:
        q, k, v = rand(B, nq, 3, h, d).to(dtype).permute(2, 0, 3, 1, 4)
    elif layout == "tokens":
        q, k, v = (rand(B, n, h, d).to(dtype).transpose(1, 2) for n in (nq, nk, nk))
    elif layout == "padded":
        q, k, v = (rand(B, h, n, d + 3).to(dtype)[..., :d] for n in (nq, nk, nk))
    else:
        q, k, v = (rand(B, h, n, d).to(dtype) for n in (nq, nk, nk))
    q = q * case["magnitude"] if case["magnitude"] != 1 else q
    dout = rand(B, h, nq, d).to(dtype)
    th = 1 if case["heads_of_tables"] == "one" else h
    shape = ((case["groups"],) if case["groups"] else ()) + (th, nq, nk)

    def table(kind):
        if kind is None:
            return None
        if kind == "mask":
            return decay_mask(case, wide)[:th].expand(shape).clone()
        t = torch.randn(shape, generator=g, dtype=torch.float64)
        if kind == "rows":
            t = t.masked_fill(torch.rand(shape, generator=g) < 0.2, -math.inf)
            t[..., :: max(1, nq // 3), :] = -math.inf
        return t.to(DEVICE, wide)

    tables = [table(case[n]) for n in ("gain", "bias", "gate")]
    strategy = case["strategy"]
    if strategy and strategy != "add_after_sm":
        m = decay_mask(case, wide) * torch.linspace(0.5, 1.5, h, device=DEVICE, dtype=wide)[:, None, None]
        slot = {"mul_v1": 0, "mul_v2": 0, "add_v1": 1, "mul_after_sm": 2, "log": 1}[strategy]
        tables[slot] = 1 + m if strategy == "mul_v2" else m.log() if strategy == "log" else m
    return [q, k, v], tables, dout, case["scale"]


def formula(q, k, v, tables, scale):
    wide = torch.promote_types(q.dtype, torch.float32)
    full = [None if t is None else t if t.dim() == 3 else t.repeat(q.size(0) // t.size(0), 1, 1, 1) for t in tables]
    z = (q @ k.transpose(-2, -1)).to(wide) * (q.size(-1) ** -0.5 if scale is None else scale)
    z = z if full[0] is None else z * full[0]
    z = z if full[1] is None else z + full[1]
    top = z.amax(-1, keepdim=True).detach()
    e = (z - top.masked_fill(top == -math.inf, 0)).exp()
    s = e.sum(-1, keepdim=True)
    w = e / s.masked_fill(s == 0, 1)
    w = w if full[2] is None else w * full[2]
    return w.to(q.dtype) @ v


def run(function, inputs, tables, dout, dtype):
    wide = torch.promote_types(dtype, torch.float32)
    x = [t.detach().to(dtype).requires_grad_() for t in inputs]
    y = [None if t is None else t.detach().to(wide).requires_grad_() for t in tables]
    out = function(*x, y)
    leaves = x + [t for t in y if t is not None]
    return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(dtype))]


def error(x, ref):
    x, ref = x.detach().double(), ref.detach()
    return float((x - ref).norm() / ref.norm())


def largest(x):
    return float(x.abs().max()) if x.numel() else 0.0


def allowed_error(x, plain, truth, unit):
    """Largest differences: twice the formula's, and 8 roundings of the largest value, or of `unit`. In 16 bits the result's own
    rounding instead, at the largest value: the formula's may have been lucky there. (In norm, luck evens out.)"""
    twice = 2 * largest(plain.double() - truth)
    if x.dtype in (torch.bfloat16, torch.float16):
        return twice + EPSILON[x.dtype] / 2 * largest(truth)
    return twice + 8 * EPSILON[x.dtype] * (largest(truth) + unit)


def cases_against_float64():
    count = 0
    with open(os.path.join(HERE, "..", "attention_cases.json")) as file:
        table = json.load(file)
    for number, case in enumerate(expand(table)):
        try:
            inputs, tables, dout, scale = make(case, number)
        except (ValueError, KeyError) as problem:
            check(False, f"{case['name']}: cannot be made: {problem}")
            continue
        dtype = inputs[0].dtype
        if inputs[0].numel() == 0 or inputs[1].numel() == 0:
            results = run(lambda q, k, v, t: torch.ops.violin.attention(q, k, v, *t, scale), inputs, tables, dout, dtype)
            wanted = [dout, *inputs, *(t for t in tables if t is not None)]
            check([x.shape for x in results] == [x.shape for x in wanted] and not any(map(largest, results)),
                  f"{case['name']}: what comes of nothing")
            count += 1
            continue
        slow = 5 if dtype in (torch.float32, torch.float64) else 1  # without products of whole tiles
        logits = inputs[0].numel() // inputs[0].size(3) * inputs[1].size(2)
        if slow * logits > on_device(math.inf, MOST_TILES << 12):
            continue
        ours = run(lambda q, k, v, t: torch.ops.violin.attention(q, k, v, *t, scale), inputs, tables, dout, dtype)
        order(number + 1)
        again = run(lambda q, k, v, t: torch.ops.violin.attention(q, k, v, *t, scale), inputs, tables, dout, dtype)
        order(0)
        plain = run(lambda q, k, v, t: formula(q, k, v, t, scale), inputs, tables, dout, dtype)
        ref = run(lambda q, k, v, t: formula(q, k, v, t, scale), inputs, tables, dout, torch.float64)
        names = [n for n, t in zip(NAMES, [1, 1, 1, 1, *tables]) if t is not None]
        # The gradient of a logit has numbers of size 1 that cancel; that of k has them times q.
        units = {"dk": max(1, case["magnitude"] * inputs[0].size(3) ** -0.5)}
        for what, x, y, p, r in zip(names, ours, again, plain, ref):
            finite = torch.isfinite(r)  # the formula's own gradient is not a number where a row has no key
            x, y, p, r = x[finite], y[finite], p[finite], r[finite]
            check(bool(torch.isfinite(x).all()), f"{case['name']}: {what} is not finite")
            e, allowed = largest(x.double() - r), allowed_error(x, p, r, units.get(what, 1))
            check(e <= allowed, f"{case['name']}: {what} differs by {e:.2e}, allowed {allowed:.2e}")
            e, tiny = (x.double() - r).norm(), 8 * EPSILON[torch.promote_types(dtype, torch.float32)] * (r.numel() ** 0.5)
            allowed = 2 * (p.double() - r).norm() + tiny * (largest(r) + units.get(what, 1))
            check(e <= allowed, f"{case['name']}: {what} differs in norm by {e:.2e}, allowed {allowed:.2e}")
            check(torch.equal(x, y), f"{case['name']}: {what} differs between two runs")
        count += 1
    check(count > 0, "no case was run")
    print("cases:", count)


def packed_equals_views():
    batch, tokens = on_device((5, 197), (2, 129))
    qkv = torch.randn(batch, tokens, 3, 4, 64, device=DEVICE).bfloat16().requires_grad_()
    gain = torch.rand(4, tokens, tokens, device=DEVICE).requires_grad_()
    out = torch.ops.violin.attention_qkv(qkv, gain)
    dout = torch.randn_like(out)
    one = torch.autograd.grad(out, (qkv, gain), dout)
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    two = torch.autograd.grad(torch.ops.violin.attention(q, k, v, gain).transpose(1, 2), (qkv, gain), dout)
    check(all(torch.equal(a, b) for a, b in zip(one, two)), "attention_qkv equals attention on views")


def packed_gains():
    """The gain is packed once for both passes: the same bits as with the table itself, gradients in the table's form."""
    if os.environ.get("VIOLIN_PATH") == "reference":
        return  # takes plain tables alone
    N = on_device(150, 66)
    for dtype in (torch.bfloat16, torch.float16):
        q, k, v = (torch.randn(4, 3, N, 64, device=DEVICE).to(dtype) for _ in range(3))
        dout = torch.randn(4, 3, N, 64, device=DEVICE).to(dtype)
        bias = torch.randn(2, 1, N, N, device=DEVICE)
        for shape in ((3, N, N), (1, N, N), (1, 3, N, N), (2, 3, N, N), (4, 1, N, N)):
            for other in (None, bias):
                if other is not None and len(shape) == 4 and shape[0] == 4:
                    continue  # two numbers of groups
                gain = torch.rand(shape, device=DEVICE, requires_grad=True)
                inputs = [x.clone().requires_grad_() for x in (q, k, v)]
                out = torch.ops.violin.attention(*inputs, gain, other)
                grads = torch.autograd.grad(out, [*inputs, gain], dout)
                plain, lse = torch.ops.violin._attention_forward(q, k, v, gain.detach(), other, None, None)
                expected = torch.ops.violin._attention_backward(dout, q, k, v, gain.detach(), other, None, plain, lse, None,
                                                                [True, True, True, True, False, False])
                check(torch.equal(out, plain), f"{dtype} {shape}: packed output")
                check(all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(grads, expected)),
                      f"{dtype} {shape}: packed gradients")
                packed = torch.ops.violin._pack_gain(gain.detach(), q)
                check(torch.equal(torch.ops.violin.attention(q, k, v, packed, other), plain), f"{dtype} {shape}: packed given")
        torch.library.opcheck(torch.ops.violin._pack_gain.default, (torch.rand(3, N, N, device=DEVICE), q))


def without_gradients():
    """Where nobody wants a gradient nothing is packed for the backward pass; few images read the table as it is."""
    tokens, batches = on_device((260, (2, 3, 16, 40)), (68, (2, 3, 17)))
    for dtype, batch in itertools.product((torch.bfloat16, torch.float16), batches):
        q, k, v = torch.randn(batch, tokens, 3, 2, 64, device=DEVICE).to(dtype).permute(2, 0, 3, 1, 4)
        gain = torch.rand(2, tokens, tokens, device=DEVICE).requires_grad_()
        kept = torch.ops.violin.attention(q, k, v, gain)
        with torch.no_grad():
            out, lse = torch.ops.violin.attention_with_lse(q, k, v, gain)
            same = torch.equal(out, torch.ops.violin.attention(q, k, v, gain))
            qkv = torch.stack((q, k, v), 2).permute(0, 3, 2, 1, 4)
            same = same and torch.equal(out, torch.ops.violin.attention_qkv(qkv, gain).transpose(1, 2))
            z = q.double() @ k.double().transpose(-2, -1) / 8 * gain.double()
            ref = z.softmax(-1) @ v.double()
        check(same, f"{dtype}, {batch} images: the operators agree without gradients")
        check(kept.requires_grad and not out.requires_grad, f"{dtype}, {batch} images: what is recorded")
        check(error(out, ref) <= 1.2 * error(kept, ref) and largest(lse - z.logsumexp(-1)) < 1e-3,
              f"{dtype}, {batch} images: {error(out, ref):.1e} without gradients, {error(kept, ref):.1e} with")


def gains_of_masks():
    """A gain packed as it is made of a mask's parameters gives what the table gives, forward and backward."""
    if os.environ.get("VIOLIN_PATH") == "reference":
        return
    ops = torch.ops.violin
    grid, batch = on_device(([12, 13], 6), ([8, 9], 2))
    ranks = ops.curve_ranks("violin", grid).to(DEVICE)
    heads, prefix, tokens = 3, 2, 2 + grid[0] * grid[1]
    for dtype, plus_one in ((torch.bfloat16, False), (torch.float16, True)):
        q, k, v, dout = (torch.randn(batch, heads, tokens, 64, device=DEVICE).to(dtype) for _ in range(4))
        qkv = torch.stack((q, k, v), 2).permute(0, 3, 2, 1, 4).contiguous()
        parameters = [-0.2 * torch.rand(8, heads, device=DEVICE), torch.rand(8, heads, device=DEVICE),
                      -torch.rand(heads, device=DEVICE), torch.rand(heads, device=DEVICE) + 0.5]
        leaves = [x.requires_grad_() for x in parameters]
        decay, weight, edge, alpha = leaves

        def by_table(x, packed_projection):
            gain = ops.decay_mask(ranks, decay, weight, prefix, edge) * alpha[:, None, None] + int(plus_one)
            return ops.attention_qkv(x[0], gain) if packed_projection else ops.attention(*x, gain)

        def by_handle(x, packed_projection):
            gain, handle = ops._decay_gain(ranks, decay, weight, prefix, edge, alpha, plus_one, dtype)
            if packed_projection:
                return ops.attention_qkv(x[0], gain, None, None, None, handle)
            return ops.attention(*x, gain, None, None, None, handle)

        for packed_projection in (False, True):
            inputs = [qkv.clone().requires_grad_()] if packed_projection else [x.clone().requires_grad_() for x in (q, k, v)]
            back = dout.transpose(1, 2) if packed_projection else dout
            expected = by_table(inputs, packed_projection)
            wanted = torch.autograd.grad(expected, [*inputs, *leaves], back)
            forms = [("eager", by_handle)]
            if not EMULATED:
                forms.append(("compiled", torch.compile(by_handle, fullgraph=True)))
            for name, function in forms:
                out = function(inputs, packed_projection)
                grads = torch.autograd.grad(out, [*inputs, *leaves], back)
                for n, x, y in zip(("out", *"xyz"[:len(inputs)], "decay", "weight", "edge", "alpha"), (out, *grads),
                                   (expected, *wanted)):
                    e = error(x, y.double())
                    check(x.shape == y.shape and e < 2e-3, f"{dtype} {name} gain of a mask, {n}: {e:.1e}")
            with torch.no_grad():
                check(torch.equal(by_handle(inputs, packed_projection), out), f"{dtype} gain of a mask without gradients")
        # Layers of a head each, of which the second has no part in the result: the same gain, and gradients of its own.
        gains, handles = ops._decay_gains(ranks, decay, weight, prefix, edge, alpha, plus_one, dtype, heads)
        gain, handle = ops._decay_gain(ranks, decay, weight, prefix, edge, alpha, plus_one, dtype)
        check(torch.equal(gains, gain) and len(handles) == heads, f"{dtype} gains of layers are one gain")
        some = [0, 2]
        parts = [ops.attention(q[:, i:i + 1], k[:, i:i + 1], v[:, i:i + 1], gains[:, i:i + 1], handle=handles[i]) for i in some]
        got = torch.autograd.grad(torch.cat(parts, 1), leaves, dout[:, some])
        only = torch.zeros_like(dout)
        only[:, some] = dout[:, some]
        wanted = torch.autograd.grad(ops.attention(q, k, v, gain, handle=handle), leaves, only)
        for n, x, y in zip(("decay", "weight", "edge", "alpha"), got, wanted):
            check(error(x, y.double()) < 1e-5, f"{dtype} gains of layers, {n}: {error(x, y.double()):.1e}")
        # Only some of the parameters want a gradient; other tables beside, whose gradients come in between.
        weight.requires_grad_(False)
        bias, gate = (torch.rand(2, heads, tokens, tokens, device=DEVICE).requires_grad_() for _ in range(2))
        gain = ops.decay_mask(ranks, decay, weight, prefix, None) * alpha[:, None, None] + int(plus_one)
        wanted = torch.autograd.grad(ops.attention(q, k, v, gain, bias, gate), [decay, alpha, bias, gate], dout)
        gain, handle = ops._decay_gain(ranks, decay, weight, prefix, None, alpha, plus_one, dtype)
        out = ops.attention(q, k, v, gain, bias, gate, None, handle)
        for n, x, y in zip(("decay", "alpha", "bias", "gate"), torch.autograd.grad(out, [decay, alpha, bias, gate], dout), wanted):
            e = error(x, y.double())
            check(x.shape == y.shape and e < 4e-3, f"{dtype} gain of a mask beside other tables, {n}: {e:.1e}")
        constants = [x.detach() for x in leaves]
        args = (ranks, *constants[:2], prefix, *constants[2:])
        torch.library.opcheck(ops._decay_gain_forward.default, (*args, plus_one, dtype))
        torch.library.opcheck(ops._decay_gain.default, (*args, plus_one, dtype),
                              test_utils=("test_schema", "test_faketensor"))  # a handle has no numbers to compare
        torch.library.opcheck(ops._decay_gain_backward.default,
                              ([torch.randn(1, tokens, tokens, device=DEVICE) for _ in range(heads)], *args, [True] * 4))
        torch.library.opcheck(ops._decay_gains.default, (*args, plus_one, dtype, heads),
                              test_utils=("test_schema", "test_faketensor"))


def other_threads():
    """A thread that has not used the device before."""
    q = torch.randn(5, 4, 197, 64, device=DEVICE).bfloat16()
    gain = torch.rand(4, 197, 197, device=DEVICE)
    torch.cuda.synchronize()
    results = []

    def once():
        out, lse = torch.ops.violin._attention_forward(q, q, q, gain, None, None, None)
        grads = torch.ops.violin._attention_backward(q, q, q, q, gain, None, None, out, lse, None,
                                                     [True, True, True, True, False, False])
        torch.cuda.synchronize()
        results.append([out, lse, *grads[:4]])

    once()
    thread = threading.Thread(target=once)
    thread.start()
    thread.join()
    check(len(results) == 2 and all(torch.equal(a, b) for a, b in zip(*results)), "another thread gives the same")


def same_bits(repeat):
    """Runs beside other work of varying size on other streams."""
    torch.manual_seed(1)
    q, k, v = (torch.randn(12, 3, 197, 64, device=DEVICE).bfloat16().requires_grad_() for _ in range(3))
    gain = torch.rand(3, 197, 197, device=DEVICE).requires_grad_()
    dout = torch.randn(12, 3, 197, 64, device=DEVICE).bfloat16()
    few = torch.randn(3, 4, 2, 512, 64, device=DEVICE).bfloat16()  # of few images the table is read as it is
    table = torch.rand(2, 512, 512, device=DEVICE)
    noise = torch.randn(2048, 2048, device=DEVICE)
    side = torch.cuda.Stream()

    def once():
        out = torch.ops.violin.attention(q, k, v, gain)
        return [out, *torch.autograd.grad(out, (q, k, v, gain), dout), *torch.ops.violin.attention_with_lse(*few, table)]

    first, bad = once(), 0
    for i in range(repeat):
        with torch.cuda.stream(side):
            for _ in range(i % 4):
                noise = torch.tanh(noise @ noise)
        bad += not all(torch.equal(a, b) for a, b in zip(first, once()))
    check(bad == 0, f"{bad} of {repeat} runs give other bits")


def streams_and_graphs():
    """The private operators, forward and backward, on another stream and in a captured graph."""
    q, k, v = (torch.randn(4, 3, 257, 64, device=DEVICE).bfloat16() for _ in range(3))
    dout = torch.randn(4, 3, 257, 64, device=DEVICE).bfloat16()
    ranks = torch.ops.violin.curve_ranks("violin", [16, 16]).to(DEVICE)
    decay = -0.1 * torch.rand(8, 3, device=DEVICE)

    def once():
        gain = torch.ops.violin._decay_mask_forward(ranks, decay, None, 1, None, False)
        out, lse = torch.ops.violin._attention_forward(q, k, v, gain, None, None, None)
        grads = torch.ops.violin._attention_backward(dout, q, k, v, gain, None, None, out, lse, None,
                                                     [True, True, True, True, False, False])
        ddecay = torch.ops.violin._decay_mask_backward(grads[3], ranks, decay, None, 1, None, False, [True, False, False])
        return [gain, out, lse, *grads[:4], ddecay[0]]

    expected = once()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        other = once()
    stream.synchronize()
    check(all(torch.equal(a, b) for a, b in zip(expected, other)), "another stream gives the same")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = once()
    for x in captured:
        x.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    check(all(torch.equal(a, b) for a, b in zip(expected, captured)), "a captured graph gives the same")


def gradients_by_differences():
    wide = dict(device=DEVICE, dtype=torch.float64)
    torch.manual_seed(2)
    nq, nk, d = on_device((7, 6, 5), (3, 2, 3))
    q, k, v = (torch.randn(2, 2, n, d, **wide).requires_grad_() for n in (nq, nk, nk))
    tables = [torch.randn(2, nq, nk, **wide).requires_grad_() for _ in range(3)]
    check(torch.autograd.gradcheck(torch.ops.violin.attention, (q, k, v, *tables)), "gradcheck of attention")
    ranks = torch.stack([torch.randperm(6) for _ in range(4)]).view(2, 2, 6).int().to(DEVICE)
    decay = (-torch.rand(2, 2, 3, **wide)).requires_grad_()
    weight = torch.rand(2, 3, **wide).requires_grad_()
    cls = (-torch.rand(3, **wide)).requires_grad_()
    for log_space in (False, True):
        check(torch.autograd.gradcheck(lambda a, b, c: torch.ops.violin.decay_mask(ranks, a, b, 2, c, log_space),
                                       (decay, weight, cls)), f"gradcheck of decay_mask, log_space {log_space}")
    args = tuple(t.detach().bfloat16().requires_grad_() for t in (q, k, v)) + (tables[0].detach().float().requires_grad_(),)
    torch.library.opcheck(torch.ops.violin.attention.default, args)
    if EMULATED:
        return
    compiled = torch.compile(lambda *a: torch.ops.violin.attention(*a) * 2, fullgraph=True)
    check(torch.equal(compiled(*args), torch.ops.violin.attention(*args) * 2), "compiled equals eager")


def mask_against_float64():
    for N, prefix, log_space in on_device(((196, 1, False), (100, 0, True), (1024, 0, False)), ((49, 1, False), (36, 0, True))):
        side = int(math.sqrt(N))
        ranks = torch.ops.violin.curve_ranks("violin", [side, N // side])
        beta = torch.linspace(-1, 9, 8 * 6, dtype=torch.float64).view(8, 6)
        decay = -torch.nn.functional.softplus(-beta)
        dmask = torch.randn(6, N + prefix, N + prefix, dtype=torch.float64)

        def once(device, dtype):
            x = decay.to(device, dtype).requires_grad_()
            m = torch.ops.violin.decay_mask(ranks.to(device), x, None, prefix, None, log_space)
            return [m.detach(), *torch.autograd.grad(m, x, dmask.to(device, dtype))]

        ref = once("cpu", torch.float64)
        for x, r in zip(once(DEVICE, torch.float32), ref):
            e = error(x.cpu(), r)
            check(e < 2e-6, f"decay_mask N={N} log_space={log_space}: error {e:.1e}")


def start_emulated(library, operators):
    """The device comes first, so that the operators find their kernels in it."""
    global DEVICE, EMULATED
    DEVICE = "cpu"
    EMULATED = ctypes.CDLL(os.path.abspath(library), ctypes.RTLD_GLOBAL)
    start_emulator(EMULATED)
    EMULATED.emulator_allow(ctypes.c_void_p(1 << 12), ctypes.c_size_t(1 << 62))  # tensors come and go unseen here
    torch.ops.load_library(os.path.abspath(operators))
    EMULATED.emulator_register()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("library", nargs="?", default="build/libviolin_ops.so")
    parser.add_argument("--repeat", type=int, default=1000)
    parser.add_argument("--emulated", metavar="LIBRARY")
    args = parser.parse_args()
    if not torch.cuda.is_available() and not args.emulated:
        print("no CUDA device: the GPU tests are skipped")
        return 0
    if args.emulated:
        start_emulated(args.emulated, args.library)
    else:
        torch.ops.load_library(os.path.abspath(args.library))
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    tests = [cases_against_float64, packed_equals_views, packed_gains, without_gradients, gains_of_masks, mask_against_float64,
             gradients_by_differences]
    if not args.emulated:
        tests += [other_threads, lambda: same_bits(args.repeat), streams_and_graphs]
    for test in tests:
        try:
            test()
        except Exception as problem:  # the other tests still say what they find
            check(False, f"{getattr(test, '__name__', 'test')}: {type(problem).__name__}: {str(problem)[:300]}")
    print("failures:", len(FAILURES))
    return 1 if FAILURES else 0


if __name__ == "__main__":
    sys.exit(main())
