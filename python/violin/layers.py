"""Attention layers with a mask: drop-ins for timm's Attention and for torch's MultiheadAttention as self-attention.

A layer must know the grid of the current call, and only the patch embedding sees it. A :class:`GridRecorder`, shared by the
layers of a model, is a forward hook on the patch convolution and remembers its output's height and width. For plugged models
it also builds the tables of all layers together.
"""

from __future__ import annotations

import functools
import inspect
import math
import threading
import weakref
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from . import ops
from .errors import Error, sides, whole
from .mask import Tables, ViolinMask

#: Bytes of float32 tables that layers build in one call; 0: each layer its own.
TOGETHER = 1 << 28


def _region() -> tuple[Any, ...]:
    """Differs between the inside and the outside of activation checkpointing, of either kind."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), hooks


def _product_type(x: Tensor) -> torch.dtype:
    """The type that products with x are computed in, on a GPU; elsewhere nobody asks."""
    return torch.get_autocast_dtype("cuda") if x.is_cuda and torch.is_autocast_enabled("cuda") else x.dtype


class _Pass:
    """A pass through a transformer, with the tables made together last."""

    def __init__(self) -> None:
        self.region = _region()
        self.grid: tuple[int, int] | None = None
        self.tables: dict[ViolinMask, Tables] = {}


class _OfThread(threading.local):
    """The grid that a thread's call has recorded last."""

    grid: tuple[int, int] | None = None


class _Call:
    """A call whose graph is alive."""

    def __init__(self, grid: tuple[int, int]) -> None:
        self.grid = grid


def _tensors(output: Any) -> list[Tensor]:
    """Those in what a model returns: itself, or in tuples, lists and dictionaries."""
    if isinstance(output, Tensor):
        return [output]
    parts = output.values() if isinstance(output, dict) else output if isinstance(output, (tuple, list)) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


class GridRecorder:
    """Height and width of the patch grid in the current call; hook it to the convolution that makes the patches.

    hooked: it is, so that a call with another number of patches is an error. Without, layers on their own take a square.

    Activation checkpointing runs layers again in the backward pass, when a later call may have recorded its grid. The
    transformer's output, and what the norm behind the layers is given, therefore tell which grid their backward pass belongs
    to. Where layers run without either, the grid is that of the calls whose graphs are alive, and must be the same for all.
    """

    def __init__(self, native: Sequence[int], prefix: int = 0, hooked: bool = False) -> None:
        self.native = sides("grid", native)
        self.prefix = whole("prefix", prefix)
        self.hooked = hooked
        self.grid: tuple[int, int] = self.native
        self._thread = _OfThread()
        self._calls: weakref.WeakSet[_Call] = weakref.WeakSet()
        # Of calls whose patches have no gradient: those on their way to the norm, by thread, and those that never came.
        self._pending: dict[int, tuple[int, int]] = {}
        self._untracked: set[tuple[int, int]] = set()
        self._replayed: dict[int, tuple[int, int]] = {}  # grids by the backward pass that is going on
        self.masks: list[ViolinMask] = []  # whose tables are made together, in the order of the layers
        self._passes: dict[int, _Pass] = {}  # that are going on, by thread
        self._tracing = False  # within a pass that is being compiled

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.record(output.shape[-2], output.shape[-1])
        if not torch.compiler.is_compiling():
            self._track(output)
            current = self._passes.get(threading.get_ident())
            if current is not None:
                current.grid = None  # an interrupted pass ends nowhere
        elif self._tracing:
            self._give(_product_type(output))

    def __getstate__(self) -> dict[str, Any]:
        forgotten = {"_passes": {}, "_tracing": False, "_replayed": {}, "_pending": {}, "_thread": None, "_calls": None}
        return {**self.__dict__, **forgotten}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._thread, self._calls = _OfThread(), weakref.WeakSet()

    # -- tables made together ------------------------------------------------------------------------------------------

    def begin(self, module: nn.Module, args: Any) -> None:
        """A forward pre-hook of the transformer: tables are shared by the layers within one pass, never beyond."""
        if torch.compiler.is_compiling():
            self._tracing = True
        else:
            self._passes[threading.get_ident()] = _Pass()

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        """Its forward hook."""
        if not torch.compiler.is_compiling():
            self._passes.pop(threading.get_ident(), None)
            self._mark(output)
        self._release()

    def leave(self, module: nn.Module, args: Any) -> None:
        """A forward pre-hook of the norm behind the layers. The hooks of a compiled model itself are not in its graph, which
        would have to return tables that stay until :meth:`end`."""
        if not torch.compiler.is_compiling():
            self._mark(args)
        self._release()

    def _release(self) -> None:
        if self._tracing:
            self._tracing = False
            for mask in self.masks:
                mask._given = mask._given_packed = None

    def tables(self, mask: ViolinMask, grid: tuple[int, int]) -> Tables:
        """mask.tables(), made together with those of other layers where possible."""
        if torch.compiler.is_compiling():
            given = mask._given
            return mask.tables(grid, self.prefix) if given is None or grid != self.grid else given
        current = self._passes.get(threading.get_ident())
        # What runs again in the backward pass must find the same there, and so builds its own both times.
        if current is None or current.region != _region():
            return mask.tables(grid, self.prefix)
        if current.grid != grid or mask not in current.tables:
            group = self._group(self.masks.index(mask), grid, TOGETHER) if mask in self.masks else []
            if len(group) < 2:
                return mask.tables(grid, self.prefix)
            current.grid, current.tables = grid, {}  # frees those before
            current.tables = dict(zip(group, mask.build_together(group[1:], grid, self.prefix)))
        return current.tables[mask]

    def packed(self, mask: ViolinMask, grid: tuple[int, int], dtype: torch.dtype) -> Tables:
        """mask.build_packed(), made together with those of other layers in compiled code without gradients."""
        given = mask._given_packed if torch.compiler.is_compiling() else None
        if given is not None and given[0] == dtype and grid == self.grid:
            return given[1]
        return mask.build_packed(grid, self.prefix, dtype)

    def _give(self, dtype: torch.dtype) -> None:
        """For compiled code. Checkpointed layers may read there, and may not change anything, so tables are made before the
        first layer runs; all are alive from here on, and the limit is one for all. With gradients, layers whose gains can be
        packed make them when they need them."""
        start, left = 0, TOGETHER if torch.is_grad_enabled() else TOGETHER // 8  # nobody else would keep them
        while start < len(self.masks):
            first = self.masks[start]
            packs = first.packs(dtype, self.grid, self.prefix)
            group = [] if packs and torch.is_grad_enabled() else self._group(start, self.grid, left)
            if len(group) > 1:
                if packs:
                    made = first.build_packed_together(group[1:], self.grid, self.prefix, dtype)
                else:
                    made = first.build_together(group[1:], self.grid, self.prefix)
                for mask, tables in zip(group, made):
                    if packs:
                        mask._given_packed = (dtype, tables)
                    else:
                        mask._given = tables
                left -= len(group) * self._bytes(first, self.grid)
            start += max(len(group), 1)

    def _group(self, start: int, grid: tuple[int, int], limit: int) -> list[ViolinMask]:
        """The mask at ``start`` and those behind it that are like it and build tables in this call, as many as fit."""
        first = self.masks[start]
        most = limit // self._bytes(first, grid)
        group: list[ViolinMask] = []
        for mask in self.masks[start : start + most]:
            if any(hasattr(value, "__tensor_flatten__") for value in mask._values()):
                self.masks = []  # sharded: gradients must be there when a block's backward pass is done
                return []
            if not mask.builds(grid, self.prefix) or not mask.alike(first):
                break
            group.append(mask)
        return group

    def _bytes(self, mask: ViolinMask, grid: tuple[int, int]) -> int:
        return 4 * len(mask.masked_heads) * (self.prefix + grid[0] * grid[1]) ** 2

    # -- grids ---------------------------------------------------------------------------------------------------------

    def record(self, height: int, width: int) -> None:
        if isinstance(height, torch.SymInt) or isinstance(width, torch.SymInt):
            raise Error("a mask needs a known grid of patches; export once per image size, with no dynamic height or width")
        self.grid = grid = (height, width)  # from here on another thread may set self.grid
        if torch.compiler.is_compiling():
            return
        self._thread.grid = grid
        if torch._C._current_graph_task_id() != -1:  # the patches too are run again
            self._replay(grid, None)

    def _track(self, patches: Tensor) -> None:
        thread = threading.get_ident()
        if thread in self._pending:
            self._untracked.add(self._pending.pop(thread))
        self._mark(patches)
        if patches.grad_fn is None and torch.is_grad_enabled():
            self._pending[thread] = self._thread.grid or self.grid

    def _mark(self, tensors: Any) -> None:
        """The backward pass of these belongs to the grid of this thread's call, or of the call that is run again."""
        self._pending.pop(threading.get_ident(), None)
        task = torch._C._current_graph_task_id()
        grid = self._thread.grid if task == -1 else self._replayed.get(task)
        if grid is None:
            return
        call = _Call(grid)
        self._calls.add(call)
        for tensor in _tensors(tensors):
            if tensor.grad_fn is not None:
                cast("dict[str, Any]", tensor.grad_fn.metadata)["violin"] = call  # goes with the graph
                tensor.grad_fn.register_prehook(functools.partial(self._replay, grid))

    def _replay(self, grid: tuple[int, int], gradients: Any) -> None:
        """From here on the backward pass that is going on is that of a call with this grid."""
        task = torch._C._current_graph_task_id()
        if task not in self._replayed:
            forget: Any = functools.partial(self._replayed.pop, task, None)
            torch.autograd.Variable._execution_engine.queue_callback(forget)  # type: ignore[attr-defined]
        self._replayed[task] = grid

    def lookup(self, tokens: int, name: str) -> tuple[int, int]:
        """The grid of a call with so many tokens, prefix tokens included."""
        height, width = self.grid
        patches = tokens - self.prefix
        if torch.compiler.is_compiling():
            return (height, width) if height * width == patches else self._guess(tokens, name)
        if torch._C._current_graph_task_id() != -1:
            return self._lookup_again(patches, name)
        recorded = self._thread.grid
        if recorded is not None and recorded[0] * recorded[1] == patches:
            return recorded
        if recorded is None and height * width == patches:  # by another thread
            return height, width
        return self._guess(tokens, name)

    def _lookup_again(self, patches: int, name: str) -> tuple[int, int]:
        """Within a backward pass."""
        replayed = self._replayed.get(torch._C._current_graph_task_id())
        if replayed is not None and replayed[0] * replayed[1] == patches:
            return replayed
        alive = {call.grid for call in self._calls} | self._untracked | set(self._pending.values())
        fitting = [grid for grid in alive if grid[0] * grid[1] == patches]
        if len(fitting) > 1:
            raise Error(
                f"{name}: activation checkpointing cannot tell which of several grids of {patches} patches a layer is run "
                "again for; call the model with its norm, or run backward and drop the outputs before a forward of "
                "another shape"
            )
        if fitting or self.grid[0] * self.grid[1] == patches:
            return fitting[0] if fitting else self.grid
        return self._guess(patches + self.prefix, name)

    def _guess(self, tokens: int, name: str) -> tuple[int, int]:
        patches = tokens - self.prefix
        if not self.hooked:
            side = math.isqrt(max(patches, 0))
            if patches == self.native[0] * self.native[1]:
                return self.native
            if side >= 1 and side * side == patches:
                return side, side
        raise Error(
            f"{name}: {tokens} tokens are not {self.prefix} prefix tokens and a known grid of patches (recorded "
            f"{self.grid[0]}x{self.grid[1]}); give set_grid(height, width), or drop no patches"
        )


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
    return mask.expand(*mask.shape[:-2], tokens, tokens)


def _with_dropout(q: Tensor, k: Tensor, v: Tensor, tables: Tables, scale: float | None, rate: float) -> Tensor:
    """Dropout of attention weights needs the weights: the plain formula, in full precision from the softmax on."""
    full = torch.promote_types(q.dtype, torch.float32)
    weights = (q @ k.transpose(-2, -1)).to(full) * (q.shape[-1] ** -0.5 if scale is None else scale)

    def fitted(table: Tensor) -> Tensor:  # table b mod G for image b
        return table if table.dim() == 3 else table.repeat(q.shape[0] // table.shape[0], 1, 1, 1)

    weights = weights if tables.gain is None else weights * fitted(tables.gain)
    weights = weights if tables.bias is None else weights + fitted(tables.bias)
    weights = torch.dropout(weights.softmax(-1), rate, True)
    weights = weights if tables.gate is None else weights * fitted(tables.gate)
    weights = weights if tables.after is None else weights + fitted(tables.after)
    return weights.to(v.dtype) @ v


def _attend(q: Tensor, k: Tensor, v: Tensor, tables: Tables, scale: float | None, rate: float) -> Tensor:
    """[B,h,N,d] each -> [B,h,N,d]"""
    if rate > 0:
        return _with_dropout(q, k, v, tables, scale, rate)
    out = ops.attention(q, k, v, tables.gain, tables.bias, tables.gate, scale, tables.handle)
    if tables.after is None:
        return out
    # In the type of the mask, which 16 bits do not resolve.
    with torch.autocast(q.device.type, enabled=False):
        return (out + tables.after @ v.to(tables.after.dtype)).to(out.dtype)


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
        self._request: tuple[Tensor, Tensor | None] | None = None
        self._rows: Tensor | None = None
        self.want_map = False

    def _stand_for(self, original: nn.Module) -> None:
        """Takes the place of a layer: its hooks are called here, and handles remove them here and there."""
        self._original = (original,)
        self.training = original.training
        for store in _HOOKS:
            setattr(self, store, getattr(original, store))
        if self.violin is not None:
            self.violin.train(original.training)

    def set_grid(self, height: int, width: int) -> None:
        """The grid of the next calls, where no patch embedding tells it."""
        self._grids.record(*sides("grid", (height, width)))

    def _tables(
        self, tokens: int, attn_mask: Tensor | None, is_causal: bool, qkv: Tensor, weights: bool, rate: float
    ) -> Tables:
        """weights: those of the softmax are wanted, not the product with v alone; rate: of their dropout."""
        tables = Tables()
        if self.violin is not None:
            grid, prefix, dtype = self._grids.lookup(tokens, self.name), self._grids.prefix, _product_type(qkv)
            # Only the attention operators can read a packed gain.
            plain = weights or rate > 0 or self._request is not None or self.head_dim > _LARGEST_FUSED_HEAD
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
        q, k, v = (t.detach().float() if torch.is_autocast_enabled(t.device.type) else t.detach() for t in (q, k, v))
        with torch.autocast(q.device.type, enabled=False):
            _, lse = ops.attention_with_lse(q, k, v, *parts)
            rows = ops.attention_rows(q, k, lse, queries, *parts)
            return rows if tables.after is None else rows + tables.after.index_select(-2, queries)

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
        batch, tokens, _ = x.shape
        packed = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, self.head_dim)
        rate = self.attn_drop.p if self.training and isinstance(self.attn_drop, nn.Dropout) else 0.0
        tables = self._tables(tokens, attn_mask, is_causal, packed, self._wants_map(), rate)
        plain = isinstance(self.q_norm, nn.Identity) and isinstance(self.k_norm, nn.Identity)
        if plain and rate == 0 and tables.after is None and self._request is None and not self._wants_map():
            out = ops.attention_qkv(packed, tables.gain, tables.bias, tables.gate, self.scale, tables.handle)
            weights = None
        else:
            q, k, v = (part.transpose(1, 2) for part in packed.unbind(2))
            q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
            out = _attend(q, k, v, tables, self.scale, rate).transpose(1, 2)
            weights = self._observed(q, k, v, tables)
        out = self.norm(out.reshape(batch, tokens, self.num_heads * self.head_dim))
        if self.gate is not None:
            out = out * self.gate(x).sigmoid()
        out = self.proj_drop(self.proj(out))
        return (out, weights) if self.returns_pair else out

    def _wants_map(self) -> bool:
        return self.returns_pair and self.want_map

    def _observed(self, q: Tensor, k: Tensor, v: Tensor, tables: Tables) -> Tensor | None:
        if self._request is not None:
            self._rows = self._map_rows(q, k, v, tables, *self._request)
        if not self._wants_map():
            return None
        return self._map_rows(q, k, v, tables, torch.arange(q.shape[2], device=q.device), None)


class PairAttention(Attention):
    """The same for code that expects (output, attention map [B,h,N,N]); the map only where a block asks for it, else None."""

    returns_pair = True


class MapRequest:
    """A block's forward pre-hook: tells its attention whether the caller wants the map (``return_attention``)."""

    def __init__(self, child: str) -> None:
        self.child = child

    def __call__(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        wanted = bool(kwargs.get("return_attention", args[1] if len(args) > 1 else False))
        layer = getattr(block, self.child)
        if layer.want_map != wanted:
            layer.want_map = wanted


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
        if rate == 0 and tables.after is None and self._request is None and not need_weights:
            out = ops.attention_qkv(packed, tables.gain, tables.bias, tables.gate, None, tables.handle)
        else:
            q, k, v = (part.transpose(1, 2) for part in packed.unbind(2))
            out = _attend(q, k, v, tables, None, rate).transpose(1, 2)
            if self._request is not None:
                self._rows = self._map_rows(q, k, v, tables, *self._request)
            if need_weights:
                weights = self._map_rows(q, k, v, tables, torch.arange(tokens, device=x.device), None)
                weights = weights.mean(1) if average_attn_weights else weights
        out = self.out_proj(out.reshape(batch, tokens, dim))
        return (out if self.batch_first else out.transpose(0, 1)), weights
