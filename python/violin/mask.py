"""The mask of one attention layer: its few parameters, and tables made of them for any grid of patches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid
from torch.optim.optimizer import register_optimizer_step_post_hook

from . import curves as curve_module
from . import ops
from ._streams import captured, complete, lend
from .config import MaskConfig
from .errors import Error, sides, whole
from .initial import fill, generator_for

_KEPT_GRIDS = 16  # per layer


class Tables(NamedTuple):
    """Tables of the attention operator, each [h,N,N] or None; ``after`` is added to the weights behind the softmax,
    ``handle`` takes the gradient of a gain that is packed."""

    gain: Tensor | None = None
    bias: Tensor | None = None
    gate: Tensor | None = None
    after: Tensor | None = None
    handle: Tensor | None = None

    def heads(self, index: Tensor) -> Tables:
        assert not self.packed, "a packed gain has tiles where heads would be"
        return Tables(*(None if table is None else table.index_select(-3, index) for table in self))

    @property
    def nbytes(self) -> int:
        return sum(table.nbytes for table in self[:4] if table is not None)

    @property
    def packed(self) -> bool:
        """Whether the gain is in the 16-bit form of GPU kernels, which the attention operators alone can read."""
        return self.gain is not None and self.gain.dim() == 5

    def pack(self, dtype: torch.dtype | None) -> Tables:
        """The gain in that form beside q, k, v of this type; elsewhere than on a GPU as it is."""
        if dtype is None or self.gain is None or not self.gain.is_cuda or not ops.packs_gains():
            return self
        return self._replace(gain=ops.pack_gain(self.gain, dtype))


class _Values(NamedTuple):
    """Parameters of a mask, or of several side by side: heads come last in each."""

    beta: Tensor | None
    rate: Tensor | None
    gamma: Tensor | None
    curve_weight: Tensor | None
    alpha: Tensor | None
    prefix_beta: Tensor | None
    prefix_rate: Tensor | None


def _bounded(rate: Tensor) -> Tensor:
    """max(rate, 0) whose gradient is that of rate everywhere, so that a decay that starts at the bound can leave it."""
    return rate + (rate.clamp_min(0) - rate).detach()


def _in_full(parameter: Tensor) -> Tensor:
    return parameter if parameter.dtype == torch.float64 else parameter.float()


#: Parameters that tables were made from, with their addresses and versions, and the steps of optimisers until then. The
#: tensors are held, so that no other can come to have their address.
_State = list[tuple[Tensor, int, int, int]]

_steps = 0


def _stepped(*_: Any) -> None:
    """After a step of any optimiser: fused ones change parameters and leave their versions as they were."""
    global _steps
    _steps += 1


register_optimizer_step_post_hook(_stepped)


def _tells_changes(parameter: Tensor) -> bool:
    """Whether address and version do: not where it was made in inference mode, nor within vmap and its like."""
    return not parameter.is_inference() and torch._C._has_storage(parameter)


def _same(one: _State, other: _State) -> bool:
    return len(one) == len(other) and all(a[0] is b[0] and a[1:] == b[1:] for a, b in zip(one, other))


class ViolinMask(nn.Module):
    """The mask of an attention layer: tables for any grid of patches, from a few parameters.

    heads: of the layer. grid: the model's own (height, width), which gives ``rate`` its unit. masked_heads: those that have
    a mask; all unless given. For the other options see :class:`MaskConfig`.

    Parameters, h counting the masked heads: ``beta`` or ``rate`` [C,h], [C,A,h] with a decay per axis; ``gamma``, a buffer,
    where the decay is fixed; ``alpha`` [h]; ``curve_weight`` [C,h]; ``prefix_beta`` or ``prefix_rate`` [h].

    In training, tables are built in each call, with gradients. In evaluation without gradients they are built once per grid
    and kept until train(), eval(), to(), load_state_dict(), an assignment or, for parameters that require a gradient, an
    optimiser's step, up to ``table_limit`` bytes. Compiled code builds them in each call, unless :meth:`freeze` has made
    them constants. In 16 bits on a GPU, layers take :meth:`build_packed` instead wherever it applies: nothing is kept there.

    >>> mask = ViolinMask(heads=2, curves="hilbert", grid=(4, 4), init="identity")
    >>> sorted(dict(mask.named_parameters()))
    ['alpha', 'rate']
    >>> bool((mask.tables((4, 6), prefix=1).gain == 1).all())
    True
    """

    table_limit: int = 1 << 30
    beta: nn.Parameter | None
    rate: nn.Parameter | None
    alpha: nn.Parameter | None
    curve_weight: nn.Parameter | None
    prefix_beta: nn.Parameter | None
    prefix_rate: nn.Parameter | None
    gamma: Tensor | None

    def __init__(
        self,
        heads: int,
        curves: str | Sequence[str] = "violin",
        init: str = "pretrain",
        *,
        strategy: str = "mul_v1",
        parameterisation: str = "auto",
        alpha: bool = True,
        decay: float | None = None,
        decay_per_axis: bool = False,
        curve_weights: bool = False,
        prefix_decay: str = "one",
        masked_heads: Sequence[int] | None = None,
        grid: Sequence[int] = (14, 14),
        seed: int | None = None,
        name: str = "violin",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = MaskConfig(
            curves=curves,
            strategy=strategy,
            decay=decay,
            decay_per_axis=decay_per_axis,
            alpha=alpha,
            curve_weights=curve_weights,
            prefix_decay=prefix_decay,
            init=init,
            parameterisation=parameterisation,
            heads=masked_heads,
        )
        self.layer_heads = whole("heads", heads, 1)
        self.masked_heads = tuple(self.config.heads or range(self.layer_heads))
        if not all(0 <= head < self.layer_heads for head in self.masked_heads):
            raise Error(f"heads are {list(self.masked_heads)}; expected numbers from 0 to {self.layer_heads - 1}")
        self.grid = sides("grid", grid)
        self.curve_names = tuple(self.config.names)
        self._curve_list = ",".join(self.curve_names)
        self._kind = f"{self.config} {self.layer_heads} {self.grid}"
        # While compiled code is traced: made with those of other layers, as tables or packed for a type.
        self._given: Tables | None = None
        self._given_packed: tuple[torch.dtype, Tables] | None = None
        self._kept: dict[tuple[int, int, int], tuple[_State, Tables, Any]] = {}  # and the stream that made them
        self._frozen: dict[tuple[int, int, int], Tables] = {}
        self._frozen_types: dict[tuple[int, int, int], torch.dtype | None] = {}  # what freeze() was given
        self._thawed: dict[str, bool] = {}  # what required a gradient before freeze()

        count, masked, axes = len(self.curve_names), len(self.masked_heads), 1
        if count:
            axes = curve_module.coordinates(self._curve_list, 1, 1, torch.device("cpu")).shape[1]
        decay_shape = (count, axes, masked) if decay_per_axis else (count, masked)
        self._one_axis = count > 0 and axes == 1 and not decay_per_axis
        options: dict[str, Any] = {"device": device, "dtype": dtype or torch.float32}

        def parameter(name: str, shape: tuple[int, ...], wanted: bool) -> None:
            self.register_parameter(name, nn.Parameter(torch.empty(shape, **options)) if wanted else None)

        learned = count > 0 and decay is None
        rate = self.config.uses_rate
        parameter("beta", decay_shape, learned and not rate)
        parameter("rate", decay_shape, learned and rate)
        self.register_buffer(
            "gamma", torch.full(decay_shape, decay, **options) if count and decay is not None else None
        )
        parameter("curve_weight", (count, masked), count > 0 and curve_weights)
        parameter("alpha", (masked,), alpha)
        parameter("prefix_beta", (masked,), prefix_decay == "learned" and not rate)
        parameter("prefix_rate", (masked,), prefix_decay == "learned" and rate)
        self.initialise(seed, name)

    # -- initial values ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def initialise(self, seed: int | None = None, name: str = "violin") -> None:
        """Initial values as the configuration names them: from torch's generator, or from a seed and this layer's name."""
        for parameter_name in ("beta", "prefix_beta", "rate", "prefix_rate", "curve_weight", "alpha"):
            parameter = getattr(self, parameter_name)
            if parameter is None or parameter.is_meta:
                continue
            generator = None if seed is None else generator_for(seed, f"{name}.{parameter_name}")
            values = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
            fill(parameter_name, values, self.config, self.grid, generator)
            parameter.copy_(values)
        self._changed()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initial values from torch's generator, and what else a module on the meta device lacks once it has memory."""
        if self.gamma is not None:
            self.gamma.fill_(self.config.decay or 1.0)
        self.initialise()

    # -- decay and mask ------------------------------------------------------------------------------------------------

    def _values(self) -> _Values:
        return _Values(
            self.beta, self.rate, self.gamma, self.curve_weight, self.alpha, self.prefix_beta, self.prefix_rate
        )

    def log_decay(self) -> Tensor:
        """log gamma, [C,h] or [C,A,h], with gradient."""
        return self._log_decay(self._values())

    def _log_decay(self, values: _Values) -> Tensor:
        if values.gamma is not None:
            return _in_full(values.gamma).log()
        if values.beta is not None:
            return logsigmoid(_in_full(values.beta))
        if values.rate is None:
            raise Error("this mask has no curves and so no decay")
        return -_bounded(_in_full(values.rate)) / self.units(values.rate)

    def units(self, rate: Tensor, grid: Sequence[int] | None = None) -> Tensor:
        """What ``rate`` counts in where this grid is the model's own: the longest distance along each curve, [C,1] or
        [C,1,1]. No buffer: DistributedDataParallel would send it in every call."""
        height, width = self.grid if grid is None else grid
        longest = curve_module.longest(self._curve_list, int(height), int(width), rate.device)
        return longest.view(-1, *(1 for _ in rate.shape[1:]))

    @torch.no_grad()
    def set_log_decay(self, log_decay: Tensor) -> None:
        """The same decay in this layer's parameterisation; only ``rate`` can take any."""
        if self.rate is None:
            raise Error("only masks with the parameterisation 'rate' take a given decay")
        self.rate.copy_(-log_decay * self.units(self.rate))
        self._changed()

    def rate_for(self, grid: Sequence[int]) -> Tensor:
        """``rate`` of the same decay where ``grid`` is the model's own."""
        if self.rate is None:
            raise Error("this mask has no rate")
        return self.rescaled(self.rate.detach(), self.grid, grid).to(self.rate.dtype)

    def rescaled(self, rate: Tensor, before: Sequence[int], after: Sequence[int]) -> Tensor:
        """``rate`` of the same decay where ``after`` is the model's own grid, and not ``before``; in full precision, since
        16 bits do not hold the products."""
        return _in_full(rate) * self.units(rate, after) / self.units(rate, before)

    def prefix_log_decay(self) -> Tensor | None:
        """log gamma of class token and registers, [h], where it is learned."""
        return self._prefix_log_decay(self._values())

    def _prefix_log_decay(self, values: _Values) -> Tensor | None:
        if values.prefix_beta is not None:
            return logsigmoid(_in_full(values.prefix_beta))
        if values.prefix_rate is not None:
            return -_bounded(_in_full(values.prefix_rate))
        return None

    def mask(self, grid: Sequence[int], prefix: int = 0) -> Tensor:
        """M (log M for the strategy ``log``) of the masked heads, [h,P+N,P+N], with gradient and without alpha."""
        return self._mask(self._values(), grid, prefix)

    def _mask(self, values: _Values, grid: Sequence[int], prefix: int) -> Tensor:
        (height, width), prefix = sides("grid", grid), whole("prefix", prefix)
        log_space = self.config.strategy == "log"
        if not self.curve_names:
            tokens = prefix + height * width
            like = _in_full(cast(Tensor, values.alpha).detach())
            return torch.full(
                (like.shape[0], tokens, tokens), 0.0 if log_space else 1.0, dtype=like.dtype, device=like.device
            )
        decay = self._log_decay(values)
        ranks = curve_module.coordinates(self._curve_list, height, width, decay.device)
        weight = None if values.curve_weight is None else _in_full(values.curve_weight)
        return ops.decay_mask(ranks, decay, weight, prefix, self._prefix_log_decay(values), log_space)

    def build(self, grid: Sequence[int], prefix: int = 0) -> Tables:
        """Tables [h,P+N,P+N] over all heads of the layer, made now, with gradient."""
        return self._spread(self._composed(self._values(), grid, prefix))

    def build_together(self, others: Sequence[ViolinMask], grid: Sequence[int], prefix: int = 0) -> list[Tables]:
        """build() of this mask and of others like it, in one call of each operator: on a device one mask is little work."""
        tables = self._composed(self._joined(others), grid, prefix)
        split = [None if table is None else table.split(len(self.masked_heads)) for table in tables]
        return [self._spread(Tables(*(None if s is None else s[i] for s in split))) for i in range(1 + len(others))]

    def _joined(self, others: Sequence[ViolinMask]) -> _Values:
        """The values of this mask and of others like it, heads behind heads."""
        sources = zip(*(mask._values() for mask in (self, *others)))
        return _Values(*(None if parts[0] is None else torch.cat(parts, -1) for parts in sources))

    def _composed(self, values: _Values, grid: Sequence[int], prefix: int) -> Tables:
        alpha = None if values.alpha is None else _in_full(values.alpha)
        return Tables(*ops.compose(self.config.strategy, self._mask(values, grid, prefix), alpha))

    def _spread(self, tables: Tables) -> Tables:
        """Heads without a mask keep what changes nothing."""
        if len(self.masked_heads) == self.layer_heads:
            return tables

        def spread(table: Tensor, neutral: float) -> Tensor:
            still = torch.full_like(table[:1], neutral)
            masked = iter(table.split(1))
            heads = range(self.layer_heads)
            return torch.cat([next(masked) if head in self.masked_heads else still for head in heads])

        pairs = zip(tables, (1.0, 0.0, 1.0, 0.0, 0.0))
        return Tables(*(None if table is None else spread(table, neutral) for table, neutral in pairs))

    def packs(self, dtype: torch.dtype, grid: Sequence[int], prefix: int = 0) -> bool:
        """Whether tables beside q, k, v of this type are built by build_packed()."""
        return (grid[0], grid[1], prefix) not in self._frozen and self._packable(dtype)

    def _packable(self, dtype: torch.dtype) -> bool:
        return (
            ops.packs_gains()
            and all(t is None or (t.is_cuda and t.dtype != torch.float64) for t in self._values())
            and dtype in (torch.float16, torch.bfloat16)
            and self.config.strategy in ("mul_v1", "mul_v2")
            and self._one_axis
            and len(self.masked_heads) == self.layer_heads
        )

    def build_packed(self, grid: Sequence[int], prefix: int, dtype: torch.dtype) -> Tables:
        """build() with the gain as the attention operators read it on a GPU, and they alone: about as fast as packing a
        table is, so that nothing has to be kept."""
        return self._packed(self._values(), grid, prefix, dtype)

    def build_packed_together(
        self, others: Sequence[ViolinMask], grid: Sequence[int], prefix: int, dtype: torch.dtype
    ) -> list[Tables]:
        """build_packed() of this mask and of others like it in one call, without gradients: these would have to be joined."""
        gain = cast(Tensor, self._packed(self._joined(others), grid, prefix, dtype).gain)
        return [Tables(gain=part) for part in gain.split(len(self.masked_heads), 1)]

    def _packed(self, values: _Values, grid: Sequence[int], prefix: int, dtype: torch.dtype) -> Tables:
        decay = self._log_decay(values)
        ranks = curve_module.coordinates(self._curve_list, int(grid[0]), int(grid[1]), decay.device)
        weight = None if values.curve_weight is None else _in_full(values.curve_weight)
        alpha = None if values.alpha is None else _in_full(values.alpha)
        gain, handle = ops.decay_gain(
            ranks,
            decay,
            weight,
            prefix,
            self._prefix_log_decay(values),
            alpha,
            self.config.strategy == "mul_v2",
            dtype,
        )
        return Tables(gain=gain, handle=handle)

    def alike(self, other: ViolinMask) -> bool:
        """Whether build_together() may take both."""
        if self._kind != other._kind:
            return False
        return all(
            a is b
            if a is None or b is None
            else (type(a), a.dtype, a.device, a.shape) == (type(b), b.dtype, b.device, b.shape)
            for a, b in zip(self._values(), other._values())
        )

    def tables(self, grid: Sequence[int], prefix: int = 0) -> Tables:
        """Tables for prefix + height*width tokens, kept ones where nothing changed."""
        key = (*sides("grid", grid), whole("prefix", prefix))
        frozen = self._frozen.get(key)
        if frozen is not None:
            return frozen
        if self.builds(grid, prefix):
            return self.build(grid, prefix)
        state = self._state()
        everything = dict(self._kept)  # replaced as a whole: other threads may be here too
        kept = everything.pop(key, None)
        if kept is not None and not _same(kept[0], state):
            everything.clear()  # parameters changed: every table is stale
            kept = None
        if kept is None:
            made = self._built_plainly(grid, prefix)
            kept = (state, made, complete(made))
        everything[key] = kept  # used last comes last
        while len(everything) > _KEPT_GRIDS or sum(t.nbytes for _, t, _ in everything.values()) > self.table_limit:
            del everything[next(iter(everything))]
        self._kept = everything
        lend(kept[1], kept[2])
        return kept[1]

    forward = tables

    def builds(self, grid: Sequence[int], prefix: int = 0) -> bool:
        """Whether tables() makes them in each call."""
        if (grid[0], grid[1], prefix) in self._frozen:
            return False
        traced = torch.compiler.is_compiling() or torch.jit.is_tracing() or captured()
        return traced or self.training or self._needs_gradient() or not all(map(_tells_changes, self._sources()))

    # -- kept tables ---------------------------------------------------------------------------------------------------

    def freeze(self, grid: Sequence[int], prefix: int = 0, dtype: torch.dtype | None = None) -> None:
        """Tables for this grid are made now and are constants from here on, in compiled code too; parameters need no
        gradient. For inference: nothing is rebuilt or checked. With a 16-bit ``dtype``, that of q, k and v (autocast's
        where it is on), the gain on a GPU is kept in the form that the kernels read, about half as large for long
        sequences, for this type alone."""
        if dtype not in (None, torch.float16, torch.bfloat16):
            raise Error(f"freeze: dtype is {dtype}; expected torch.float16, torch.bfloat16 or None")
        key = (*sides("grid", grid), whole("prefix", prefix))
        if not self._frozen:
            self._thawed = {name: parameter.requires_grad for name, parameter in self.named_parameters()}
        self.requires_grad_(False)
        self._frozen[key] = self._constant(key, dtype)
        self._frozen_types[key] = dtype

    def thaw(self) -> None:
        """Undoes freeze()."""
        for name, needed in self._thawed.items():
            self.get_parameter(name).requires_grad_(needed)
        self._thawed, self._frozen, self._frozen_types = {}, {}, {}
        self.drop_tables()

    @property
    def frozen(self) -> bool:
        return bool(self._frozen)

    def drop_tables(self) -> None:
        """Forgets tables that evaluation kept, and what compiled code was given and did not take back; frozen ones stay."""
        self._kept, self._given, self._given_packed = {}, None, None

    @property
    def kept_tables(self) -> int:
        return len(self._kept)

    def plain_tables(self, grid: Sequence[int], prefix: int = 0) -> Tables:
        """tables(), not packed whatever freeze() did."""
        tables = self.tables(grid, prefix)
        return self._built_plainly(grid, prefix) if tables.packed else tables

    def _built_plainly(self, grid: Sequence[int], prefix: int) -> Tables:
        if torch.compiler.is_compiling():  # which keeps nothing
            with torch.no_grad():
                return self.build(grid, prefix)
        with curve_module.plainly():  # later calls may use them anywhere
            return self.build(grid, prefix)

    def _constant(self, key: tuple[int, int, int], dtype: torch.dtype | None) -> Tables:
        """What freeze() keeps."""
        if dtype is None or not self._packable(dtype):
            tables = self._built_plainly(key[:2], key[2]).pack(dtype)
        else:
            with curve_module.plainly():
                tables = self.build_packed(key[:2], key[2], dtype)._replace(handle=None)
        complete(tables)
        return tables

    def _needs_gradient(self) -> bool:
        return torch.is_grad_enabled() and any(value.requires_grad for value in self._sources())

    def _sources(self) -> list[Tensor]:
        return [value for value in self._values() if value is not None]  # replicas of DataParallel have no parameters()

    def _state(self) -> _State:
        return [(t, t.data_ptr(), t._version, _steps if t.requires_grad else 0) for t in self._sources()]

    def _changed(self) -> None:
        self.drop_tables()
        for key in list(self._frozen):
            self._frozen[key] = self._constant(key, self._frozen_types.get(key))

    def train(self, mode: bool = True) -> ViolinMask:
        super().train(mode)
        self.drop_tables()
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ViolinMask:
        gamma = self.gamma
        super()._apply(fn, recurse)
        if gamma is not None and self.gamma is not None and self.gamma.element_size() < gamma.element_size() < 8:
            self.gamma = gamma.to(self.gamma.device)  # 16 bits would make a decay close to 1 none
        self._changed()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._changed()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": {}, "_given": None, "_given_packed": None}  # a copy or a pickle makes its own

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("_frozen_types", {})
        for name in ("_units", "_head_index"):  # buffers of an older version
            self._buffers.pop(name, None)
            self._non_persistent_buffers_set.discard(name)
        if "_one_axis" not in self.__dict__:  # made by an older version
            axes = len(self.curve_names) and curve_module.coordinates(self._curve_list, 1, 1, torch.device("cpu")).shape[1]
            self._one_axis = axes == 1 and not self.config.decay_per_axis
        if any(tables.packed and not cast(Tensor, tables.gain).is_cuda for tables in self._frozen.values()):
            self._changed()  # packed on a GPU and loaded elsewhere

    def extra_repr(self) -> str:
        kind = "rate" if self.config.uses_rate else "sigmoid"
        decay = kind if self.config.decay is None else f"decay={self.config.decay}"
        return f"heads={len(self.masked_heads)}, {self._curve_list or 'no curves'}, {self.config.strategy}, {decay}"


def from_config(
    config: MaskConfig,
    heads: int,
    grid: Sequence[int],
    *,
    seed: int | None = None,
    name: str = "violin",
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> ViolinMask:
    """A layer's mask as the model's configuration wants it."""
    options = asdict(replace(config, blocks=None))
    options.pop("blocks")
    masked = options.pop("heads")
    return ViolinMask(
        heads, **options, masked_heads=masked, grid=grid, seed=seed, name=name, device=device, dtype=dtype
    )
