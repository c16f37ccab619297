"""What tokens look at: rows of the attention maps, on demand."""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from .errors import Error, numbers, tensor
from .grids import GridRecorder
from .layers import Attention, MapRequest, MultiheadAttention, PairAttention, Request
from .plugging import PARALLEL, Site, Structure, find, grid_of, restore, sites, unwrapped, wrap

Query = int | str | tuple[int, int]

_one_at_a_time = threading.RLock()  # a layer answers one request


def _tokens(queries: Query | Sequence[Query], grid: tuple[int, int], structure: Structure) -> list[int]:
    patch = isinstance(queries, tuple) and len(queries) == 2 and all(map(_is_whole, queries))
    one = patch or isinstance(queries, str) or not isinstance(queries, Iterable)
    asked = cast("list[Query]", [queries] if one else list(cast("Sequence[Query]", queries)))
    if not asked:
        raise Error("queries are empty; expected at least one")
    return [_token(query, grid, structure) for query in asked]


def _chosen(places: list[Site], blocks: Iterable[int] | None) -> list[Site]:
    wanted = sorted(set(range(len(places)) if blocks is None else numbers("blocks", blocks)))
    if wanted and not 0 <= wanted[0] <= wanted[-1] < len(places):
        raise Error(f"blocks are {wanted}; expected numbers from 0 to {len(places) - 1}")
    return [places[index] for index in wanted]


def _heads(places: list[Site], heads: Iterable[int] | None) -> list[int] | None:
    if heads is None:
        return None
    picked = numbers("heads", heads)
    if not picked or min(picked) < 0:
        raise Error(f"heads are {picked}; expected numbers from 0 on, at least one, or None for all")
    for site in places:
        count = int(cast(Any, site.module).num_heads)
        if max(picked) >= count:
            raise Error(f"heads are {picked}; {site.name} has heads 0 to {count - 1}")
    return picked


def _is_whole(value: Any) -> bool:
    """Numbers of numpy and torch included."""
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def _token(query: Query, grid: tuple[int, int], structure: Structure) -> int:
    if isinstance(query, str) and query == "class":
        if not structure.class_token:
            raise Error("the query is 'class', and the model has no class token; give queries=(row, column)")
        return 0
    prefix = structure.prefix
    if isinstance(query, (tuple, list)):
        row, column = map(operator.index, query) if len(query) == 2 and all(map(_is_whole, query)) else (-1, -1)
        if not (0 <= row < grid[0] and 0 <= column < grid[1]):
            raise Error(f"the query patch {query!r} is no (row, column), or outside of the grid, {grid[0]}x{grid[1]}")
        return prefix + row * grid[1] + column
    count = prefix + grid[0] * grid[1]
    token = operator.index(cast(int, query)) if _is_whole(query) else -1
    if not 0 <= token < count:
        raise Error(f"the query is {query!r}; expected a token from 0 to {count - 1}, (row, column) or 'class'")
    return token


class _Reached(Exception):
    """Ends a run of a model at its patches, with their grid."""

    def __init__(self, grid: tuple[int, int]) -> None:
        super().__init__()
        self.grid = grid


def _grid(model: nn.Module, structure: Structure, images: Tensor) -> tuple[int, int]:
    """The grid of images in a call of the model: what stands around a transformer may resize them."""
    if not structure.name:
        return grid_of(structure, images)
    flags = {child: child.training for child in model.modules()}
    here = threading.get_ident()

    def stop(module: nn.Module, args: Any, output: Tensor) -> None:
        if threading.get_ident() == here:  # others go on
            raise _Reached((output.shape[-2], output.shape[-1]))

    handle = structure.patches.register_forward_hook(stop)
    try:
        for child in flags:
            child.training = False  # statistics of a batch stay as they are
        model(images[:1])
    except _Reached as reached:
        return reached.grid
    finally:
        handle.remove()
        for child, training in flags.items():
            child.training = training
    return grid_of(structure, images)


@contextlib.contextmanager
def _asking(places: Sequence[Site], structure: Structure, request: Request) -> Iterator[None]:
    """Within it the layers answer a request of this thread; vanilla ones are wrapped for it."""
    recorder = GridRecorder(structure.grid, structure.prefix)
    borrowed: list[tuple[Site, nn.Module]] = []  # and what stood there, which may be a wrapper
    hooks = []
    try:
        for site in places:
            if not isinstance(site.module, (Attention, MultiheadAttention)):
                stood, layer = getattr(site.parent, site.child), wrap(site, None, recorder)
                setattr(site.parent, site.child, layer)
                borrowed.append((site, stood))
                if isinstance(site.module, PairAttention):
                    wanted = MapRequest(site.child)
                    hooks.append(site.parent.register_forward_pre_hook(wanted, with_kwargs=True))
            cast(Attention, site.module)._request = request
        yield
    finally:
        for site in places:
            module = site.module
            if isinstance(module, (Attention, MultiheadAttention)):
                module._request = module._rows = None
        for hook in hooks:
            hook.remove()
        for site, stood in borrowed:
            restore(site)
            setattr(site.parent, site.child, stood)


@contextlib.contextmanager
def _alone(model: nn.Module) -> Iterator[None]:
    """Within it wrappers for several processes or devices hand this thread's calls on: buffers, which they send, would wait
    for processes that do not ask, and replicas are not asked."""
    here = threading.get_ident()

    def handing_on(wrapper: Any) -> Any:
        usual = wrapper.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            return (wrapper.module if threading.get_ident() == here else usual)(*args, **kwargs)

        return forward

    parallel = (module for module in model.modules() if isinstance(module, PARALLEL))
    wrappers: list[tuple[Any, Any]] = [(module, vars(module).get("forward")) for module in parallel]
    try:
        for wrapper, _ in wrappers:
            wrapper.forward = handing_on(wrapper)
        yield
    finally:
        for wrapper, own in wrappers:
            if own is None:
                vars(wrapper).pop("forward", None)
            else:
                wrapper.forward = own


def _rows(site: Site, model: nn.Module) -> Tensor:
    rows = cast(Attention, site.module)._rows
    if rows is None:
        raise Error(
            f"{site.name} was not run: {type(model).__name__} leaves it out or calls it in another thread; leave it out of "
            "blocks=, or give the transformer itself"
        )
    return rows


@torch.compiler.disable  # code around it goes on compiled before and behind
@torch.no_grad()
def attention_maps(
    model: nn.Module,
    images: Tensor,
    queries: Query | Sequence[Query] = "class",
    blocks: Iterable[int] | None = None,
    heads: Iterable[int] | None = None,
) -> dict[int, Tensor]:
    """What query tokens look at: per block the weights that multiply v, [B,heads,queries,P+N], mask included.

    queries: token numbers (prefix tokens first), patches (row, column), ``"class"``, or a list of them. blocks, heads: numbers
    of those that are wanted, heads in the order of the result; all unless given. Vanilla models work too. No map of a whole image is formed.
    """
    structure = find(model)
    model = unwrapped(model)  # a wrapper may wait for other processes, which do not ask
    tensor("images", images)
    if images.dim() != 4:
        raise Error(f"images are {list(images.shape)}; expected [batch, channels, height, width]")
    places = _chosen(sites(structure), blocks)
    picked = _heads(places, heads)
    chosen = None if picked is None else torch.tensor(picked, device=images.device)
    # Compiled code knows no requests, and is not made anew for this.
    with _one_at_a_time, torch.compiler.set_stance("force_eager"), _alone(model):
        tokens = _tokens(queries, _grid(model, structure, images), structure)
        rows = torch.tensor(tokens, device=images.device)
        with _asking(places, structure, Request(rows, chosen, threading.get_ident())):
            model(images)
            return {site.block: _rows(site, model) for site in places}
