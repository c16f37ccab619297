"""The patch grid of the current call, and the tables that the layers of a model build together for it.

A layer must know the grid, and only the patch embedding sees it. A :class:`GridRecorder`, shared by the layers of a model, is a
forward hook on the patch convolution and remembers its output's height and width. For plugged models it also builds the
tables of all layers together.
"""

from __future__ import annotations

import functools
import math
import threading
import weakref
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from .errors import Error, sides, whole
from .mask import Tables, ViolinMask

#: Bytes of float32 tables that layers build in one call; 0: each layer its own.
TOGETHER = 1 << 28


def _region() -> tuple[Any, ...]:
    """Differs between the inside and the outside of activation checkpointing, of either kind."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), hooks


def product_type(x: Tensor) -> torch.dtype:
    """The type that products with x are computed in, on a GPU; elsewhere nobody asks."""
    return torch.get_autocast_dtype("cuda") if x.is_cuda and torch.is_autocast_enabled("cuda") else x.dtype


def projection(vit: Any) -> nn.Module | None:
    """The part of a transformer whose output's last two sides are the grid."""
    part = vit.conv_proj if hasattr(vit, "conv_proj") else getattr(getattr(vit, "patch_embed", None), "proj", None)
    return part if isinstance(part, nn.Module) else None


class _Pass:
    """A pass through a transformer, with the tables made together last."""

    def __init__(self) -> None:
        self.region = _region()
        self.recorded = False  # by this thread itself, and not by compiled code
        self.grid: tuple[int, int] | None = None
        self.tables: dict[ViolinMask, Tables] = {}


class _OfThread(threading.local):
    """The grid that a thread's call has recorded last."""

    grid: tuple[int, int] | None = None


class _Call:
    """A call whose graph, or the way to it, is alive."""

    def __init__(self, grid: tuple[int, int]) -> None:
        self.grid = grid


def _tensors(output: Any) -> list[Tensor]:
    """Those in what a model returns: itself, or in tuples, lists and dictionaries."""
    if isinstance(output, Tensor):
        return [output]
    parts = output.values() if isinstance(output, dict) else output if isinstance(output, (tuple, list)) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


class GridRecorder:
    """Height and width of the patch grid in the current call: a hook of the convolution that makes the patches.

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
        # Of calls whose patches have no gradient: those on their way to one, by thread, and what blocks were given
        # until then, which activation checkpointing keeps as long as it may run them again.
        self._pending: dict[int, _Call] = {}
        self._untracked: Any = WeakTensorKeyDictionary()
        self._vit: weakref.ref[nn.Module] | None = None  # whose projection this is hooked to
        self._hooked_to: weakref.ref[nn.Module] | None = None
        self._by_hand = False  # the grid was given, not recorded
        self._by_code = False  # compiled code, which knows no threads, has recorded it
        self._replayed: dict[int, tuple[int, int]] = {}  # grids by the backward pass that is going on
        self.masks: list[ViolinMask] = []  # whose tables are made together, in the order of the layers
        self._passes: dict[int, _Pass] = {}  # that are going on, by thread
        # The transformer is compiled as a whole, so that what its layers are given is taken back. It stays so: other
        # threads, whose passes begin and end meanwhile, would have code traced anew.
        self._whole = False
        self._outside = False  # within a pass that is not compiled, so that code in it is of parts

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.record(output.shape[-2], output.shape[-1])
        if not torch.compiler.is_compiling():
            self._by_hand = False
            current = self._passes.get(threading.get_ident())
            if current is not None:
                current.recorded = True
                current.grid = None  # an interrupted pass ends nowhere
            self._track(output)
        elif self._whole and not self._outside:
            self._give(product_type(output))

    def __getstate__(self) -> dict[str, Any]:
        fresh = {"_passes": {}, "_whole": False, "_outside": False, "_replayed": {}, "_pending": {}}
        made_again = dict.fromkeys(("_thread", "_calls", "_untracked", "_vit", "_hooked_to"))
        return {**self.__dict__, **fresh, **made_again}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._thread, self._calls, self._untracked = _OfThread(), weakref.WeakSet(), WeakTensorKeyDictionary()
        self._vit = self._hooked_to = None  # the copy's own says in its first call
        for name in ("_by_hand", "_by_code", "_whole", "_outside"):
            self.__dict__.setdefault(name, False)  # made by an older version

    # -- the hook ------------------------------------------------------------------------------------------------------

    def follow(self, vit: nn.Module) -> None:
        """Hooks this to the projection of a transformer, unless it is: another may have taken its place."""
        if self._vit is None or self._vit() is None:  # replicas come and go
            self._vit = weakref.ref(vit)
        part = projection(vit)
        if part is not None and not self._is_hooked_to(part):
            part.register_forward_hook(self)

    @torch.compiler.assume_constant_result
    def _follow_again(self, vit: nn.Module) -> bool:
        """The same while compiled code is traced, now: a hook that the trace itself added would come too late."""
        self.follow(vit)
        return True

    def _is_hooked_to(self, part: nn.Module) -> bool:
        if self._hooked_to is not None and self._hooked_to() is part:
            return True
        # The part may have been wrapped in another.
        found = any(hook is self for module in part.modules() for hook in module._forward_hooks.values())
        if found:
            self._hooked_to = weakref.ref(part)
        return found

    @torch.compiler.assume_constant_result
    def _is_lost(self) -> bool:
        """Whether the projection is one that this is not hooked to, so that the grid is that of an earlier call."""
        vit = None if self._vit is None else self._vit()
        if vit is None or self._by_hand:
            return False
        part = projection(vit)
        return part is None or not self._is_hooked_to(part)

    # -- tables made together ------------------------------------------------------------------------------------------

    def begin(self, module: nn.Module, args: Any) -> None:
        """A forward pre-hook of the transformer: tables are shared by the layers within one pass, never beyond."""
        if torch.compiler.is_compiling():
            self._whole = True
            # Seen by the trace, so that it is made anew where another projection stands there.
            part = projection(module)
            if part is not None and not any(hook is self for hook in part._forward_hooks.values()):
                self._follow_again(module)
        else:
            self.follow(module)
            self._passes[threading.get_ident()] = _Pass()
            self._outside = True

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        """Its forward hook."""
        if not torch.compiler.is_compiling():
            self._mark(output)
            self._passes.pop(threading.get_ident(), None)
            self._outside = bool(self._passes)
        self._release()
        if torch.compiler.is_exporting():
            self._whole = False

    def leave(self, module: nn.Module, args: Any) -> None:
        """A forward pre-hook of the norm behind the layers. The hooks of a compiled model itself are not in its graph, which
        would have to return tables that stay until :meth:`end`."""
        if not torch.compiler.is_compiling():
            self._mark(args)
        self._release()

    def _release(self) -> None:
        if self._whole:
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

    def tell(self, height: int, width: int) -> None:
        """The grid of the next calls, where no patch embedding records it."""
        self.record(height, width)
        self._by_hand = True

    def record(self, height: int, width: int) -> None:
        if isinstance(height, torch.SymInt) or isinstance(width, torch.SymInt):
            raise Error("a mask needs a known grid of patches; export once per image size, with no dynamic height or width")
        self.grid = grid = (height, width)  # from here on another thread may set self.grid
        self._by_code = torch.compiler.is_compiling()
        if torch.compiler.is_compiling():
            return
        self._thread.grid = grid
        if torch._C._current_graph_task_id() != -1:  # the patches too are run again
            self._replay(grid, None)

    @property
    def own(self) -> tuple[int, int]:
        """The grid that this thread has recorded last; that of any where it has none, or where code has recorded since."""
        current = self._passes.get(threading.get_ident())
        if self._by_code and not (current is not None and current.recorded):
            return self.grid
        return self._thread.grid or self.grid

    def _track(self, patches: Tensor) -> None:
        self._mark(patches)
        if patches.grad_fn is None and torch.is_grad_enabled():
            call = _Call(self.own)
            self._calls.add(call)
            self._pending[threading.get_ident()] = call

    def passed(self, module: nn.Module, args: Any, output: Any) -> None:
        """A forward hook of the blocks. A call whose patches have no gradient lives as long as what comes of them."""
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1:
            return
        thread = threading.get_ident()
        call = self._pending.get(thread)
        if call is None:
            return
        for tensor in _tensors(args):
            self._untracked[tensor] = call
        for tensor in _tensors(output):
            if tensor.grad_fn is not None:
                cast("dict[str, Any]", tensor.grad_fn.metadata)["violin"] = call
                self._pending.pop(thread, None)

    def _mark(self, tensors: Any) -> None:
        """The backward pass of these belongs to the grid of this thread's call, or of the call that is run again."""
        self._pending.pop(threading.get_ident(), None)
        task = torch._C._current_graph_task_id()
        grid = self.own if task == -1 else self._replayed.get(task)
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
            forget: Any = functools.partial(self._forget, task, self.grid)
            torch.autograd.Variable._execution_engine.queue_callback(forget)  # type: ignore[attr-defined]
        self._replayed[task] = grid
        self.grid = grid  # the one that compiled layers can read

    def _forget(self, task: int, grid: tuple[int, int]) -> None:
        """A backward pass is over. grid: the one before it, for layers that are called without their patches."""
        self._replayed.pop(task, None)
        self.grid = grid

    def lookup(self, tokens: int, name: str) -> tuple[int, int]:
        """The grid of a call with so many tokens, prefix tokens included."""
        patches, compiling = tokens - self.prefix, torch.compiler.is_compiling()
        if not compiling and torch._C._current_graph_task_id() != -1:
            return self._lookup_again(patches, name)
        if self._is_lost():
            raise Error(
                f"{name}: the patch embedding was replaced after plug(), and the grid of this call is not known; call "
                "the model itself once, not compiled, or give set_grid(height, width)"
            )
        grid = self.grid if compiling else self.own
        return grid if grid[0] * grid[1] == patches else self._guess(tokens, name)

    def _lookup_again(self, patches: int, name: str) -> tuple[int, int]:
        """Within a backward pass."""
        replayed = self._replayed.get(torch._C._current_graph_task_id())
        if replayed is not None and replayed[0] * replayed[1] == patches:
            return replayed
        alive = {call.grid for call in self._calls}
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
