"""The operators: masked attention and decay masks, with complete gradients; rows of attention maps without.

They are registered with torch, so they work under autograd, autocast, ``torch.compile(fullgraph=True)`` and
``torch.export``. Nothing of size B x h x N x N is stored, forward or backward.
"""

from __future__ import annotations

import functools
import operator
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import _library  # noqa: F401  the operators
from .curves import Curves, text
from .errors import Error, tensor, whole

#: Ways to combine a mask M with attention logits A: see :func:`compose`.
STRATEGIES = ("mul_v1", "mul_v2", "add_v1", "mul_after_sm", "add_after_sm", "log")


def _check(needed: dict[str, Any], optional: dict[str, Any], scale: Any = None) -> None:
    """Torch shows the contents of an argument of another type, over many lines, and takes None for a tensor."""
    for name, value in needed.items():
        tensor(name, value)
    for name, value in optional.items():
        if value is not None:
            tensor(name, value)
    if not (scale is None or isinstance(scale, (float, int)) or hasattr(type(scale), "__float__")):
        raise Error(f"scale is {scale!r}; expected a number, or None for 1/sqrt(d)")


def _prefix(value: Any) -> Any:
    """As it is where it may be: a symbolic number stays one."""
    return value if isinstance(value, (int, torch.SymInt)) else whole("prefix", value)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gain: Tensor | None = None,
    bias: Tensor | None = None,
    gate: Tensor | None = None,
    scale: float | None = None,
    handle: Tensor | None = None,
) -> Tensor:
    """( softmax( scale * q k^T * gain + bias ) * gate ) v

    q [B,h,Nq,d], k and v [B,h,Nk,d]: unit stride in d, any other strides. gain, bias, gate: [h or 1,Nq,Nk], or with G in
    front, where image b uses table b mod G. scale: 1/sqrt(d) unless given. Returns [B,h,Nq,d], laid out in memory as
    [B,Nq,h,d]. handle: what takes the gradient of a packed gain (:func:`decay_gain`).

    >>> q = torch.ones(2, 3, 5, 8)
    >>> attention(q, q, q, gain=torch.ones(3, 5, 5)).shape
    torch.Size([2, 3, 5, 8])
    """
    _check({"q": q, "k": k, "v": v}, {"gain": gain, "bias": bias, "gate": gate, "handle": handle}, scale)
    return torch.ops.violin.attention(q, k, v, gain, bias, gate, scale, handle)


def attention_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gain: Tensor | None = None,
    bias: Tensor | None = None,
    gate: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The same, and the log-sum-exp of each row, [B,h,Nq], from which :func:`attention_rows` computes rows of the map; it
    has no gradient."""
    _check({"q": q, "k": k, "v": v}, {"gain": gain, "bias": bias, "gate": gate}, scale)
    return torch.ops.violin.attention_with_lse(q, k, v, gain, bias, gate, scale)


def attention_qkv(
    qkv: Tensor,
    gain: Tensor | None = None,
    bias: Tensor | None = None,
    gate: Tensor | None = None,
    scale: float | None = None,
    handle: Tensor | None = None,
) -> Tensor:
    """The same for a packed projection qkv [B,N,3,h,d]: no copy on the way in, one packed gradient on the way back.

    Returns [B,N,h,d], contiguous.

    >>> attention_qkv(torch.ones(2, 5, 3, 4, 8)).shape
    torch.Size([2, 5, 4, 8])
    """
    _check({"qkv": qkv}, {"gain": gain, "bias": bias, "gate": gate, "handle": handle}, scale)
    return torch.ops.violin.attention_qkv(qkv, gain, bias, gate, scale, handle)


@functools.cache
def _packs_gains() -> bool:
    has_kernels = torch._C._dispatch_has_kernel_for_dispatch_key("violin::_pack_gain", "CUDA")
    return has_kernels and os.environ.get("VIOLIN_PATH") != "reference"


@torch.compiler.assume_constant_result
def packs_gains() -> bool:
    """Whether this build has kernels that read packed gains, and may use them. Like the library, it asks VIOLIN_PATH once."""
    return _packs_gains()


def _check_gpu(name: str, tensor: Tensor) -> None:
    if not tensor.is_cuda and not tensor.is_meta:
        raise Error(f"{name}: the tensors are on {tensor.device}; expected a GPU (elsewhere attention takes a table)")


def pack_gain(gain: Tensor, dtype: torch.dtype) -> Tensor:
    """A gain on a GPU in the 16-bit form that the kernels read beside q, k, v of this type (float16 or bfloat16): about
    half as large for long sequences, and what the attention operators otherwise make of it in each call. It can be their
    ``gain``, without gradient."""
    _check({"gain": gain}, {})
    _check_gpu("pack_gain", gain)
    return torch.ops.violin._pack_gain(gain, gain.new_empty((), dtype=dtype))


def attention_rows(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    rows: Tensor,
    gain: Tensor | None = None,
    bias: Tensor | None = None,
    gate: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Rows of the attention map: for query tokens ``rows`` (int64 [R]) the weights that multiply v, [B,h,R,Nk]. To look
    at: a backward pass through them is an error."""
    _check({"q": q, "k": k, "lse": lse, "rows": rows}, {"gain": gain, "bias": bias, "gate": gate}, scale)
    return torch.ops.violin.attention_rows(q, k, lse, rows, gain, bias, gate, scale)


def decay_mask(
    ranks: Tensor,
    log_decay: Tensor,
    weight: Tensor | None = None,
    prefix: int = 0,
    prefix_decay: Tensor | None = None,
    log_space: bool = False,
) -> Tensor:
    """M[h,i,j] = sum over curves c of w[c,h] * gamma[c,h] ** |ranks[c,i] - ranks[c,j]|

    ranks int32 [C,N], [C,A,N] (axes add up to a distance) or [G,C,A,N] (each sample its own tokens); log_decay [C,h], or
    [C,A,h] for one decay per axis: log gamma, ``logsigmoid(beta)`` and never ``log(sigmoid(beta))``; weight [C,h]: 1/C
    unless given. The first ``prefix`` tokens have rows and columns of ones, or exp(prefix_decay [h]). log_space: log M,
    computed without underflow. Returns [h,P+N,P+N], with G in front where ranks have it.

    >>> from violin import curves
    >>> decay_mask(curves.ranks("snake", (1, 3))[None], torch.full((1, 1), 0.5).log())
    tensor([[[1.0000, 0.5000, 0.2500],
             [0.5000, 1.0000, 0.5000],
             [0.2500, 0.5000, 1.0000]]])
    """
    _check({"ranks": ranks, "log_decay": log_decay}, {"weight": weight, "prefix_decay": prefix_decay})
    return torch.ops.violin.decay_mask(ranks, log_decay, weight, _prefix(prefix), prefix_decay, log_space)


def decay_gain(
    ranks: Tensor,
    log_decay: Tensor,
    weight: Tensor | None = None,
    prefix: int = 0,
    prefix_decay: Tensor | None = None,
    alpha: Tensor | None = None,
    plus_one: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor]:
    """The gain alpha[h] * M, or 1 + that, of :func:`decay_mask`'s M on a GPU, packed for q, k, v of ``dtype`` (float16 or
    bfloat16) at once: the table itself never exists. Also a handle of the table's shape without numbers. The attention
    operators take both, ``gain`` and ``handle``, and the gradient comes back through the handle.

    One axis (ranks [C,N], [C,1,N] or [G,C,1,N]), each rank from 0 to 2**23 - 1, parameters in float32.
    """
    optional = {"weight": weight, "prefix_decay": prefix_decay, "alpha": alpha}
    _check({"ranks": ranks, "log_decay": log_decay}, optional)
    _check_gpu("decay_gain", log_decay)
    return torch.ops.violin._decay_gain(ranks, log_decay, weight, _prefix(prefix), prefix_decay, alpha, plus_one, dtype)


def curve_ranks(curves: Curves, grid: Sequence[int], device: torch.device | str | None = None) -> Tensor:
    """Ranks of curves on a grid (height, width) or (frames, height, width), ready for decay_mask: int32 [C,A,N]."""
    where = torch.device(device) if device is not None else None
    try:
        sides = [operator.index(side) for side in grid]
    except TypeError:
        raise Error(f"grid is {grid!r}; expected (height, width) or (frames, height, width), whole numbers") from None
    return torch.ops.violin.curve_ranks(text(curves), sides, device=where)


def check_strategy(name: str) -> str:
    if name not in STRATEGIES:
        raise Error(f"unknown masking strategy {name!r}; there are {', '.join(STRATEGIES)}")
    return name


def _broadcast(one: Sequence[int], other: Sequence[int]) -> bool:
    return all(a == b or 1 in (a, b) for a, b in zip(reversed(one), reversed(other)))


def compose(
    strategy: str, mask: Tensor, alpha: Tensor | None = None
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Tables (gain, bias, gate, after) of a strategy, from a mask [h,N,N] (log M for ``log``) and alpha [h] or 1.

    ==============  =================================  ==============
    mul_v1          softmax(A * alpha M) V             gain
    mul_v2          softmax(A * (1 + alpha M)) V       gain
    add_v1          softmax(A + alpha M) V             bias
    mul_after_sm    (softmax(A) * alpha M) V           gate
    add_after_sm    softmax(A) V + (alpha M) V         after
    log             softmax(A + alpha log M) V         bias
    ==============  =================================  ==============
    """
    check_strategy(strategy)
    _check({"mask": mask}, {"alpha": alpha})
    if alpha is not None and not _broadcast(alpha.shape, mask.shape[:-2]):
        raise Error(f"alpha is {list(alpha.shape)}; expected one number, or one per head of the mask, {list(mask.shape)}")
    scaled = mask if alpha is None else mask * alpha[..., None, None]
    if strategy == "mul_v1":
        return scaled, None, None, None
    if strategy == "mul_v2":
        return scaled + 1, None, None, None
    if strategy in ("add_v1", "log"):
        return None, scaled, None, None
    if strategy == "mul_after_sm":
        return None, None, scaled, None
    return None, None, None, scaled
