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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from . import _layout, _safetensors
from . import curves as curve_module
from .config import MaskConfig
from .errors import Error, pixels
from .layers import Attention, GridRecorder, MultiheadAttention, PairAttention
from .mask import ViolinMask, from_config, longest
from .plugging import Structure, described, find, plug_config, sites, unplug, wrap

_INTERPOLATIONS = ("bilinear", "bicubic", "lanczos")
_LARGEST_SIZE = 1 << 14
VERSION = "0.1.0"
# Around weights, by preference; an average only where it is asked for.
_WRAPPERS = ("teacher", "model", "state_dict", "model_state_dict", "student", "net", "ema", "model_ema",
             "state_dict_ema", "module", "_orig_mod", "backbone")  # fmt: skip
_AVERAGES = ("model_ema", "state_dict_ema", "ema")
_AVERAGE_FILE = "ema.safetensors"
_MODEL = ("patch_embed.", "blocks.", "conv_proj.", "encoder.layers.")  # how names of a model begin
_MASK = re.compile(r"blocks\.(\d+)\.attn\.violin\.")
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
    attention: Any = sites(structure)[0].module

    def need(good: bool, what: str) -> None:
        if not good:
            raise Error(f"{type(vit).__name__} has {what}, which the C++ model does not have")

    def plain(module: Any) -> bool:
        return module is None or isinstance(module, nn.Identity)

    config: dict[str, Any] = {}
    need(isinstance(getattr(block, "mlp", None), nn.Module), f"blocks of another kind ({type(block).__name__})")
    if structure.family == "torchvision":
        need(isinstance(vit.conv_proj, nn.Conv2d), "a stem of convolutions")
        need(len(vit.heads) == 1, "a hidden layer in its head")
        size, conv, head = _size_of(vit.image_size), vit.conv_proj, vit.heads.head
        fc1, norm, last, dim = block.mlp[0], block.ln_1, vit.encoder.ln, int(vit.hidden_dim)
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
        others = [child for name, child in vit.patch_embed.named_children() if name != "proj"]
        embeds = isinstance(conv, nn.Conv2d) and all(map(plain, others))
        need(embeds, f"another patch embedding ({type(vit.patch_embed).__name__})")
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
        need(pool == "token" or not distilled, f"global_pool {pool!r} beside a distillation token")
        fc_norm = not plain(getattr(vit, "fc_norm", None))
        last = getattr(vit, "fc_norm" if fc_norm else "norm", None)
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
    need(all(a % b == 0 for a, b in zip(size, conv.stride)) and conv.stride == conv.kernel_size, "overlapping patches")
    need(conv.padding in ((0, 0), "valid"), "padded patches")
    unusual = next(_unusual(structure, getattr(norm, "eps", 0.0), last), None)
    need(unusual is None, str(unusual))
    config = {
        "img_size": _side(size),
        "patch_size": _side(conv.kernel_size),
        "in_chans": conv.in_channels,
        "num_classes": 0 if head is None else int(head.weight.shape[0]),
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
    mask = _mask_config(structure)
    if mask is not None:
        config["violin"] = mask.to_json()
        own = from_config(mask, config["num_heads"], _native(config), device="meta").state_dict()
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
        parts = cast("dict[str, nn.Module]", block._modules)
        if not _layout.usual_mlp(parts["mlp"], *mlp):
            yield f"another kind of MLP: {described(name + '.mlp', parts['mlp'])}"
        for norm in norms:
            if not _layout.usual_norm(parts[norm], eps):
                yield f"another norm: {described(f'{name}.{norm}', parts[norm])}"
    if not _layout.usual_norm(last, eps):
        yield f"another norm behind its blocks ({type(last).__name__})"


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
    size, crop_pct, crop, interpolation, mean, std. Fields that are not given are those of a timm model's
    ``pretrained_cfg``, then ImageNet's.
    """
    config = model_config(model)
    tensors = state(model)
    native = _native(config)
    for index, (_, mask) in _indexed_masks(model):
        if mask.rate is not None and mask.grid != native:  # the unit of rate belongs to the model's own grid
            tensors[f"blocks.{index}.attn.violin.rate"] = mask.rate_for(native)
    if classes is not None and (isinstance(classes, str) or not isinstance(classes, Sequence)):
        raise Error(f"classes is {classes!r}; expected a list of names, in the order of the logits")
    for name in classes or ():
        if not isinstance(name, str):
            raise Error(f"classes has {name!r}; expected names, each a text")
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
    if given is not None and not isinstance(given, Mapping):
        raise Error(f"preprocessing is {given!r}; expected a dict, for example {{'crop_pct': 0.9}}")
    given = {key: value for key, value in (given or {}).items() if value is not None}
    published = dict(getattr(find(model).vit, "pretrained_cfg", None) or {})
    if not given and not published:
        return None
    known = ("size", "crop_pct", "crop", "interpolation", "mean", "std", "input_size", "crop_mode")
    for key in given:
        if key not in known:
            raise Error(f"preprocessing has a field {key!r}; there are {', '.join(known)}")
    if published.get("interpolation") not in _INTERPOLATIONS:
        published["interpolation"] = "bicubic"
    published["crop"] = "squash" if published.get("crop_mode") == "squash" else "centre"
    # Unless given, what this model was built for: its weights once may have been for another size.
    published["size"] = config["img_size"]
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


# -- reading -------------------------------------------------------------------------------------------------------------


def _weights_file(path: Path, branch: str) -> Path:
    """The file itself, or a run's: its best weights, otherwise its last."""
    if not path.is_dir():
        return path
    if branch == "ema":
        places = [path / place / _AVERAGE_FILE for place in ("best", "last", ".")]
    else:
        places = [path / place / "model.safetensors" for place in ("best", "last", ".")]
    for place in places:
        if place.is_file():
            return place
    if branch == "ema":
        raise Error(f"{path} holds no average of weights; train with --ema 0.9999 to keep one")
    raise Error(
        f"{path} holds no weights: neither best/model.safetensors nor last/model.safetensors is there; give a file"
    )


def _read(
    source: str | os.PathLike[str] | Mapping[str, Any], branch: str
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Weights and what is written about them."""
    if isinstance(source, Mapping):
        return _unwrap(source, branch, "the state dict"), {}
    path = _weights_file(Path(source), branch)
    weights, about = _read_file(path)
    return _unwrap(weights, "" if path.name == _AVERAGE_FILE else branch, str(path)), about


def _read_file(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
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


def _flat(weights: Mapping[Any, Any], before: str = "") -> Iterator[tuple[str, Tensor]]:
    for key, value in weights.items():
        if isinstance(value, Tensor):
            yield f"{before}{key}", value
        elif isinstance(value, Mapping):
            yield from _flat(value, f"{before}{key}.")


def _unwrap(weights: Mapping[str, Any], branch: str, where: str) -> dict[str, Tensor]:
    """The state dict inside what training scripts save, without prefixes of wrappers; as the C++ side does it."""
    found = dict(_flat(weights))

    def first_parts() -> dict[str, None]:
        return {name.partition(".")[0]: None for name in found if "." in name}

    top, wanted = first_parts(), branch
    while True:
        keys = first_parts()
        names = (wanted, *_AVERAGES) if wanted == "ema" else (wanted,)
        key = next((name for name in names if name in keys), None)
        if key is not None:
            wanted = ""
        elif any(name.startswith(_MODEL) for name in found):
            break
        else:
            key = next((name for name in _WRAPPERS if name in keys), None)
        if key is None:
            break
        found = {name[len(key) + 1 :]: value for name, value in found.items() if name.startswith(key + ".")}
    if wanted:
        raise Error(f"{where} has no branch {branch!r}; at the top it has {', '.join(list(top)[:8]) or 'none'}")
    return found


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
    ours = {name.rsplit(".", 1)[-1]: value for name, value in weights.items() if _MASK.match(name)}
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
    blocks = sorted({int(mask[1]) for mask in map(_MASK.match, weights) if mask})
    depth = 1 + max(int(block[1]) for block in (re.match(r"blocks\.(\d+)\.", name) for name in weights) if block)
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
    branch: str = "",
) -> dict[str, Any]:
    """Loads weights into a model: files of this package and of the C++ binary, published Violin weights, timm's, and those
    of the model's own class.

    source: a .safetensors or .pth file, the folder of a run (its best weights, otherwise its last), or a state dict.
    branch: of a file with several, "student", "ema", …; unless given, a teacher before a student, a model before its
    average.
    A model without masks gets those that the weights have: as the file describes them, else told from the tensors,
    ``curves`` and ``strategy``. strict: every parameter is there and no other, and masks are of the kind that the file
    describes. Where weights do not fit, the model stays as it was.
    Returns what the file says about itself: ``model``, ``preprocessing``, ``classes``.
    """
    raw, metadata = _read(source, branch)
    structure = find(model)
    weights = {_canonical(structure, name): value for name, value in translate(raw).items()}
    about = {key: _parsed("violin." + key, metadata["violin." + key]) for key in _ABOUT if "violin." + key in metadata}
    described = about.get("model") or {}
    own = _mask_config(structure)
    described_mask = MaskConfig.from_json(described["violin"]) if described.get("violin") else None
    if own is None and any(map(_MASK.match, weights)):
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


def load(path: str | os.PathLike[str], branch: str = "", **overrides: Any) -> nn.Module:
    """The model of a weights file or of a run's folder, as a timm VisionTransformer with its masks; needs timm.

    branch: as :func:`load_state` takes it. overrides: arguments of timm's constructor, for example
    ``dynamic_img_size=True``. What the file says about itself is the model's attribute ``violin_file``.
    """
    try:
        from timm.models.deit import VisionTransformerDistilled
        from timm.models.vision_transformer import VisionTransformer
    except ImportError as error:
        raise ImportError("violin.load builds a timm model: pip install timm") from error
    metadata = _read(path, branch)[1]
    if "violin.model" not in metadata:
        raise Error(f"{path} does not say what model it holds; build one and use violin.load_state(model, path)")
    config = dict(_parsed("violin.model", metadata["violin.model"]))
    if config.pop("adapters", None):
        raise Error(f"{path} holds low-rank adapters; merge them first: violin convert {path} OUT --merge-adapters")
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
    cast(Any, model).violin_file = load_state(model, path, branch=branch)
    return model
