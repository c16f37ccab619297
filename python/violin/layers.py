"""Attention layers with a mask: drop-ins for timm's Attention and for torch's MultiheadAttention as self-attention.

The layers of a model share a :class:`~violin.grids.GridRecorder`, which tells them the patch grid of the current call.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from . import ops
from .errors import Error, sides, whole
from .grids import GridRecorder, product_type
from .mask import Tables, ViolinMask


def _autocasts(device: torch.device) -> bool:
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Autocast switched off, where the device has it: meta has none."""
    available = torch.amp.is_autocast_available(device.type)
    return torch.autocast(device.type, enabled=False) if available else contextlib.nullcontext()


def _as_bias(mask: Tensor | None, is_causal: bool, tokens: int, like: Tensor) -> Tensor | None:
    """An attention mask as torch's scaled_dot_product_attention takes it, as a bias table [B or nothing, h or 1, N, N]."""
    if is_causal:
        causal = torch.full((1, tokens, tokens), -torch.inf, device=like.device)
        return causal.triu(1)
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, -torch.inf)
    mask = mask if mask.dtype == torch.float64 else mask.float()
    if mask.dim() == 2:
        mask = mask[None]
    if mask.dim() == 4 and mask.shape[0] == 1:
        mask = mask[0]
    if mask.dim() < 2 or any(side not in (1, tokens) for side in mask.shape[-2:]):
        raise Error(f"attn_mask is {list(mask.shape)}; expected [..., {tokens}, {tokens}] for as many tokens")
    return mask.expand(*mask.shape[:-2], tokens, tokens)


def _weights(q: Tensor, k: Tensor, tables: Tables, scale: float | None, rate: float) -> Tensor:
    """Those that multiply v, [B,h,N,N], with gradient: the plain formula, in full precision from the softmax on."""
    full = torch.promote_types(q.dtype, torch.float32)
    weights = (q @ k.transpose(-2, -1)).to(full) * (q.shape[-1] ** -0.5 if scale is None else scale)

    def fitted(table: Tensor) -> Tensor:  # table b mod G for image b
        return table if table.dim() == 3 else table.repeat(q.shape[0] // table.shape[0], 1, 1, 1)

    weights = weights if tables.gain is None else weights * fitted(tables.gain)
    weights = weights if tables.bias is None else weights + fitted(tables.bias)
    weights = torch.dropout(weights.softmax(-1), rate, rate > 0)
    weights = weights if tables.gate is None else weights * fitted(tables.gate)
    weights = weights if tables.after is None else weights + fitted(tables.after)
    return weights


def _attend(
    q: Tensor, k: Tensor, v: Tensor, tables: Tables, scale: float | None, rate: float
) -> tuple[Tensor, Tensor | None]:
    """[B,h,N,d] each -> [B,h,N,d], and the weights [B,h,N,N] where dropout of them has to form them"""
    if rate > 0:
        weights = _weights(q, k, tables, scale, rate)
        return weights.to(v.dtype) @ v, weights
    out = ops.attention(q, k, v, tables.gain, tables.bias, tables.gate, scale, tables.handle)
    if tables.after is None:
        return out, None
    # In the type of the mask, which 16 bits do not resolve.
    with without_autocast(q.device):
        return (out + tables.after @ v.to(tables.after.dtype)).to(out.dtype), None


_LARGEST_FUSED_HEAD = 128  # above it GPUs take the reference, which reads plain tables alone

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


class Request(NamedTuple):
    """Rows of its attention map that a thread wants of a layer."""

    queries: Tensor
    heads: Tensor | None
    thread: int


class _OfThread(threading.local):
    """Whether the last call of a thread wants the map."""

    wanted = False


class _Wish:
    """Whether the caller of a block wants the map of its layer. Compiled code is the same for all threads, and is not made
    anew for what others want."""

    def __init__(self) -> None:
        self.of_thread = _OfThread()
        self.of_code = False

    def __reduce__(self) -> Any:
        return _Wish, ()  # calls of a copy are its own

    def say(self, wanted: bool) -> None:
        if not torch.compiler.is_compiling():
            self.of_thread.wanted = wanted
        elif self.of_code != wanted:  # checkpointed code may change nothing
            self.of_code = wanted

    def of(self, x: Tensor) -> bool:
        """That of the call with this input; the same where the layer is run again, by whatever thread."""
        if torch.compiler.is_compiling():
            return self.of_code
        if torch._C._current_graph_task_id() != -1:
            return getattr(x, "_violin_map", self.of_thread.wanted)
        if torch.is_grad_enabled():
            x._violin_map = self.of_thread.wanted  # type: ignore[attr-defined]
        return self.of_thread.wanted


class _Masked(nn.Module):
    """What the layers share: a mask, the grid of the call, rows of the attention map on request."""

    violin: ViolinMask | None
    num_heads: int
    head_dim: int

    def _set_up(self, mask: ViolinMask | None, grids: GridRecorder, name: str) -> None:
        self.violin = mask
        self.name = name
        self._grids = grids
        self._original: tuple[nn.Module, ...] = ()  # not a submodule: its weights are this layer's
        self._request: Request | None = None
        self._rows: Tensor | None = None
        self._wish = _Wish()

    def _stand_for(self, original: nn.Module) -> None:
        """Takes the place of a layer: its hooks are called here, and handles remove them here and there."""
        self._original = (original,)
        self.training = original.training
        for store in _HOOKS:
            setattr(self, store, getattr(original, store))
        if self.violin is not None:
            self.violin.train(original.training)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("_wish", _Wish())  # made by an older version

    def _asked(self) -> Request | None:
        """The request that this call answers; other threads may evaluate the model meanwhile."""
        request = None if torch.compiler.is_compiling() else self._request
        return request if request is not None and request.thread == threading.get_ident() else None

    def set_grid(self, height: int, width: int) -> None:
        """The grid of the next calls, where no patch embedding tells it."""
        self._grids.tell(*sides("grid", (height, width)))

    def _tables(
        self, tokens: int, attn_mask: Tensor | None, is_causal: bool, qkv: Tensor, weights: bool, rate: float
    ) -> Tables:
        """weights: those of the softmax are wanted, not the product with v alone; rate: of their dropout."""
        tables = Tables()
        if self.violin is not None:
            grid, prefix, dtype = self._grids.lookup(tokens, self.name), self._grids.prefix, product_type(qkv)
            # Only the attention operators can read a packed gain.
            plain = weights or rate > 0 or self._asked() is not None or self.head_dim > _LARGEST_FUSED_HEAD
            if not plain and self.violin.packs(dtype, grid, prefix):
                tables = self._grids.packed(self.violin, grid, dtype)
            else:
                tables = self._grids.tables(self.violin, grid)
                if plain and tables.packed:
                    tables = self.violin.plain_tables(grid, prefix)
        bias = _as_bias(attn_mask, is_causal, tokens, qkv)
        if bias is None:
            return tables
        return tables._replace(bias=bias if tables.bias is None else tables.bias + bias)

    @torch.no_grad()
    def _map_rows(
        self, q: Tensor, k: Tensor, v: Tensor, tables: Tables, queries: Tensor, heads: Tensor | None
    ) -> Tensor:
        """The weights that multiply v, [B,heads,queries,N]; no map of a whole image is formed."""
        if heads is not None:
            q, k, v = (t.index_select(1, heads) for t in (q, k, v))
            tables = tables.heads(heads)
        parts = (tables.gain, tables.bias, tables.gate, self._scale())
        q, k, v = (t.detach().float() if _autocasts(t.device) else t.detach() for t in (q, k, v))
        with without_autocast(q.device):
            _, lse = ops.attention_with_lse(q, k, v, *parts)
            rows = ops.attention_rows(q, k, lse, queries, *parts)
            return rows if tables.after is None else rows + tables.after.index_select(-2, queries)

    def _attended(
        self, q: Tensor, k: Tensor, v: Tensor, tables: Tables, rate: float, wanted: bool
    ) -> tuple[Tensor, Tensor | None]:
        """[B,N,h,d], and the weights [B,h,N,N] where they are wanted, after their dropout."""
        out, weights = _attend(q, k, v, tables, self._scale(), rate)
        request = self._asked()
        if request is not None:
            self._rows = self._map_rows(q, k, v, tables, request.queries, request.heads)
        if wanted and weights is None:
            weights = self._map(q, k, v, tables)
        return out.transpose(1, 2), weights if wanted else None

    def _map(self, q: Tensor, k: Tensor, v: Tensor, tables: Tables) -> Tensor:
        """The weights of all queries, [B,h,N,N]; with gradient where one is wanted."""
        learned = any(t is not None and t.requires_grad for t in (q, k, *tables[:4]))
        if not (learned and torch.is_grad_enabled()):
            return self._map_rows(q, k, v, tables, torch.arange(q.shape[2], device=q.device), None)
        q, k = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (q, k))
        with without_autocast(q.device):
            return _weights(q, k, tables, self._scale(), 0.0)

    def _scale(self) -> float | None:
        return None


class Attention(_Masked):
    """Self-attention with a mask from space-filling curves; takes the place of timm's Attention.

    x [B,P+N,dim] -> [B,P+N,dim_out], prefix tokens first. mask: a :class:`~violin.ViolinMask`, None for vanilla
    attention, or a dict of its options. prefix: number of class, distillation and register tokens; grid: the model's own.
    The other arguments are timm's.

    >>> layer = Attention(32, num_heads=4, qkv_bias=True, mask={"init": "identity"}, grid=(4, 4), prefix=1)
    >>> layer(torch.zeros(2, 17, 32)).shape
    torch.Size([2, 17, 32])
    """

    returns_pair = False  # the original DINO code returns (output, map)

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        attn_head_dim: int | None = None,
        dim_out: int | None = None,
        qkv_bias: bool = False,
        qk_norm: bool = False,
        scale_norm: bool = False,
        proj_bias: bool = True,
        gated: bool = False,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        norm_layer: type[nn.Module] | None = None,
        device: Any = None,
        dtype: Any = None,
        *,
        mask: ViolinMask | dict[str, Any] | None = None,
        grid: Sequence[int] = (14, 14),
        prefix: int = 1,
    ) -> None:
        super().__init__()
        if attn_head_dim is None and dim % whole("num_heads", num_heads, 1):
            raise Error(f"num_heads is {num_heads}; expected a divisor of dim, {dim}")
        if (qk_norm or scale_norm) and norm_layer is None:
            raise Error("norm_layer is None; qk_norm and scale_norm need one")
        self.num_heads = num_heads
        self.head_dim = attn_head_dim or dim // num_heads
        self.scale = self.head_dim**-0.5
        place = {"device": device, "dtype": dtype}
        width = num_heads * self.head_dim

        def norm(wanted: bool, size: int) -> nn.Module:
            return norm_layer(size, **place) if wanted and norm_layer is not None else nn.Identity()

        self.qkv = nn.Linear(dim, 3 * width, bias=qkv_bias, **place)
        self.q_norm = norm(qk_norm, self.head_dim)
        self.k_norm = norm(qk_norm, self.head_dim)
        self.attn_drop = nn.Dropout(attn_drop)
        self.norm = norm(scale_norm, width)
        self.gate = nn.Linear(dim, width, bias=qkv_bias, **place) if gated else None
        self.proj = nn.Linear(width, dim_out or dim, bias=proj_bias, **place)
        self.proj_drop = nn.Dropout(proj_drop)
        if isinstance(mask, dict):
            options = set(inspect.signature(ViolinMask).parameters) - {"heads", "grid", "device"}  # the layer has these
            for name in mask:
                if name not in options:
                    raise Error(f"mask has an option {name!r}; there are {', '.join(sorted(options))}")
            mask = ViolinMask(num_heads, grid=grid, device=device, **mask)
        elif mask is not None and not isinstance(mask, ViolinMask):
            raise Error(f"mask is a {type(mask).__name__}; expected a dict of ViolinMask's options, a ViolinMask or None")
        elif mask is not None and mask.layer_heads != num_heads:
            raise Error(f"mask is for {mask.layer_heads} heads; expected num_heads, {num_heads}")
        self._set_up(mask, GridRecorder(grid, prefix), "violin.Attention")

    @classmethod
    def around(cls, original: nn.Module, mask: ViolinMask | None, grids: GridRecorder, name: str) -> Attention:
        """The attention that ``original`` is, on its own projections, with a mask."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.num_heads = int(original.num_heads)  # type: ignore[arg-type]
        layer.head_dim = cast(Tensor, cast(Any, original).qkv.weight).shape[0] // 3 // layer.num_heads
        scale = getattr(original, "scale", None)
        layer.scale = float(scale) if isinstance(scale, (int, float)) else layer.head_dim**-0.5
        for child in ("qkv", "q_norm", "k_norm", "attn_drop", "norm", "gate", "proj", "proj_drop"):
            module = getattr(original, child, None)
            if child == "gate":
                layer.gate = module
            else:
                drop = float(module) if isinstance(module, (int, float)) else 0.0
                default = nn.Dropout(drop) if child.endswith("_drop") else nn.Identity()
                setattr(layer, child, module if isinstance(module, nn.Module) else default)
        layer._set_up(mask, grids, name)
        layer._stand_for(original)
        return layer

    def _scale(self) -> float | None:
        return self.scale

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Any:
        if x.dim() != 3:
            raise Error(f"x is {list(x.shape)}; expected [batch, tokens, {self.qkv.in_features}]")
        batch, tokens, _ = x.shape
        packed = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, self.head_dim)
        rate = self.attn_drop.p if self.training and isinstance(self.attn_drop, nn.Dropout) else 0.0
        wanted = self.returns_pair and self._wish.of(x)
        tables = self._tables(tokens, attn_mask, is_causal, packed, wanted, rate)
        plain = isinstance(self.q_norm, nn.Identity) and isinstance(self.k_norm, nn.Identity)
        if plain and rate == 0 and tables.after is None and self._asked() is None and not wanted:
            out = ops.attention_qkv(packed, tables.gain, tables.bias, tables.gate, self.scale, tables.handle)
            weights = None
        else:
            q, k, v = (part.transpose(1, 2) for part in packed.unbind(2))
            q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
            out, weights = self._attended(q, k, v, tables, rate, wanted)
        out = self.norm(out.reshape(batch, tokens, self.num_heads * self.head_dim))
        if self.gate is not None:
            out = out * self.gate(x).sigmoid()
        out = self.proj_drop(self.proj(out))
        return (out, weights) if self.returns_pair else out


class PairAttention(Attention):
    """The same for code that expects (output, attention map [B,h,N,N]); the map only where a block asks for it, else None."""

    returns_pair = True


class MapRequest:
    """A block's forward pre-hook: tells its attention whether the caller wants the map (``return_attention``)."""

    def __init__(self, child: str) -> None:
        self.child = child

    def __call__(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        wanted = bool(kwargs.get("return_attention", args[1] if len(args) > 1 else False))
        getattr(block, self.child)._wish.say(wanted)


class MultiheadAttention(_Masked):
    """torch.nn.MultiheadAttention used as self-attention (torchvision's EncoderBlock), with a mask, on its own weights."""

    def __init__(
        self, original: nn.MultiheadAttention, mask: ViolinMask | None, grids: GridRecorder, name: str
    ) -> None:
        super().__init__()
        self.embed_dim, self.num_heads = original.embed_dim, original.num_heads
        self.head_dim, self.batch_first, self.dropout = original.head_dim, original.batch_first, original.dropout
        self.in_proj_weight, self.in_proj_bias = original.in_proj_weight, original.in_proj_bias
        self.out_proj = original.out_proj
        self._set_up(mask, grids, name)
        self._stand_for(original)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """x, x, x [B,N,dim] -> ([B,N,dim], map [B,N,N] averaged over heads or [B,h,N,N], or None)"""
        if query is not key or key is not value:
            raise Error(f"{self.name}: query, key and value differ; a mask over patches needs self-attention")
        if key_padding_mask is not None:
            raise Error(f"{self.name}: key_padding_mask is given; images of one batch have equally many patches")
        x = query if self.batch_first else query.transpose(0, 1)
        batch, tokens, dim = x.shape
        packed = nn.functional.linear(x, self.in_proj_weight, self.in_proj_bias)
        packed = packed.view(batch, tokens, 3, self.num_heads, self.head_dim)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = ~attn_mask  # here True means: not allowed
        if attn_mask is not None and attn_mask.dim() == 3:
            attn_mask = attn_mask.view(batch, self.num_heads, tokens, tokens)
        # is_causal is a hint about attn_mask, as in torch
        rate = self.dropout if self.training else 0.0
        tables = self._tables(tokens, attn_mask, False, packed, need_weights, rate)
        weights = None
        if rate == 0 and tables.after is None and self._asked() is None and not need_weights:
            out = ops.attention_qkv(packed, tables.gain, tables.bias, tables.gate, None, tables.handle)
        else:
            q, k, v = (part.transpose(1, 2) for part in packed.unbind(2))
            out, weights = self._attended(q, k, v, tables, rate, need_weights)
            if weights is not None and average_attn_weights:
                weights = weights.mean(1)
        out = self.out_proj(out.reshape(batch, tokens, dim))
        return (out if self.batch_first else out.transpose(0, 1)), weights
