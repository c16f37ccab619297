"""What a model is, as the C++ binary takes it: its JSON, its tensors under timm's names, how it wants its images."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from torch import Tensor, nn

from . import _fields, _layout
from .config import MaskConfig
from .errors import Error, pixels
from .grids import GridRecorder
from .layers import Attention, MultiheadAttention, PairAttention
from .mask import ViolinMask, from_config
from .plugging import Structure, described, find, sites, unwrapped, wrap

_INTERPOLATIONS = ("bilinear", "bicubic", "lanczos")
_LARGEST_SIZE = 1 << 14
_TORCHVISION = (
    (r"^class_token$", "cls_token"),
    (r"^conv_proj\.", "patch_embed.proj."),
    (r"^encoder\.pos_embedding$", "pos_embed"),
    (r"^encoder\.layers\.encoder_layer_(\d+)\.", r"blocks.\1."),
    (r"\.ln_1\.", ".norm1."),
    (r"\.ln_2\.", ".norm2."),
    (r"\.self_attention\.in_proj_(weight|bias)$", r".attn.qkv.\1"),
    (r"\.self_attention\.out_proj\.", ".attn.proj."),
    (r"\.self_attention\.violin\.", ".attn.violin."),
    (r"\.mlp\.(0|linear_1)\.", ".mlp.fc1."),
    (r"\.mlp\.(3|linear_2)\.", ".mlp.fc2."),
    (r"^encoder\.ln\.", "norm."),
    (r"^heads\.head\.", "head."),
)


def canonical(structure: Structure, name: str) -> str:
    """timm's name of a parameter, wherever torch.compile has wrapped a part."""
    name = name.replace("_orig_mod.", "")
    if structure.family == "torchvision":
        for pattern, replacement in _TORCHVISION:
            name = re.sub(pattern, replacement, name)
        return name
    if name == "register_tokens":
        return "reg_token"
    return re.sub(r"^blocks\.\d+\.(\d+)\.", r"blocks.\1.", name)  # chunks of blocks


def _side(size: Sequence[int]) -> int | list[int]:
    return int(size[0]) if size[0] == size[1] else [int(size[0]), int(size[1])]


def _text(size: Sequence[int]) -> str:
    return f"{size[0]}x{size[1]}"


def _size_of(module: Any) -> tuple[int, int]:
    return (module, module) if isinstance(module, int) else (int(module[0]), int(module[1]))


def _part(module: Any, name: str) -> Any:
    """A part of a module; either may be inside of a wrapper."""
    part = getattr(unwrapped(module), name, None)
    return unwrapped(part) if isinstance(part, nn.Module) else part


def model_config(model: nn.Module) -> dict[str, Any]:
    """The model's JSON description, with timm's argument names, as the C++ binary takes it (``--config``).

    An error names what the C++ model does not have.
    """
    structure = find(model)
    vit: Any = structure.vit
    block: Any = structure.blocks[0][1]
    attention: Any = sites(structure)[0].module

    def need(good: bool, what: str) -> None:
        if not good:
            raise Error(f"{type(vit).__name__} has {what}, which the C++ model does not have")

    def plain(module: Any) -> bool:
        return module is None or isinstance(module, nn.Identity)

    config: dict[str, Any] = {}
    mlp = _part(block, "mlp")
    need(isinstance(mlp, nn.Module), f"blocks of another kind ({type(block).__name__})")
    if structure.family == "torchvision":
        conv = _part(vit, "conv_proj")
        need(isinstance(conv, nn.Conv2d), "a stem of convolutions")
        heads = [name for name, _ in vit.heads.named_children()] if isinstance(vit.heads, nn.Sequential) else []
        need(heads == ["head"], f"another head than one linear layer ({type(vit.heads).__name__} of {len(heads)})")
        size, head = _size_of(vit.image_size), vit.heads.head
        fc1 = _part(mlp, "0")
        need(isinstance(fc1, nn.Linear), f"another kind of MLP ({type(mlp).__name__})")
        norm, last, dim = _part(block, "ln_1"), _part(vit.encoder, "ln"), int(vit.hidden_dim)
        scale = None
        config.update(class_token=True, distilled=False, reg_tokens=0, pos_embed="learn", no_embed_class=False)
        config.update(global_pool="token", fc_norm=False, qkv_bias=attention.in_proj_bias is not None)
        resample = "timm"
    else:
        norm, fc1, fc2 = _part(block, "norm1"), _part(mlp, "fc1"), _part(mlp, "fc2")
        need(isinstance(norm, nn.Module), "blocks of another kind")
        for part in ("q_norm", "k_norm", "norm"):
            need(plain(getattr(attention, part, None)), f"{part} in its attention")
        need(plain(getattr(attention, "gate", None)), "gated attention")
        for site in sites(structure):
            qkv: Any = getattr(site.module, "qkv", None)
            wrapped = described(site.name + ".qkv", qkv)
            need(isinstance(getattr(qkv, "weight", None), Tensor), f"{wrapped} instead of a linear layer")
        need(plain(getattr(vit, "norm_pre", None)), "a norm before its blocks")
        need(plain(getattr(vit, "attn_pool", None)), "attention pooling")
        need(not getattr(vit, "pool_include_prefix", False), "prefix tokens in its average")
        linear = isinstance(fc1, nn.Linear) and isinstance(fc2, nn.Linear)
        need(linear, f"another kind of MLP ({type(mlp).__name__}), without linear fc1 and fc2")
        need(fc1.out_features == fc2.in_features, "a gated MLP")
        act = getattr(mlp, "act", None)
        need(isinstance(act, nn.GELU) and act.approximate == "none", f"{type(act).__name__} in its MLP")
        embed = _part(vit, "patch_embed")
        conv = _part(embed, "proj")
        others = [child for name, child in embed.named_children() if name != "proj"]
        embeds = isinstance(conv, nn.Conv2d) and all(map(plain, others))
        need(embeds, f"another patch embedding ({type(embed).__name__})")
        dim, head = int(vit.embed_dim), getattr(vit, "head", None)
        patch = conv.kernel_size
        size = (structure.grid[0] * patch[0], structure.grid[1] * patch[1])
        own = getattr(embed, "img_size", None)
        size = _size_of(own) if own is not None else size
        positions = getattr(vit, "pos_embed", None)
        distilled = getattr(vit, "dist_token", None) is not None
        has_class = getattr(vit, "cls_token", None) is not None
        registers = getattr(vit, "reg_token", None)
        registers = getattr(vit, "register_tokens", None) if registers is None else registers
        pool = getattr(vit, "global_pool", "token")
        need(pool in ("token", "avg", ""), f"global_pool {pool!r}")
        need(pool == "token" or not distilled, f"global_pool {pool!r} beside a distillation token")
        fc_norm = not plain(_part(vit, "fc_norm"))
        last = _part(vit, "fc_norm" if fc_norm else "norm")
        if plain(last):
            raise Error(f"{type(vit).__name__} has no final norm, which the C++ model has")
        scale = getattr(block, "ls1", None)
        scale = None if plain(scale) else scale
        config.update(
            class_token=has_class,
            distilled=distilled,
            reg_tokens=0 if registers is None else int(registers.shape[1]),
            pos_embed="none" if positions is None else "learn",
            no_embed_class=bool(getattr(vit, "no_embed_class", False)) or hasattr(vit, "register_tokens"),
            global_pool=pool,
            fc_norm=fc_norm,
            qkv_bias=attention.qkv.bias is not None,
        )
        resample = "timm" if structure.family == "timm" else "dino"
    need(conv.stride == conv.kernel_size, f"patches of {_text(conv.kernel_size)} at a distance of {_text(conv.stride)}")
    need(conv.padding in ((0, 0), "valid"), "padded patches")
    # Both leave out the pixels of a patch that is not whole; timm may instead add some to it.
    padded = getattr(getattr(vit, "patch_embed", None), "dynamic_img_pad", False)
    whole = all(side % step == 0 for side, step in zip(size, conv.stride))
    need(whole or not padded, f"images of {_text(size)} that are padded to patches of {_text(conv.stride)}")
    unusual = next(_unusual(structure, getattr(norm, "eps", 0.0), last), None)
    need(unusual is None, str(unusual))
    config = {
        "img_size": _side(size),
        "patch_size": _side(conv.kernel_size),
        "in_chans": conv.in_channels,
        "num_classes": int(head.weight.shape[0]) if hasattr(head, "weight") else 0,
        "embed_dim": dim,
        "depth": len(structure.blocks),
        "num_heads": int(attention.num_heads),
        "mlp_ratio": _layout.mlp_ratio(fc1.out_features, dim),
        **config,
        "init_values": None if scale is None else float(getattr(scale, "init_values", 1e-5)),
        "norm_eps": norm.eps,
        "pos_resample": resample,
    }
    expected = _layout.shapes(config)
    mask = mask_config(structure)
    if mask is not None:
        config["violin"] = mask.to_json()
        own = from_config(mask, config["num_heads"], native_grid(config), device="meta").state_dict()
        covered = [index for index in range(config["depth"]) if mask.covers(index)]
        expected.update({f"blocks.{i}.attn.violin.{name}": tuple(own[name].shape) for i in covered for name in own})
    misfit = _layout.misfit({name: value.shape for name, value in state(model).items()}, expected)
    if misfit:
        raise Error(f"{type(vit).__name__} {misfit}")
    return config


def _unusual(structure: Structure, eps: float, last: nn.Module | None) -> Iterator[str]:
    """Parts that compute something else than those of the C++ model, whatever their names and shapes."""
    norms, mlp = ("norm1", "norm2"), ("fc1", "act", "fc2")
    if structure.family == "torchvision":
        norms, mlp = ("ln_1", "ln_2"), ("0", "1", "3")
    heads = None
    for site, (name, block) in zip(sites(structure), structure.blocks):
        layer: Any = site.module
        if not isinstance(layer, (Attention, MultiheadAttention)):
            try:
                layer = wrap(site, None, GridRecorder(structure.grid, structure.prefix))
            except Error:
                yield described(site.name, layer)
                continue
        heads = heads or layer.num_heads
        if layer.num_heads != heads:
            yield f"{heads} and {layer.num_heads} attention heads"
        if not math.isclose(getattr(layer, "scale", layer.head_dim**-0.5), layer.head_dim**-0.5, rel_tol=1e-6):
            yield f"attention with scale {layer.scale}"
        pair = isinstance(layer, (PairAttention, MultiheadAttention))
        if not _layout.usual_block(block, norms[0], site.child, norms[1], pair):  # then it has all of them
            yield f"blocks of another kind: {described(name, block)}"
        if not _layout.usual_mlp(_part(block, "mlp"), *mlp):
            yield f"another kind of MLP: {described(name + '.mlp', _part(block, 'mlp'))}"
        for norm in norms:
            if not _layout.usual_norm(_part(block, norm), eps):
                yield f"another norm: {described(f'{name}.{norm}', _part(block, norm))}"
    if not _layout.usual_norm(last, eps):
        yield f"another norm behind its blocks ({type(last).__name__})"


def mask_config(structure: Structure) -> MaskConfig | None:
    """What the masks of a model are, plugged in or built with :class:`~violin.Attention`."""
    found = [(site, cast(Any, site.module)) for site in sites(structure)]
    found = [(site, layer) for site, layer in found if isinstance(getattr(layer, "violin", None), ViolinMask)]
    if not found:
        return None
    first = found[0][1].violin.config
    for site, layer in found:
        if mask_kind(layer.violin.config) != mask_kind(first):
            raise Error(f"{site.name} has another kind of mask than {found[0][0].name}; one file describes one kind")
        if layer._grids.prefix != structure.prefix:
            raise Error(f"{site.name} has prefix={layer._grids.prefix}; the model has {structure.prefix} prefix tokens")
    numbers = tuple(site.block for site, _ in found)
    return replace(first, blocks=None if len(numbers) == len(structure.blocks) else numbers)


def mask_kind(config: MaskConfig) -> dict[str, Any]:
    """What a mask computes from its parameters."""
    result = replace(config, blocks=None).to_json()
    result.pop("init")
    return {**result, "curves": config.names}


def disagreement(
    structure: Structure, described: Mapping[str, Any], positions: bool, chosen: Collection[str] = ()
) -> str | None:
    """What a description (:func:`violin._fields.checked`) says otherwise than a model, of what tensors do not prove; None
    where they agree. positions: the weights have a position per patch, and the grid matters. chosen: fields that the
    model has otherwise because its builder wants it so."""
    norms = [unwrapped(child) for _, block in structure.blocks for child in block.children()]
    norms += [] if structure.norm is None else [unwrapped(structure.norm)]
    found: list[tuple[str, Any]] = [("num_heads", int(cast(Any, site.module).num_heads)) for site in sites(structure)]
    found += [("norm_eps", norm.eps) for norm in norms if isinstance(norm, nn.LayerNorm)]
    pool = getattr(structure.vit, "global_pool", "")
    if pool and described["global_pool"]:  # without pooling a model gives all tokens, and its caller pools
        found.append(("global_pool", pool))
    for field, ours in found:
        theirs = described[field]
        same = math.isclose(ours, theirs, rel_tol=1e-6) if field == "norm_eps" else ours == theirs
        if not same and field not in chosen:
            return f"{field} is {theirs!r} in the weights' description and {ours!r} in the model"
    theirs, ours = native_grid(described), structure.grid
    if positions and theirs != ours and math.prod(theirs) == math.prod(ours):  # 3x5 and 5x3 have tensors of equal shape
        return f"the weights have positions for {_text(theirs)} patches and the model for {_text(ours)}"
    return None


def native_grid(config: Mapping[str, Any]) -> tuple[int, int]:
    size, patch = _size_of(config["img_size"]), _size_of(config["patch_size"])
    return size[0] // patch[0], size[1] // patch[1]


def state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters under timm's names, as a weights file holds them."""
    structure = find(model)
    result = {canonical(structure, name): value.detach() for name, value in structure.vit.state_dict().items()}
    result.pop("mask_token", None)
    # DINOv2's code adds a position to the class token and none to registers.
    if hasattr(structure.vit, "register_tokens"):
        positions = result["pos_embed"]
        result["cls_token"] = result["cls_token"] + positions[:, :1]
        result["pos_embed"] = positions[:, 1:]
    return result


def preprocessing_of(
    model: nn.Module, given: Mapping[str, Any] | None, config: Mapping[str, Any]
) -> dict[str, Any] | None:
    if given is not None and not isinstance(given, Mapping):
        raise Error(f"preprocessing is {given!r}; expected a dict, for example {{'crop_pct': 0.9}}")
    given = {key: value for key, value in (given or {}).items() if value is not None}
    vit = find(model).vit
    published = dict(getattr(vit, "pretrained_cfg", None) or {})
    if not given and not published:
        return None
    known = ("size", "crop_pct", "crop", "interpolation", "mean", "std", "input_size", "crop_mode")
    for key in given:
        if key not in known:
            raise Error(f"preprocessing has a field {key!r}; there are {', '.join(known)}")
    if published.get("interpolation") not in _INTERPOLATIONS:
        published["interpolation"] = "bicubic"
    published["crop"] = "squash" if published.get("crop_mode") == "squash" else "centre"
    # Unless given, what this model was built for: its weights once may have been for another size. What a file said, and
    # load() put into the configuration, holds as long as its model does.
    published["size"] = config["img_size"]
    file = cast("Mapping[str, Any]", getattr(vit, "violin_file", {}))
    if "preprocessing" in file and _fields.checked(file["model"])["img_size"] == _size_of(config["img_size"]):
        published["size"] = published.get("input_size", (3, *_size_of(config["img_size"])))[-2:]
    if "input_size" in given:
        whole = given["input_size"]  # (channels, height, width)
        given.setdefault("size", whole[-2:] if isinstance(whole, Sequence) else whole)
    if "crop_mode" in given:
        given.setdefault("crop", given["crop_mode"])

    def value(field: str, default: Any) -> Any:
        found = given.get(field, published.get(field))
        return default if found is None else found

    def bad(field: str, found: Any, expected: str) -> Error:
        return Error(f"preprocessing: {field} is {found!r}; expected {expected}")

    def number(found: Any) -> float:
        try:
            return math.nan if isinstance(found, (bool, str)) else float(found)
        except (TypeError, ValueError):
            return math.nan

    def channels(field: str, default: Sequence[float], least: float, expected: str) -> list[float]:
        found = value(field, default)
        numbers = [number(one) for one in found] if isinstance(found, Iterable) else []
        if len(numbers) != 3 or not all(math.isfinite(one) and one > least for one in numbers):
            raise bad(field, found, expected)
        return numbers

    size = pixels("preprocessing: size", value("size", None))
    if max(size) > _LARGEST_SIZE:
        raise bad("size", value("size", None), f"at most {_LARGEST_SIZE}")
    crop_pct = number(value("crop_pct", 0.875))
    if not 0.05 <= crop_pct <= 1:
        raise bad("crop_pct", value("crop_pct", 0.875), "a share from 0.05 to 1")
    crop = value("crop", "centre")
    if crop not in ("centre", "center", "squash"):
        raise bad("crop", crop, "centre or squash")
    interpolation = value("interpolation", "bicubic")
    if interpolation not in _INTERPOLATIONS:
        raise bad("interpolation", interpolation, "one of " + ", ".join(_INTERPOLATIONS))
    return {
        "size": _side(size),
        "crop_pct": crop_pct,
        "crop": "squash" if crop == "squash" else "centre",
        "interpolation": interpolation,
        "mean": channels("mean", (0.485, 0.456, 0.406), -math.inf, "three numbers"),
        "std": channels("std", (0.229, 0.224, 0.225), 0, "three numbers above 0"),
    }


def as_timm_says_it(preprocessing: Mapping[str, Any], channels: int) -> dict[str, Any]:
    """What :func:`preprocessing_of` returned, as timm's models have it in ``pretrained_cfg``."""
    return {
        "input_size": (channels, *_size_of(preprocessing["size"])),
        "crop_pct": preprocessing["crop_pct"],
        "crop_mode": "squash" if preprocessing["crop"] == "squash" else "center",
        "interpolation": preprocessing["interpolation"],
        "mean": tuple(preprocessing["mean"]),
        "std": tuple(preprocessing["std"]),
    }
