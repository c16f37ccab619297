"""Weights files that the C++ binary reads and writes, and weights with the published names.

A file is safetensors with timm's parameter names and three texts beside them: ``violin.model`` (the model's JSON),
``violin.preprocessing`` and ``violin.classes``.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import math
import os
import pathlib
import re
import types
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from . import _safetensors
from . import curves as curve_module
from .config import MaskConfig
from .errors import Error
from .mask import ViolinMask, longest
from .plugging import Structure, find, masks, plug_config, sites, unplug, unwrapped

_INTERPOLATIONS = ("nearest", "bilinear", "bicubic")
VERSION = "0.1.0"
_ABOUT = ("model", "preprocessing", "classes")  # what a file says about itself, as JSON
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


def _canonical(structure: Structure, name: str) -> str:
    """timm's name of a parameter."""
    if structure.family == "torchvision":
        for pattern, replacement in _TORCHVISION:
            name = re.sub(pattern, replacement, name)
        return name
    if name == "register_tokens":
        return "reg_token"
    return re.sub(r"^blocks\.\d+\.(\d+)\.", r"blocks.\1.", name)  # chunks of blocks


def _side(size: Sequence[int]) -> int | list[int]:
    return int(size[0]) if size[0] == size[1] else [int(size[0]), int(size[1])]


def _size_of(module: Any) -> tuple[int, int]:
    return (module, module) if isinstance(module, int) else (int(module[0]), int(module[1]))


def model_config(model: nn.Module) -> dict[str, Any]:
    """The model's JSON description, with timm's argument names, as the C++ binary takes it (``--config``).

    An error names what the C++ model does not have.
    """
    structure = find(model)
    vit: Any = structure.vit
    block: Any = structure.blocks[0][1]
    site = sites(structure)[0]
    attention: Any = site.module

    def need(good: bool, what: str) -> None:
        if not good:
            raise Error(f"{type(vit).__name__} has {what}, which the C++ model does not have")

    def plain(module: Any) -> bool:
        return module is None or isinstance(module, nn.Identity)

    config: dict[str, Any] = {}
    if structure.family == "torchvision":
        need(isinstance(vit.conv_proj, nn.Conv2d), "a stem of convolutions")
        need(len(vit.heads) == 1, "a hidden layer in its head")
        size, conv, head = _size_of(vit.image_size), vit.conv_proj, vit.heads.head
        fc1, norm, dim = block.mlp[0], block.ln_1, int(vit.hidden_dim)
        scale = None
        config.update(class_token=True, distilled=False, reg_tokens=0, pos_embed="learn", no_embed_class=False)
        config.update(global_pool="token", fc_norm=False, qkv_bias=attention.in_proj_bias is not None)
        resample = "timm"
    else:
        need(isinstance(getattr(block, "norm1", None), nn.Module), "blocks of another kind")
        for part in ("q_norm", "k_norm", "norm"):
            need(plain(getattr(attention, part, None)), f"{part} in its attention")
        need(plain(getattr(attention, "gate", None)), "gated attention")
        need(plain(getattr(vit, "norm_pre", None)), "a norm before its blocks")
        need(plain(getattr(vit, "attn_pool", None)), "attention pooling")
        need(not getattr(vit, "pool_include_prefix", False), "prefix tokens in its average")
        need(hasattr(block.mlp, "fc1") and hasattr(block.mlp, "fc2"), "another kind of MLP")
        need(block.mlp.fc1.out_features == block.mlp.fc2.in_features, "a gated MLP")
        act = getattr(block.mlp, "act", None)
        need(isinstance(act, nn.GELU) and act.approximate == "none", f"{type(act).__name__} in its MLP")
        conv, fc1, norm = vit.patch_embed.proj, block.mlp.fc1, block.norm1
        need(isinstance(conv, nn.Conv2d) and plain(getattr(vit.patch_embed, "norm", None)), "another patch embedding")
        dim, head = int(vit.embed_dim), getattr(vit, "head", None)
        if head is None or not hasattr(head, "weight"):
            head = None
        patch = conv.kernel_size
        size = (structure.grid[0] * patch[0], structure.grid[1] * patch[1])
        own = getattr(vit.patch_embed, "img_size", None)
        size = _size_of(own) if own is not None else size
        positions = getattr(vit, "pos_embed", None)
        distilled = getattr(vit, "dist_token", None) is not None
        has_class = getattr(vit, "cls_token", None) is not None
        registers = getattr(vit, "reg_token", None)
        registers = getattr(vit, "register_tokens", None) if registers is None else registers
        pool = getattr(vit, "global_pool", "token")
        need(pool in ("token", "avg", ""), f"global_pool {pool!r}")
        fc_norm = not plain(getattr(vit, "fc_norm", None))
        need(fc_norm or not plain(getattr(vit, "norm", None)), "no final norm")
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
    need(all(a % b == 0 for a, b in zip(size, conv.stride)) and conv.stride == conv.kernel_size, "overlapping patches")
    config = {
        "img_size": _side(size),
        "patch_size": _side(conv.kernel_size),
        "in_chans": conv.in_channels,
        "num_classes": 0 if head is None else int(head.weight.shape[0]),
        "embed_dim": dim,
        "depth": len(structure.blocks),
        "num_heads": int(attention.num_heads),
        "mlp_ratio": _ratio(fc1.out_features, dim),
        **config,
        "init_values": None if scale is None else float(getattr(scale, "init_values", 1e-5)),
        "norm_eps": norm.eps,
        "pos_resample": resample,
    }
    mask = _mask_config(structure)
    if mask is not None:
        config["violin"] = mask.to_json()
    return config


def _ratio(hidden: int, dim: int) -> float:
    """The quotient from which int(dim * ratio) is the hidden width again."""
    ratio = hidden / dim
    while int(dim * ratio) < hidden:
        ratio = math.nextafter(ratio, math.inf)
    return ratio


def _mask_config(structure: Structure) -> MaskConfig | None:
    """What the masks of a model are, plugged in or built with :class:`~violin.Attention`."""
    plugged = getattr(structure.vit, "_violin", None)
    if plugged is not None:
        return plugged.config
    found = [(site, cast(Any, site.module)) for site in sites(structure)]
    found = [(site, layer) for site, layer in found if isinstance(getattr(layer, "violin", None), ViolinMask)]
    if not found:
        return None
    first = found[0][1].violin.config
    for site, layer in found:
        if _description(layer.violin.config) != _description(first):
            raise Error(f"{site.name} has another kind of mask than {found[0][0].name}; one file describes one kind")
        if layer._grids.prefix != structure.prefix:
            raise Error(f"{site.name} has prefix={layer._grids.prefix}; the model has {structure.prefix} prefix tokens")
    numbers = tuple(site.block for site, _ in found)
    return replace(first, blocks=None if len(numbers) == len(structure.blocks) else numbers)


def _description(config: MaskConfig) -> dict[str, Any]:
    """What a mask computes from its parameters."""
    result = replace(config, blocks=None).to_json()
    result.pop("init")
    return {**result, "curves": config.names}


def _native(config: Mapping[str, Any]) -> tuple[int, int]:
    size, patch = _size_of(config["img_size"]), _size_of(config["patch_size"])
    return size[0] // patch[0], size[1] // patch[1]


def state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters under timm's names, as a weights file holds them."""
    structure = find(model)
    result = {_canonical(structure, name): value.detach() for name, value in structure.vit.state_dict().items()}
    result.pop("mask_token", None)
    # DINOv2's code adds a position to the class token and none to registers.
    if hasattr(structure.vit, "register_tokens"):
        positions = result["pos_embed"]
        result["cls_token"] = result["cls_token"] + positions[:, :1]
        result["pos_embed"] = positions[:, 1:]
    return result


def save(
    model: nn.Module,
    path: str | os.PathLike[str],
    classes: Sequence[str] | None = None,
    preprocessing: Mapping[str, Any] | None = None,
) -> None:
    """Writes a weights file that ``violin eval``, ``predict`` and ``finetune`` take as it is.

    classes: names in the order of the logits. preprocessing: as timm's ``resolve_data_config`` gives it, or with the fields
    size, crop_pct, crop, interpolation, mean, std; read from a timm model's ``pretrained_cfg`` unless given.
    """
    config = model_config(model)
    tensors = state(model)
    native = _native(config)
    for index, (_, mask) in _indexed_masks(model):
        if mask.rate is not None and mask.grid != native:  # the unit of rate belongs to the model's own grid
            tensors[f"blocks.{index}.attn.violin.rate"] = mask.rate_for(native)
    if classes is not None and (isinstance(classes, str) or not isinstance(classes, Sequence)):
        raise Error(f"classes is {classes!r}; expected a list of names, in the order of the logits")
    if classes is not None and config["num_classes"] != len(classes):
        raise Error(f"{len(classes)} class names for a model of {config['num_classes']} classes")
    metadata = {"violin.model": json.dumps(config), "violin.version": VERSION}
    shown = _preprocessing(model, preprocessing, config)
    if shown is not None:
        metadata["violin.preprocessing"] = json.dumps(shown)
    if classes is not None:
        metadata["violin.classes"] = json.dumps(list(classes), ensure_ascii=False)
    _safetensors.save_file(tensors, path, metadata)


def _indexed_masks(model: nn.Module) -> list[tuple[int, tuple[str, ViolinMask]]]:
    structure = find(model)
    found = []
    for site in sites(structure):
        mask = getattr(site.module, "violin", None)
        if isinstance(mask, ViolinMask):
            found.append((site.block, (site.name, mask)))
    return found


def _preprocessing(
    model: nn.Module, given: Mapping[str, Any] | None, config: Mapping[str, Any]
) -> dict[str, Any] | None:
    source = given if given is not None else getattr(unwrapped(model), "pretrained_cfg", None)
    if not source:
        return None
    size = _size_of(config["img_size"])
    # Unless given, what this model was built for: its weights once may have been for another size.
    if given is not None and given.get("size"):
        if isinstance(given["size"], str):
            raise Error(f"preprocessing: size is {given['size']!r}; expected a number or (height, width)")
        size = _size_of(given["size"])
    elif given is not None and given.get("input_size"):
        size = _size_of(given["input_size"][-2:])
    return {
        "size": _side(size),
        "crop_pct": source.get("crop_pct", 0.875),
        "crop": "squash" if "squash" in (source.get("crop_mode"), source.get("crop")) else "centre",
        "interpolation": source["interpolation"] if source.get("interpolation") in _INTERPOLATIONS else "bicubic",
        "mean": list(source.get("mean", (0.485, 0.456, 0.406))),
        "std": list(source.get("std", (0.229, 0.224, 0.225))),
    }


# -- reading -------------------------------------------------------------------------------------------------------------


def _read(source: str | os.PathLike[str] | Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, str]]:
    if isinstance(source, Mapping):
        return dict(source), {}
    path = Path(source)
    if path.suffix == ".safetensors":
        return _safetensors.load_file(path)
    try:
        with torch.serialization.safe_globals(_harmless()):
            return torch.load(path, map_location="cpu", weights_only=True), {}
    except FileNotFoundError:
        raise Error(f"{path} does not exist") from None
    except Exception as error:  # whatever a broken or hostile file brings up
        foreign = re.search(r"GLOBAL (\S+)", str(error))
        if foreign:
            raise Error(
                f"{path} holds a {foreign[1]} beside its weights, which is not read: save the state dict alone, or allow it "
                "with torch.serialization.add_safe_globals"
            ) from error
        raise Error(f"{path} is no file of plain weights ({str(error).splitlines()[0]})") from error


def _harmless() -> list[Any]:
    """What training scripts keep beside weights, and does nothing when it is read."""
    kinds = ("Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath")
    paths = [getattr(pathlib, name) for name in kinds]
    dates = [datetime.datetime, datetime.date, datetime.timedelta]
    return [argparse.Namespace, types.SimpleNamespace, *paths, *dates, *_harmless_numpy()]


def _harmless_numpy() -> list[Any]:
    try:
        import numpy
    except ImportError:
        return []
    core = numpy._core if hasattr(numpy, "_core") else numpy.core  # type: ignore[attr-defined]
    names = ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool")
    kinds = {type(numpy.dtype(name)) for name in names}
    # Under both names that the module has had.
    scalar, rebuild = core.multiarray.scalar, core.multiarray._reconstruct
    renamed = [
        (function, f"numpy.{package}.multiarray.{name}")
        for function, name in ((scalar, "scalar"), (rebuild, "_reconstruct"))
        for package in ("core", "_core")
    ]
    return [numpy.dtype, numpy.ndarray, *kinds, *renamed]


def _unwrap(weights: Mapping[str, Any]) -> dict[str, Tensor]:
    """The state dict inside what training scripts save: model_ema before model, DINO's teacher."""
    for key in ("model_ema", "state_dict_ema", "teacher", "model", "state_dict"):
        inner = weights.get(key)
        if isinstance(inner, Mapping) and inner:
            weights = inner
            break
    for prefix in ("module.", "_orig_mod.", "backbone."):
        if any(name.startswith(prefix) for name in weights):
            weights = {name[len(prefix) :]: value for name, value in weights.items() if name.startswith(prefix)}
    return {name: value for name, value in weights.items() if isinstance(value, Tensor)}


def translate(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Published names to ours: ``attn.ai_list.{c}`` [h] -> ``attn.violin.beta`` [C,h], ``attn.ai_list`` [C,h] (fixed decay) ->
    ``attn.violin.gamma``, ``attn.normalize`` -> ``attn.violin.alpha``. Others stay."""
    result: dict[str, Tensor] = {}
    lists: dict[str, dict[int, Tensor]] = {}
    for name, value in weights.items():
        parts = re.match(r"(.*\.attn|attn)\.(ai_list|normalize)(?:\.(\d+))?$", name)
        if parts is None:
            result[name] = value
        elif parts[2] == "normalize":
            result[f"{parts[1]}.violin.alpha"] = value
        elif parts[3] is None:
            result[f"{parts[1]}.violin.gamma"] = value
        else:
            lists.setdefault(parts[1], {})[int(parts[3])] = value
    for layer, betas in lists.items():
        missing = sorted(set(range(len(betas))) - set(betas))
        if missing:
            raise Error(f"{layer}.ai_list.{missing[0]} is missing among {len(betas)} curves")
        result[f"{layer}.violin.beta"] = torch.stack([betas[index] for index in range(len(betas))])
    return result


def _guessed(
    weights: Mapping[str, Tensor], heads: int, curves: str | Sequence[str] | None, strategy: str
) -> MaskConfig:
    """The mask that weights without a description have."""
    ours = {name.rsplit(".", 1)[-1]: value for name, value in weights.items() if ".attn.violin." in name}
    masked = min((0, *value.shape)[-1] for value in ours.values())
    if masked < heads:
        raise Error(f"the weights have masks for {masked} of {heads} heads; say which, plug(model, heads=[...]) first")
    shape = next((ours[name].shape for name in ("beta", "rate", "gamma") if name in ours), None)
    count = 0 if shape is None else int(shape[0])
    if curves is None:
        fitting = [name for name, members in curve_module.SETS.items() if len(members) == count]
        if count and not fitting:
            raise Error(f"the weights have {count} curves; say which, load_state(..., curves=[...])")
        curves = fitting[0] if fitting else ""
    named = curve_module.names(curves)
    if len(named) != count:
        raise Error(f"the weights have {count} curves and curves={curves!r} are {len(named)}")
    blocks = sorted({int(name.split(".")[1]) for name in weights if ".attn.violin." in name})
    depth = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("blocks."))
    return MaskConfig(
        curves=curves,
        strategy=strategy,
        decay=float(ours["gamma"].flatten()[0]) if "gamma" in ours else None,
        decay_per_axis=shape is not None and len(shape) == 3,
        alpha="alpha" in ours,
        curve_weights="curve_weight" in ours,
        prefix_decay="learned" if {"prefix_beta", "prefix_rate"} & set(ours) else "one",
        parameterisation="rate" if {"rate", "prefix_rate"} & set(ours) else "sigmoid",
        blocks=None if len(blocks) == depth else tuple(blocks),
    )


def load_state(
    model: nn.Module,
    source: str | os.PathLike[str] | Mapping[str, Tensor],
    strict: bool = True,
    curves: str | Sequence[str] | None = None,
    strategy: str = "mul_v1",
) -> dict[str, Any]:
    """Loads weights into a model: files of this package and of the C++ binary, published Violin weights, timm's, and those
    of the model's own class.

    source: a .safetensors or .pth file, or a state dict. A model without masks gets those that the weights have: as the file
    describes them, else told from the tensors, ``curves`` and ``strategy``. strict: every parameter is there and no other,
    and masks are of the kind that the file describes. Where weights do not fit, the model stays as it was.
    Returns what the file says about itself: ``model``, ``preprocessing``, ``classes``.
    """
    raw, metadata = _read(source)
    structure = find(model)
    weights = {_canonical(structure, name): value for name, value in translate(_unwrap(raw)).items()}
    about = {key: _parsed("violin." + key, metadata["violin." + key]) for key in _ABOUT if "violin." + key in metadata}
    described = about.get("model") or {}
    own = _mask_config(structure)
    described_mask = MaskConfig.from_json(described["violin"]) if described.get("violin") else None
    if own is None and any(".attn.violin." in name for name in weights):
        heads = int(cast(Any, sites(structure)[0].module).num_heads)
        plug_config(model, described_mask or _guessed(weights, heads, curves, strategy))
        try:
            _put(model, weights, _native(described) if described else None, strict)
        except Error:
            unplug(model)
            raise
        return about
    if strict and own is not None and described_mask is not None:
        depth = range(len(structure.blocks))
        ours, theirs = ({**_description(c), "blocks": [b for b in depth if c.covers(b)]} for c in (own, described_mask))
        for field in ours:
            if ours[field] != theirs.get(field):
                raise Error(
                    f"the weights' mask has {field} {theirs.get(field)} and the model's {ours[field]}; unplug the model and "
                    "load_state() plugs what the file describes"
                )
    _put(model, weights, _native(described) if described else None, strict)
    return about


def _put(model: nn.Module, weights: dict[str, Tensor], native: tuple[int, int] | None, strict: bool) -> None:
    """Weights under timm's names into a model. native: the grid that the weights were made for, where known."""
    structure = find(model)
    names = {_canonical(structure, name): name for name in structure.vit.state_dict()}
    for index, (_, mask) in _indexed_masks(model):
        key = f"blocks.{index}.attn.violin.rate"
        if native is not None and native != mask.grid and key in weights:
            other = longest(",".join(mask.curve_names), native).view(mask._units.shape)
            weights[key] = weights[key] * mask._units.cpu() / other
    if hasattr(structure.vit, "register_tokens") and "reg_token" in weights:
        raise Error("weights cannot be put back into DINOv2's own class: its class token has a position of its own")
    unexpected = sorted(set(weights) - set(names))
    missing = sorted(set(names) - set(weights))
    if strict and (unexpected or missing):
        raise Error(
            f"the weights do not fit {type(structure.vit).__name__}: "
            + "; ".join(
                f"{len(found)} {what} ({', '.join(found[:3])}{', …' if len(found) > 3 else ''})"
                for what, found in (("missing", missing), ("not expected", unexpected))
                if found
            )
        )
    chosen = {names[name]: value for name, value in weights.items() if name in names}
    own = structure.vit.state_dict()
    for name, value in chosen.items():
        if value.shape != own[name].shape:
            raise Error(f"{name} is {list(value.shape)} in the weights and {list(own[name].shape)} in the model")
    structure.vit.load_state_dict(chosen, strict=False)


def _parsed(key: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        raise Error(f"the weights file's {key} is no JSON") from None


def load(path: str | os.PathLike[str], **overrides: Any) -> nn.Module:
    """The model of a weights file, as a timm VisionTransformer with its masks; needs timm.

    overrides: arguments of timm's constructor, for example ``dynamic_img_size=True``. What the file says about itself is the
    model's attribute ``violin_file``.
    """
    try:
        from timm.models.deit import VisionTransformerDistilled
        from timm.models.vision_transformer import VisionTransformer
    except ImportError as error:
        raise ImportError("violin.load builds a timm model: pip install timm") from error
    metadata = _read(path)[1]
    if "violin.model" not in metadata:
        raise Error(f"{path} does not say what model it holds; build one and use violin.load_state(model, path)")
    config = dict(_parsed("violin.model", metadata["violin.model"]))
    if config.pop("adapters", None):
        raise Error(f"{path} holds low-rank adapters; merge them first")
    config.pop("violin", None)
    config.pop("pos_resample", None)
    eps = config.pop("norm_eps", 1e-6)
    kind = VisionTransformerDistilled if config.pop("distilled", False) else VisionTransformer
    for side in ("img_size", "patch_size"):
        config[side] = tuple(config[side]) if isinstance(config[side], list) else config[side]
    if kind is VisionTransformerDistilled:
        for key in ("class_token", "reg_tokens"):
            config.pop(key, None)
    norm = functools.partial(nn.LayerNorm, eps=eps)
    model = kind(norm_layer=norm, **{**config, **overrides})
    cast(Any, model).violin_file = load_state(model, path)
    return model
