"""What the C++ model is made of: its tensors, and the order of its parts.

Needs torch alone: tools/export_timm.py loads this file without the package.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Shapes = Mapping[str, Sequence[int]]
_Parts = Callable[[str, Tensor], Tensor]


def _sides(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def mlp_ratio(hidden: int, dim: int) -> float:
    """The quotient from which int(dim * ratio) is the hidden width again."""
    ratio = hidden / dim
    while int(dim * ratio) < hidden:
        ratio = math.nextafter(ratio, math.inf)
    return ratio


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of the model that a JSON describes, without its masks."""
    dim, classes = config["embed_dim"], config["num_classes"]
    patch, size = _sides(config["patch_size"]), _sides(config["img_size"])
    result: dict[str, tuple[int, ...]] = {}

    def layer(name: str, *weight: int, bias: bool = True) -> None:
        result[f"{name}.weight"] = weight
        if bias:
            result[f"{name}.bias"] = weight[:1]

    tokens = {"cls_token": config["class_token"], "dist_token": config["distilled"], "reg_token": config["reg_tokens"]}
    result.update({name: (1, int(count), dim) for name, count in tokens.items() if count})
    if config["pos_embed"] == "learn":
        prefix = 0 if config["no_embed_class"] else sum(map(int, tokens.values()))
        result["pos_embed"] = (1, (size[0] // patch[0]) * (size[1] // patch[1]) + prefix, dim)
    layer("patch_embed.proj", dim, config["in_chans"], *patch)
    hidden = int(dim * config["mlp_ratio"])
    for block in (f"blocks.{index}" for index in range(config["depth"])):
        layer(f"{block}.norm1", dim)
        layer(f"{block}.attn.qkv", 3 * dim, dim, bias=config["qkv_bias"])
        layer(f"{block}.attn.proj", dim, dim)
        layer(f"{block}.norm2", dim)
        layer(f"{block}.mlp.fc1", hidden, dim)
        layer(f"{block}.mlp.fc2", dim, hidden)
        if config["init_values"] is not None:
            result[f"{block}.ls1.gamma"] = result[f"{block}.ls2.gamma"] = (dim,)
    layer("fc_norm" if config["fc_norm"] else "norm", dim)
    for head in ("head", "head_dist") if config["distilled"] else ("head",):
        if classes:
            layer(head, classes, dim)
    return result


def misfit(found: Shapes, expected: Shapes) -> str | None:
    """What a model has that the described one has not, or the other way round; None where both have the same."""
    for name in found:
        if name not in expected:
            return f"has {name}, which the C++ model does not have"
    for name in expected:
        if name not in found:
            return f"has no {name}, which the C++ model has"
        if tuple(found[name]) != tuple(expected[name]):
            return f"has {name} {list(found[name])}; the C++ model has it as {list(expected[name])}"
    return None


class _Stamp(nn.Module):
    """In the place of a part: the result tells which parts were run, in which order."""

    def __init__(self, factor: int, pair: bool) -> None:
        super().__init__()
        self.factor, self.pair = factor, pair

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Any:
        return (self.stamp(x), None) if self.pair else self.stamp(x)

    def stamp(self, x: Tensor) -> Tensor:
        return self.factor * x + 1


def _computes(
    module: nn.Module, names: Collection[str], pair: str, expected: Callable[[_Parts, Tensor], Tensor]
) -> bool:
    """Runs a module with stamps for parts. pair: the part that returns a tuple. Parts that are not there do nothing."""
    children = module._modules
    there = [name for name in names if children.get(name) is not None]
    stamps = {name: _Stamp(factor, name == pair) for factor, name in enumerate(there, 2)}
    twin: Any = object.__new__(type(module))
    twin.__dict__.update(module.__dict__)
    twin.__dict__["training"] = False
    twin.__dict__["_modules"] = {
        name: stamps.get(name, nn.Identity() if name.startswith("drop") else child) for name, child in children.items()
    }
    x = torch.full((1, 2, 3), 0.5, device="cpu")

    def part(name: str, y: Tensor) -> Tensor:
        return stamps[name].stamp(y) if name in stamps else y

    try:
        result = type(module).forward(twin, x)
    except Exception:  # noqa: BLE001  (whatever a module of another kind brings up)
        return False
    return isinstance(result, Tensor) and torch.equal(result, expected(part, x))


def usual_block(block: nn.Module, norm1: str, attn: str, norm2: str, pair: bool) -> bool:
    """Whether a block computes x + ls1(attn(norm1(x))), then x + ls2(mlp(norm2(x))). pair: attn returns a tuple."""

    def expected(part: _Parts, x: Tensor) -> Tensor:
        x = x + part("ls1", part(attn, part(norm1, x)))
        return x + part("ls2", part("mlp", part(norm2, x)))

    if any(block._modules.get(name) is None for name in (norm1, attn, norm2, "mlp")):
        return False
    return _computes(block, (norm1, attn, "ls1", norm2, "mlp", "ls2"), attn if pair else "", expected)


def usual_mlp(mlp: nn.Module, fc1: str, act: str, fc2: str) -> bool:
    """Whether an MLP computes fc2(gelu(fc1(x)))."""
    gelu = getattr(mlp, act, None)
    if not (isinstance(gelu, nn.GELU) and gelu.approximate == "none"):
        return False
    return _computes(mlp, (fc1, act, fc2), "", lambda part, x: part(fc2, part(act, part(fc1, x))))


def usual_norm(norm: nn.Module | None, eps: float) -> bool:
    """Whether a norm is torch's, with this epsilon."""
    return isinstance(norm, nn.LayerNorm) and norm.eps == eps
