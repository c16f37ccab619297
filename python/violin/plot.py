"""Pictures of curves, masks and decays; needs matplotlib (``pip install violin[plot]``). Every function returns a figure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from . import curves as curve_module
from .errors import Error, sides, whole
from .mask import ViolinMask
from .plugging import masks as model_masks

try:
    import matplotlib.pyplot as plt
except ImportError as error:
    raise ImportError("violin.plot needs matplotlib: pip install matplotlib") from error


def _panels(count: int, columns: int, size: float = 2.2) -> tuple[Any, list[Any]]:
    columns = min(whole("columns", columns, 1), count)
    rows = -(-count // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(size * columns, size * rows), squeeze=False, layout="constrained"
    )
    flat = list(axes.flat)
    for axis in flat[count:]:
        axis.axis("off")
    return figure, flat[:count]


def curves(names: str | Sequence[str] = "violin", grid: Sequence[int] = (14, 14), columns: int = 4) -> Any:
    """The walk of each curve over the grid, coloured from first to last."""
    chosen = curve_module.names(names)
    if not chosen:
        raise Error("no curves are named; expected a set, a name or several")
    figure, axes = _panels(len(chosen), columns)
    height, width = sides("grid", grid)
    for axis, name in zip(axes, chosen):
        ranks = curve_module.ranks(name, grid)
        if ranks.dim() != 1:
            raise Error(f"{name} is a distance and no walk; there is no path to draw")
        order = ranks.argsort()
        x, y = order % width, order // width
        axis.plot(x, y, color="0.7", linewidth=1, zorder=1)
        axis.scatter(x, y, c=range(height * width), s=8, cmap="viridis", zorder=2)
        axis.set(title=name, xlim=(-0.5, width - 0.5), ylim=(height - 0.5, -0.5), xticks=[], yticks=[], aspect="equal")
    return figure


def mask(
    source: ViolinMask | Tensor,
    grid: Sequence[int],
    at: Sequence[int] = (0, 0),
    prefix: int = 0,
    columns: int = 4,
) -> Any:
    """The mask around one patch (row, column), a panel per head. source: a mask, or tables [h,P+N,P+N]."""
    height, width = sides("grid", grid)
    tokens = whole("prefix", prefix) + height * width
    if not isinstance(at, Sequence) or len(at) != 2 or not (0 <= at[0] < height and 0 <= at[1] < width):
        raise Error(f"at is {at!r}; expected (row, column) of a patch in the grid, {height}x{width}")
    if not isinstance(source, (ViolinMask, Tensor)):
        raise Error(f"source is a {type(source).__name__}; expected a ViolinMask or tables [heads,tokens,tokens]")
    with torch.no_grad():
        table = source.mask(grid, prefix) if isinstance(source, ViolinMask) else source
    if table.dim() != 3 or table.shape[1:] != (tokens, tokens):
        raise Error(
            f"the tables are {list(table.shape)}; expected [heads, {tokens}, {tokens}] for a grid of {height}x{width} and "
            f"prefix={prefix}: give the grid and the prefix that they were made for"
        )
    token = prefix + int(at[0]) * width + int(at[1])
    rows = table[:, token, prefix:].detach().float().cpu().view(-1, height, width)
    heads = source.masked_heads if isinstance(source, ViolinMask) else range(len(rows))
    figure, axes = _panels(len(rows), columns)
    for axis, row, head in zip(axes, rows, heads):
        image = axis.imshow(row.numpy(), cmap="magma", vmin=min(0.0, float(row.min())), vmax=max(1.0, float(row.max())))
        axis.plot(at[1], at[0], "+", color="tab:cyan", markersize=8)
        axis.set(title=f"head {head}", xticks=[], yticks=[])
    figure.colorbar(image, ax=axes, shrink=0.8)
    return figure


def decays(model: nn.Module, length: bool = True) -> Any:
    """Decay by layer x head x curve, a panel per block. length: patches after which a curve has faded to 1/e, as a
    logarithm; otherwise gamma itself."""
    layers = list(model_masks(model))
    if not layers:
        raise Error("the model has no masks; violin.plug(model) puts them in")
    figure, axes = _panels(len(layers), 4, 2.6)
    values = []
    with torch.no_grad():
        for _, layer in layers:
            log_gamma = layer.log_decay().float().cpu()
            log_gamma = log_gamma.flatten(0, 1) if log_gamma.dim() == 3 else log_gamma
            values.append((-log_gamma).clamp_min(1e-9).reciprocal().log10() if length else log_gamma.exp())
    low, high = min(float(v.min()) for v in values), max(float(v.max()) for v in values)
    for index, (axis, (name, layer), value) in enumerate(zip(axes, layers, values)):
        image = axis.imshow(
            value.numpy(), aspect="auto", cmap="viridis", vmin=low, vmax=high if high > low else low + 1
        )
        numbers = re.findall(r"\d+", name)  # the last one is the block's
        axis.set(
            title=f"block {numbers[-1] if numbers else index}", xlabel="head", xticks=range(len(layer.masked_heads))
        )
        axis.set_xticklabels([str(head) for head in layer.masked_heads])
        labels = layer.curve_names if len(layer.curve_names) == len(value) else range(len(value))
        axis.set_yticks(range(len(value)), [str(label) for label in labels] if index % 4 == 0 else [""] * len(value))
    figure.colorbar(image, ax=axes, label="log10 of patches to 1/e" if length else "gamma")
    return figure
