"""Initial values of a mask's parameters. Equal seeds and names give those of the C++ library."""

from __future__ import annotations

import math
import operator

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from . import curves as curve_module
from .config import ADDING, MaskConfig
from .errors import Error


def _mixed(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
    return x ^ (x >> 31)


def generator_for(seed: int, name: str) -> torch.Generator:
    """The C++ library's generator of a parameter's initial values: equal seeds and names give equal values there."""
    try:
        number = None if isinstance(seed, bool) else operator.index(seed)
    except TypeError:
        number = None
    if number is None:
        raise Error(f"seed is {seed!r}; expected a whole number, or None for torch's generator")
    state = _mixed(number % 2**64)
    for byte in name.encode():
        state = _mixed(state ^ byte)
    return torch.Generator("cpu").manual_seed(state)


def _length(head: int, heads: int, patches: int) -> float:
    """Decay lengths from four patches to the whole grid, growing by equal factors."""
    shortest = min(4.0, patches)
    share = 0.5 if heads == 1 else head / (heads - 1)
    return shortest * (patches / shortest) ** share


def _fill_beta(values: Tensor, init: str, patches: int, generator: torch.Generator | None) -> None:
    if init == "pretrain":
        values.uniform_(5, 9, generator=generator)
    elif init == "finetune":
        values.uniform_(15, 20, generator=generator)
    elif init == "none":
        values.normal_(0, 0.5, generator=generator)
    elif init == "spread":
        heads = values.shape[-1]
        for head in range(heads):
            values[..., head] = -math.log(math.expm1(1 / _length(head, heads, patches)))


def _fill_rate(values: Tensor, config: MaskConfig, grid: tuple[int, int], generator: torch.Generator | None) -> None:
    longest = curve_module.longest(",".join(config.names), *grid, values.device)
    units, patches = longest.float().view(-1, *(1 for _ in values.shape[1:])), math.prod(grid)
    # What add_v1 adds must differ within a row, or neither the decay nor alpha, which is 0, ever has a gradient.
    still = config.init == "identity" and config.strategy != "add_v1"
    if still:
        values.zero_()
    elif config.init in ("identity", "spread"):
        heads = values.shape[-1]
        for head in range(heads):
            values[..., head] = (units / _length(head, heads, patches))[..., 0]
    else:  # the same decay as the other parameterisation would start with
        _fill_beta(values, config.init, patches, generator)
        values.copy_(-logsigmoid(values) * units)


def _fill_alpha(values: Tensor, config: MaskConfig, generator: torch.Generator | None) -> None:
    if config.init in ("pretrain", "none"):
        values.normal_(0, 0.5, generator=generator)
    elif config.init == "finetune":
        values.normal_(1, 0.02, generator=generator)
    else:
        values.fill_(0 if config.init == "identity" and config.strategy in ADDING else 1)


def fill(
    name: str, values: Tensor, config: MaskConfig, grid: tuple[int, int], generator: torch.Generator | None
) -> None:
    """Fills one parameter of a mask whose model has this grid."""
    patches = math.prod(grid)
    if name == "beta":
        _fill_beta(values, config.init, patches, generator)
    elif name == "prefix_beta":
        values.fill_(9.0) if config.init == "spread" else _fill_beta(values, config.init, patches, generator)
    elif name == "rate":
        _fill_rate(values, config, grid, generator)
    elif name == "prefix_rate":
        values.zero_()
    elif name == "curve_weight":
        values.fill_(1 / len(config.names))
    elif name == "alpha":
        _fill_alpha(values, config, generator)
