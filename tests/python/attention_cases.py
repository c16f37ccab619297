"""The table of attention calls in tests/attention_cases.json, and the tensors of a case."""

import json
import math
import zlib
from pathlib import Path

import torch

TABLE = json.loads((Path(__file__).parent.parent / "attention_cases.json").read_text())
TABLE_NAMES = ("gain", "bias", "gate")


def expand(entry):
    """One dict for each choice among the entries of lists; a beta of two numbers is one value."""
    for key, value in entry.items():
        if isinstance(value, list) and (key != "beta" or isinstance(value[0], list)):
            for choice in value:
                yield from expand({**entry, key: choice, "name": f"{entry['name']}, {key} {choice}"})
            return
    yield entry


CASES = [case for entry in TABLE["cases"] for case in expand({**TABLE["defaults"], **entry})]


def log_decay(curves, heads, low, high, dtype=torch.float64):
    beta = torch.linspace(low, high, curves * heads, dtype=dtype).view(curves, heads)
    return -torch.nn.functional.softplus(-beta)


def ranks(tokens):
    height = math.isqrt(tokens)
    while height > 1 and tokens % height:
        height -= 1
    return torch.ops.violin.curve_ranks("violin", [height, tokens // height])


def decay_mask(case, log_space):
    r = ranks(case["queries"] - case["prefix"])
    decay = log_decay(8, case["heads"], *case["beta"])
    return torch.ops.violin.decay_mask(r, decay, None, case["prefix"], None, log_space)


def make_table(case, which):
    kind = case[which]
    if kind is None:
        return None
    heads = 1 if case["heads_of_tables"] == "one" else case["heads"]
    keys = case["queries"] if case["keys"] is None else case["keys"]
    shape = (max(case["groups"], 1), heads, case["queries"], keys)
    if kind == "mask":
        table = decay_mask(case, False).expand(shape).contiguous()
    elif which == "gain":
        table = torch.rand(shape, dtype=torch.float64) * 1.6 - 0.1
    elif which == "gate":
        table = torch.rand(shape, dtype=torch.float64) * 1.5
    else:
        table = torch.randn(shape, dtype=torch.float64)
    if kind == "rows":
        table[torch.rand(shape) < 0.2] = -torch.inf
        table[:, :, ::3] = -torch.inf
    return table if case["groups"] else table[0]


def make_tables(case):
    """gain, bias, gate in float64; None where there is none. What add_after_sm adds behind the softmax is left out."""
    strategy = case["strategy"]
    if strategy is None:
        return [make_table(case, which) for which in TABLE_NAMES]
    alpha = 1 + 0.3 * torch.randn(case["heads"], 1, 1, dtype=torch.float64)
    mask = alpha * decay_mask(case, strategy == "log")
    return {
        "mul_v1": [mask, None, None],
        "mul_v2": [1 + mask, None, None],
        "add_v1": [None, mask, None],
        "log": [None, mask, None],
        "mul_after_sm": [None, None, mask],
        "add_after_sm": [None, None, None],
    }[strategy]


def make_inputs(case, dtype=None):
    """q, k, v [B,h,N,d] in the case's layout, and its tables."""
    dtype = dtype or getattr(torch, case["dtype"])
    table_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    batch, heads, dim = case["batch"], case["heads"], case["dim"]
    queries = case["queries"]
    keys = queries if case["keys"] is None else case["keys"]
    torch.manual_seed(zlib.crc32(case["name"].encode()))

    def heads_of(tokens, factor=1.0):
        if case["layout"] == "tokens":
            return (torch.randn(batch, tokens, heads, dim) * factor).to(dtype).transpose(1, 2)
        if case["layout"] == "padded":
            return (torch.randn(batch, heads, tokens, dim + 5) * factor).to(dtype)[..., 3 : 3 + dim]
        return (torch.randn(batch, heads, tokens, dim) * factor).to(dtype)

    if case["layout"] == "packed":
        qkv = torch.randn(batch, queries, 3, heads, dim).to(dtype)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
    else:
        q, k, v = heads_of(queries, case["magnitude"]), heads_of(keys), heads_of(keys)
    return [q, k, v] + [None if t is None else t.to(table_dtype) for t in make_tables(case)]


def formula(q, k, v, gain=None, bias=None, gate=None, scale=None):
    """softmax(scale QK^T o gain + bias) o gate, times V, in float64; rows of the bias that are all -inf give zero."""
    q, k, v = q.double(), k.double(), v.double()

    def for_batch(table):
        if table is None or table.dim() == 3:
            return table
        return table.repeat(q.shape[0] // table.shape[0], 1, 1, 1)

    gain, bias, gate = map(for_batch, (gain, bias, gate))
    z = q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scale is None else scale)
    z = z if gain is None else z * gain
    z = z if bias is None else z + bias
    hopeless = (z == -torch.inf).all(-1, keepdim=True)
    p = torch.softmax(z.masked_fill(hopeless, 0), -1).masked_fill(hopeless, 0)
    return (p if gate is None else p * gate) @ v
