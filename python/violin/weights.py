"""Weights files that the C++ binary reads and writes, and weights with the published names.

A file is safetensors with timm's parameter names and three texts beside them: ``violin.model`` (the model's JSON),
``violin.preprocessing`` and ``violin.classes``.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import pathlib
import re
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from . import _fields, _layout, _safetensors
from . import curves as curve_module
from .config import MaskConfig
from .description import (
    as_timm_says_it,
    canonical,
    disagreement,
    mask_config,
    mask_kind,
    model_config,
    native_grid,
    preprocessing_of,
    state,
)
from .errors import Error, first_line, pixels
from .mask import ViolinMask
from .plugging import Structure, find, plug_config, sites, unplug

VERSION = "0.1.0"
# Around weights, by preference; an average only where it is asked for.
_WRAPPERS = ("teacher", "model", "state_dict", "model_state_dict", "student", "net", "ema", "model_ema",
             "state_dict_ema", "module", "_orig_mod", "backbone")  # fmt: skip
_AVERAGES = ("model_ema", "state_dict_ema", "ema")
_AVERAGE_FILE = "ema.safetensors"
_MODEL = ("patch_embed.", "blocks.", "conv_proj.", "encoder.layers.")  # how names of a model begin
_MASK = re.compile(r"blocks\.(\d+)\.attn\.violin\.")
_ABOUT = ("model", "preprocessing", "classes")  # what a file says about itself, as JSON
_TORCH = (b"PK\x03\x04", b"PK\x05\x06", b"\x80")  # how files of torch.save begin: a zip archive, of old a pickle


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
    _refuse_other_parameters(model)
    config = model_config(model)
    tensors = state(model)
    native = native_grid(config)
    for index, mask in _indexed_masks(model):
        if mask.rate is not None and mask.grid != native:  # the unit of rate belongs to the model's own grid
            tensors[f"blocks.{index}.attn.violin.rate"] = mask.rate_for(native)
    if classes is not None and (isinstance(classes, str) or not isinstance(classes, Sequence)):
        raise Error(f"classes is {classes!r}; expected a list of names, in the order of the logits")
    for name in classes or ():
        if not isinstance(name, str):
            raise Error(f"classes has {name!r}; expected names, each a text")
        if not name.isascii() and any("\ud800" <= letter <= "\udfff" for letter in name):
            raise Error(f"classes has {name!r}, which UTF-8 does not hold")
    if classes is not None and config["num_classes"] != len(classes):
        raise Error(f"{len(classes)} class names for a model of {config['num_classes']} classes")
    metadata = {"violin.model": json.dumps(config), "violin.version": VERSION}
    shown = preprocessing_of(model, preprocessing, config)
    if shown is not None:
        metadata["violin.preprocessing"] = json.dumps(shown)
    if classes is not None:
        metadata["violin.classes"] = json.dumps(list(classes), ensure_ascii=False)
    _safetensors.save_file(tensors, path, metadata)


def _refuse_other_parameters(model: nn.Module) -> None:
    """A file holds a transformer; a head around it would be lost without a word."""
    structure = find(model)
    ours = {id(parameter) for parameter in structure.vit.parameters()}
    others = [name for name, parameter in model.named_parameters() if id(parameter) not in ours]
    if others:
        raise Error(
            f"{type(model).__name__} has parameters outside of its vision transformer ({_listed(others)}), which a weights "
            f"file does not hold; save the transformer alone, violin.save(model.{structure.name.rstrip('.')}, …)"
        )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")


def _indexed_masks(model: nn.Module) -> list[tuple[int, ViolinMask]]:
    found = [(site.block, getattr(site.module, "violin", None)) for site in sites(find(model))]
    return [(block, mask) for block, mask in found if isinstance(mask, ViolinMask)]


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
    if not isinstance(source, (str, os.PathLike)):
        raise Error(f"the source of weights is a {type(source).__name__}; expected a path or a state dict")
    path = _weights_file(Path(source), branch)
    weights, about = _read_file(path)
    return _unwrap(weights, "" if path.name == _AVERAGE_FILE else branch, str(path)), about


def _read_file(path: Path) -> tuple[Mapping[str, Any], dict[str, str]]:
    """Formats are told by content, as the C++ side tells them, since names lie."""
    try:
        with path.open("rb") as file:
            start = file.read(64)
    except FileNotFoundError:
        raise Error(f"{path} does not exist") from None
    except OSError as error:
        raise Error(f"{path} cannot be read: {error.strerror}") from None
    if not start:
        raise Error(f"{path} is empty")
    if _safetensors.begins(start):
        return _safetensors.load_file(path)
    if start.startswith(_TORCH):
        return _read_torch(path), {}
    if path.suffix.lower() == ".safetensors":
        return _safetensors.load_file(path)  # says what is wrong with it
    raise Error(f"{path} is neither a safetensors file nor a file of torch.save")


def _read_torch(path: Path) -> Mapping[str, Any]:
    try:
        # Given a path, torch looks at its name.
        with torch.serialization.safe_globals(_harmless()), path.open("rb") as file:
            content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a broken or hostile file brings up
        foreign = re.search(r"GLOBAL (\S+)", str(error))
        if foreign:
            raise Error(
                f"{path} holds a {foreign[1]} beside its weights, which is not read: save the state dict alone, or allow it "
                "with torch.serialization.add_safe_globals"
            ) from error
        raise Error(f"{path} is no file of plain weights ({first_line(error)})") from error
    if not isinstance(content, Mapping):
        raise Error(f"{path} holds a {type(content).__name__}; expected a state dict, or a dict that holds one")
    return content


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
    try:
        found = dict(_flat(weights))
    except RecursionError:
        raise Error(f"{where} holds dicts within dicts without an end; expected a state dict") from None

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
        if len({value.shape for value in betas.values()}) > 1:
            raise Error(f"{layer}.ai_list has curves of several shapes; expected one number per head in each")
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
    if shape is not None and 0 in shape:
        raise Error(f"the weights have a mask with decays of shape {list(shape)}; expected one per curve and head")
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

    source: a safetensors file or one of torch.save, whatever its name, the folder of a run (its best weights, otherwise
    its last), or a state dict.
    branch: of a file with several, "student", "ema", …; unless given, a teacher before a student, a model before its
    average.
    A model without masks gets those that the weights have: as the file describes them, else told from the tensors,
    ``curves`` and ``strategy``. strict: every parameter is there and no other, and the model is what the file describes:
    its heads, norms, pooling, grid of positions and kind of mask. Where weights do not fit, the model stays as it was.
    Returns what the file says about itself: ``model``, ``preprocessing``, ``classes``.
    """
    raw, metadata = _read(source, branch)
    about = _about(metadata)
    described = _described(about)
    structure = find(model)
    weights = {canonical(structure, name): value for name, value in translate(raw).items()}
    if strict and described:
        _prove(described, weights)
        _compare(structure, described, "pos_embed" in weights)
    mask = described["violin"] if described else None
    # Strictly, a mask that is described and has no tensors is missed by _fill, like any other part.
    if _indexed_masks(model) or not (any(map(_MASK.match, weights)) or (strict and mask is not None)):
        mask = None
    elif mask is None and described and strict:
        raise Error("the weights have a mask that their description does not have; plug the model before load_state()")
    elif mask is None:
        heads = int(cast(Any, sites(structure)[0].module).num_heads)
        mask = _guessed(weights, heads, curves, strategy)
    _fill(model, weights, mask, native_grid(described) if described else None, strict)
    return about


def _fill(
    model: nn.Module,
    weights: dict[str, Tensor],
    mask: MaskConfig | None,
    native: tuple[int, int] | None,
    strict: bool,
) -> None:
    """_put() into a model that is given a mask first, and loses it again where the weights do not fit."""
    if mask is None:
        _put(model, weights, native, strict)
        return
    plug_config(model, mask)
    try:
        _put(model, weights, native, strict)
    except BaseException:
        unplug(model)
        raise


def _prove(described: Mapping[str, Any], weights: Mapping[str, Tensor], everything: bool = False) -> None:
    """Sizes that a file describes count where its tensors prove them: a few bytes could ask for a model beyond all
    memory. everything: no tensor may be missing."""
    for name, shape in _layout.shapes(described).items():
        found = tuple(weights[name].shape) if name in weights else None
        if found is None and everything:
            raise Error(f"the weights have no {name}, which their description has")
        if found is not None and found != shape:
            raise Error(f"{name} is {list(found)} in the weights, whose description has it as {list(shape)}")


def _compare(structure: Structure, described: Mapping[str, Any], positions: bool, chosen: Collection[str] = ()) -> None:
    """Refuses a model that is not as the weights' description says, where tensors would not tell."""
    problem = disagreement(structure, described, positions, chosen)
    if problem:
        raise Error(f"{problem}; load_state(..., strict=False) takes the tensors all the same")
    own, mask = mask_config(structure), described["violin"]
    if own is None or mask is None:
        return

    def kind(config: MaskConfig) -> dict[str, Any]:
        all_of = {"blocks": len(structure.blocks), "heads": described["num_heads"]}
        chosen = {field: list(getattr(config, field) or range(count)) for field, count in all_of.items()}
        return {**mask_kind(config), **chosen}

    ours, theirs = kind(own), kind(mask)
    for field in ours:
        if ours[field] != theirs[field]:
            raise Error(
                f"the weights' mask has {field} {theirs[field]} and the model's {ours[field]}; unplug the model and "
                "load_state() plugs what the file describes"
            )


def _put(model: nn.Module, weights: dict[str, Tensor], native: tuple[int, int] | None, strict: bool) -> None:
    """Weights under timm's names into a model. native: the grid that the weights were made for, where known."""
    structure = find(model)
    names = {canonical(structure, name): name for name in structure.vit.state_dict()}
    if hasattr(structure.vit, "register_tokens") and "reg_token" in weights:
        raise Error("weights cannot be put back into DINOv2's own class: its class token has a position of its own")
    unexpected = sorted(set(weights) - set(names))
    missing = sorted(set(names) - set(weights))
    if strict and (unexpected or missing):
        vanilla = not unexpected and all(map(_MASK.match, missing)) and not any(map(_MASK.match, weights))
        raise Error(
            f"the weights do not fit {type(structure.vit).__name__}: "
            + "; ".join(
                f"{len(found)} {what} ({_listed(found)})"
                for what, found in (("missing", missing), ("not expected", unexpected))
                if found
            )
            + ("; weights without a mask are loaded before violin.plug(model), or with strict=False" if vanilla else "")
        )
    chosen = {names[name]: value for name, value in weights.items() if name in names}
    own = structure.vit.state_dict()
    for name, value in chosen.items():
        plain = value.layout == torch.strided and not (value.is_nested or value.is_meta or value.is_quantized)
        if not plain or value.is_complex():
            raise Error(f"{name} is no plain tensor of real numbers in the weights")
        if value.shape != own[name].shape:
            raise Error(f"{name} is {list(value.shape)} in the weights and {list(own[name].shape)} in the model")
    for index, mask in _indexed_masks(model):
        rate = names.get(f"blocks.{index}.attn.violin.rate")
        if native is not None and native != mask.grid and rate is not None and rate in chosen:
            chosen[rate] = mask.rescaled(chosen[rate].cpu(), native, mask.grid)
    structure.vit.load_state_dict(chosen, strict=False)


def _about(metadata: Mapping[str, str]) -> dict[str, Any]:
    """What a file says about itself."""
    about = {key: _parsed("violin." + key, metadata["violin." + key]) for key in _ABOUT if "violin." + key in metadata}
    if not isinstance(about.get("preprocessing", {}), dict):
        raise Error("the weights file's violin.preprocessing is no JSON object")
    classes = about.get("classes", [])
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        raise Error("the weights file's violin.classes is no list of names")
    return about


def _described(about: Mapping[str, Any]) -> dict[str, Any] | None:
    """The model that a file describes, every field checked before anything is built of it."""
    if "model" not in about:
        return None
    try:
        return _fields.checked(about["model"])
    except Error as error:
        raise Error(f"the weights file's violin.model: {error}") from None


def _parsed(key: str, text: str) -> Any:
    def no_number(name: str) -> Any:
        raise ValueError(name)

    try:
        return json.loads(text, parse_constant=no_number)  # NaN and Infinity are Python's own
    except (ValueError, RecursionError):
        raise Error(f"the weights file's {key} is no JSON") from None


def load(path: str | os.PathLike[str], branch: str = "", **overrides: Any) -> nn.Module:
    """The model of a weights file or of a run's folder, as a timm VisionTransformer with its masks; needs timm.

    branch: as :func:`load_state` takes it. overrides: arguments of timm's constructor, for example
    ``dynamic_img_size=True``. What the file says about itself is the model's attribute ``violin_file``; how it wants its
    images is also where timm and :func:`save` look for it, in ``pretrained_cfg``.
    """
    try:
        from timm.models.deit import VisionTransformerDistilled
        from timm.models.vision_transformer import VisionTransformer
    except ImportError as error:
        raise ImportError("violin.load builds a timm model: pip install timm") from error
    if isinstance(path, Mapping):
        raise Error("path is a state dict; expected a file or a folder (violin.load_state(model, …) takes state dicts)")
    raw, metadata = _read(path, branch)
    weights, about = translate(raw), _about(metadata)
    described = _described(about)
    if described is None:
        raise Error(f"{path} does not say what model it holds; build one and use violin.load_state(model, path)")
    if described["adapters"]:
        raise Error(f"{path} holds low-rank adapters; merge them first: violin convert {path} OUT --merge-adapters")
    _prove(described, weights, everything=True)
    config = dict(described)
    for field in ("violin", "adapters", "pos_resample"):
        config.pop(field)
    norm = functools.partial(nn.LayerNorm, eps=config.pop("norm_eps"))
    kind = VisionTransformerDistilled if config.pop("distilled") else VisionTransformer
    if kind is VisionTransformerDistilled:
        for field in ("class_token", "reg_tokens"):
            config.pop(field)
    model = kind(norm_layer=norm, **{**config, **overrides})
    cast(Any, model).violin_file = about
    _keep_preprocessing(model, about, described, overrides.get("img_size"))
    _compare(find(model), described, "pos_embed" in weights, overrides)
    _fill(model, weights, described["violin"], native_grid(described), strict=True)
    return model


def _keep_preprocessing(
    model: nn.Module, about: Mapping[str, Any], described: Mapping[str, Any], img_size: int | Sequence[int] | None
) -> None:
    """What a file says about its images, in the model that was built of it. img_size: the builder's own."""
    said = about.get("preprocessing")
    if said and img_size is not None and pixels("img_size", img_size) != described["img_size"]:
        said = {**said, "size": img_size}
    try:
        preprocessing = preprocessing_of(model, said, described)
    except Error as error:
        raise Error(f"the weights file's violin.preprocessing: {error}") from None
    if preprocessing is not None:
        cast(Any, model).pretrained_cfg = as_timm_says_it(preprocessing, described["in_chans"])
