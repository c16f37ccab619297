"""Puts a mask into the attention layers of a vision transformer, and takes it out again.

A layer's place is taken by one of :mod:`violin.layers` that stands on the same projections: no weight is copied, names in the
state dict stay, and the mask's parameters come beside them as ``….attn.violin.*``.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch.nn.utils.parametrize import is_parametrized

from .config import MaskConfig
from .errors import Error, first_line, pixels, sides, whole
from .grids import GridRecorder, projection
from .layers import Attention, MapRequest, MultiheadAttention, PairAttention, without_autocast
from .mask import ViolinMask, from_config

_PACKED_CHILDREN = {"qkv", "q_norm", "k_norm", "attn_drop", "norm", "gate", "proj", "proj_drop"}
_MULTIHEAD_PARTS = {"in_proj_weight", "in_proj_bias", "out_proj", "parametrizations"}
PARALLEL = (nn.parallel.DistributedDataParallel, nn.DataParallel)
_ARGUMENTS = ("attn_mask", "is_causal", "attn_bias")  # of attention beside x; DINOv2 gives the last for lists alone


class Site(NamedTuple):
    """Where an attention layer stands."""

    block: int
    parent: nn.Module
    child: str
    name: str  # in the model that plug() was given

    @property
    def module(self) -> nn.Module:
        return unwrapped(getattr(self.parent, self.child))


class Structure(NamedTuple):
    """What plug() needs to know about a vision transformer."""

    family: str  # timm, dino or torchvision
    vit: nn.Module
    name: str  # of the transformer inside the model, with a dot behind it, or nothing
    blocks: list[tuple[str, nn.Module]]
    patches: nn.Module  # its output's last two sides are the grid
    grid: tuple[int, int]
    prefix: int
    class_token: bool  # the first of the prefix is one
    norm: nn.Module | None  # behind the blocks


def _pair(value: Any) -> tuple[int, int]:
    return (int(value[0]), int(value[1])) if isinstance(value, (tuple, list)) else (int(value), int(value))


def unwrapped(module: nn.Module) -> nn.Module:
    """The model, or the part of one, inside torch.compile, torch's wrapper for activation checkpointing and those for several
    processes."""
    for name in ("_orig_mod", "_checkpoint_wrapped_module"):
        inner = getattr(module, name, None)
        if isinstance(inner, nn.Module):
            return unwrapped(inner)
    if isinstance(module, PARALLEL):
        return unwrapped(module.module)
    return module


def _is_vit(module: nn.Module) -> bool:
    if unwrapped(module) is not module:  # wrappers pass attributes on
        return False
    if hasattr(module, "patch_embed") and isinstance(getattr(module, "blocks", None), nn.Module):
        return True
    return hasattr(module, "conv_proj") and hasattr(getattr(module, "encoder", None), "layers")


def described(name: str, module: nn.Module) -> str:
    return f"{name or 'the model'} ({type(module).__name__})"


def _checked(model: nn.Module) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise Error(f"the model is a {type(model).__name__}; expected a torch.nn.Module")
    return model


def find(model: nn.Module, grid: Sequence[int] | None = None) -> Structure:
    """The vision transformer that the model is, or that is inside it; inside wrappers of training too. grid: its own,
    where the model does not say."""
    wrapped = unwrapped(_checked(model))
    if wrapped is not model:
        return find(wrapped, grid)
    found = [(name, module) for name, module in model.named_modules() if _is_vit(module)]
    found = [(name, module) for name, module in found if not any(name.startswith(other + ".") for other, _ in found)]
    if found and found[0][0] == "":
        found = found[:1]
    if not found:
        raise Error(
            f"{type(model).__name__} is no vision transformer that can be plugged: no patch_embed and blocks (timm, DINO), no "
            "conv_proj and encoder.layers (torchvision)" + _hint(model)
        )
    if len(found) > 1:
        names = ", ".join(name for name, _ in found)
        raise Error(f"the model holds several vision transformers ({names}); plug them one by one")
    name, vit = found[0]
    return _structure(name + "." if name else "", vit, grid)


def _hint(model: nn.Module) -> str:
    """What else there is to say about a model that is no vision transformer."""
    layers = ((name, module) for name, module in model.named_modules() if "attention" in type(module).__name__.lower())
    name, layer = next(layers, ("", None))
    if layer is None:
        return ""
    if not isinstance(layer, (Attention, MultiheadAttention)) and not (_is_attention(layer) and _objection(layer) is None):
        return f"; {described(name, layer)} is attention of another kind"
    if any(isinstance(part, nn.Conv2d) or "embed" in type(part).__name__.lower() for part in model.modules()):
        return f"; {described(name, layer)} could be plugged, but the model makes its patches in another way than these"
    return "; give the whole model: its patch embedding tells the grid"


def _structure(name: str, vit: Any, grid: Any) -> Structure:
    if hasattr(vit, "conv_proj"):
        layers = unwrapped(vit.encoder.layers).named_children()
        blocks = [(f"{name}encoder.layers.{child}", unwrapped(block)) for child, block in layers]
        size, patch = _pair(vit.image_size), _pair(vit.patch_size)
        grid = grid or (size[0] // patch[0], size[1] // patch[1])
        prefix, norm = int(vit.class_token.shape[1]), getattr(vit.encoder, "ln", None)
        return Structure("torchvision", vit, name, blocks, vit.conv_proj, _pair(grid), prefix, prefix > 0, norm)
    embed = vit.patch_embed
    patches = projection(vit)
    if patches is None:
        raise Error(
            f"{described(name + 'patch_embed', embed)} has no projection `proj` from whose output the grid is known"
        )
    plugged = getattr(vit, "_violin", None)
    grid = grid or getattr(embed, "grid_size", None) or getattr(embed, "patches_resolution", None)
    grid = grid or (plugged.grids.native if plugged is not None else None)
    blocks = list(_flat(vit.blocks, name + "blocks"))
    if grid is None:
        if getattr(embed, "img_size", None) is None:
            for site in _sites(blocks):
                if not isinstance(site.module, (Attention, MultiheadAttention)):
                    wrap(site, None, GridRecorder((1, 1)))  # where it cannot be plugged, a grid does not help
            raise Error(f"{described(name + 'patch_embed', embed)} has no image size; give plug(grid=(height, width))")
        size, patch = _pair(embed.img_size), _pair(embed.patch_size)
        grid = (size[0] // patch[0], size[1] // patch[1])
    tokens = (getattr(vit, key, None) for key in ("cls_token", "dist_token", "reg_token", "register_tokens"))
    counted: int | None = getattr(vit, "num_prefix_tokens", None)
    prefix = sum(token.shape[1] for token in tokens if token is not None) if counted is None else counted
    drop = getattr(vit, "patch_drop", None)
    if drop is not None and not isinstance(drop, nn.Identity) and getattr(drop, "prob", 1) > 0:
        raise Error(
            f"{described(name + 'patch_drop', drop)} drops patches, and a mask needs to know where each stands; build the "
            "model with patch_drop_rate=0"
        )
    family = "timm" if hasattr(vit, "num_prefix_tokens") else "dino"
    class_token, norm = getattr(vit, "cls_token", None) is not None, getattr(vit, "norm", None)
    return Structure(family, vit, name, blocks, patches, _pair(grid), int(prefix), class_token, norm)


def _flat(container: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Blocks one by one, where some models keep them in chunks padded with nn.Identity."""
    for child, block in unwrapped(container).named_children():
        block = unwrapped(block)
        if isinstance(block, (nn.ModuleList, nn.Sequential)):
            yield from _flat(block, f"{name}.{child}")
        elif not isinstance(block, nn.Identity):
            yield f"{name}.{child}", block


def _unknown_parts(module: nn.Module, known: set[str]) -> str | None:
    parts = [name for name, _ in module.named_children()]
    parts += [name for name, _ in module.named_parameters(recurse=False)]
    parts += [name for name, _ in module.named_buffers(recurse=False)]
    extra = [name for name in parts if name not in known]
    return f"has parts that a mask does not know: {', '.join(extra)}" if extra else None


def _objection(module: nn.Module) -> str | None:
    """Why an attention module cannot be plugged; None where it can, as far as its structure tells."""
    if isinstance(module, nn.MultiheadAttention):
        if not module._qkv_same_embed_dim or module.bias_k is not None or module.add_zero_attn:
            return "has projections of several widths or added keys"
        if getattr(module.forward, "__func__", None) is not nn.MultiheadAttention.forward:
            return "has a forward of its own, which the layer with a mask would not run"
        return _unknown_parts(module, _MULTIHEAD_PARTS)
    objection = _unknown_parts(module, _PACKED_CHILDREN)
    if objection:
        return objection
    qkv = cast(Any, module).qkv
    if not isinstance(getattr(qkv, "weight", None), Tensor):
        return f"has a {type(qkv).__name__} for qkv, without a weight; plug the model first and wrap qkv afterwards"
    taken = list(inspect.signature(module.forward).parameters.values())[1:]
    taken = [one for one in taken if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    unknown = [one.name for one in taken if one.name not in _ARGUMENTS]
    if "rope" in unknown:
        return "rotates queries and keys"
    if unknown:
        return f"is given something that a mask does not know: {', '.join(unknown)}"
    return None


def _is_attention(module: nn.Module) -> bool:
    if isinstance(module, nn.MultiheadAttention):
        return True
    return all(hasattr(module, part) for part in ("qkv", "proj", "num_heads"))


def sites(structure: Structure) -> list[Site]:
    """The attention layers, one per block; an error names the block or layer that is not understood."""
    return _sites(structure.blocks)


def _sites(blocks: list[tuple[str, nn.Module]]) -> list[Site]:
    result = []
    for index, (name, block) in enumerate(blocks):
        found = [
            child
            for child, module in ((child, unwrapped(module)) for child, module in block.named_children())
            if isinstance(module, (Attention, MultiheadAttention)) or _is_attention(module)
        ]
        if len(found) != 1:
            kinds = [described(f"{name}.{c}", m) for c, m in block.named_children() if "ttention" in type(m).__name__]
            what = f"; {kinds[0]} has no qkv, proj and num_heads" if kinds and not found else ""
            raise Error(
                f"{described(name, block)} has {len(found)} attention layers that can be plugged; expected one{what}"
            )
        result.append(Site(index, block, found[0], f"{name}.{found[0]}"))
    return result


def wrap(site: Site, mask: ViolinMask | None, grids: GridRecorder) -> Attention | MultiheadAttention:
    """A layer for a site, on the weights of the one that stands there; checked against it."""
    module = site.module
    objection = _objection(module)
    if isinstance(module, nn.MultiheadAttention) and mask is not None:
        computed = [name for name in ("in_proj_weight", "in_proj_bias") if name not in module._parameters]
        if computed:
            objection = f"has a parametrised {computed[0]}; plug the model first and parametrise it afterwards"
    if objection:
        raise Error(f"{described(site.name, module)} cannot be plugged: it {objection}")
    if isinstance(module, nn.MultiheadAttention):
        return MultiheadAttention(module, mask, grids, site.name)
    kind = PairAttention if _agrees(site, module, grids) else Attention
    return kind.around(module, mask, grids, site.name)


@torch.no_grad()
def _agrees(site: Site, module: nn.Module, grids: GridRecorder) -> bool:
    """Runs a few tokens through the layer and through ours without a mask. They must agree, which refuses attention that
    looks like the usual and is not. Returns whether the layer returns (output, map), as the original DINO code does."""
    weight: Tensor = cast(Any, module).qkv.weight
    flags = {child: child.training for child in module.modules()}
    generator = torch.Generator("cpu").manual_seed(0)
    x = torch.randn(1, 5, weight.shape[1], generator=generator, device="cpu").to(weight.device, weight.dtype)
    try:
        module.eval()
        with without_autocast(weight.device):  # in which roundings would differ
            expected = module.forward(x)  # not through the user's hooks
            pair = isinstance(expected, tuple)
            if weight.is_meta:
                return pair  # there are no numbers to compare
            expected = expected[0] if pair else expected
            ours = Attention.around(module, None, grids, site.name)
            error = (ours.forward(x) - expected).abs().max().item()
    except Exception as problem:
        raise Error(
            f"{described(site.name, module)} cannot be plugged: run on five tokens it failed ({first_line(problem)})"
        ) from problem
    finally:
        for child, training in flags.items():
            child.training = training
    coarse = weight.dtype not in (torch.float32, torch.float64) or (weight.is_cuda and _products_are_coarse())
    tolerance = 3e-2 if coarse else 1e-4
    if not error <= tolerance * max(expected.abs().max().item(), 1e-6):
        raise Error(
            f"{described(site.name, module)} cannot be plugged: it computes something else than softmax(qk/sqrt(d))v (off by "
            f"{error:.2g})"
        )
    return pair


def _products_are_coarse() -> bool:
    try:
        return torch.backends.cuda.matmul.allow_tf32
    except RuntimeError:  # set by fp32_precision, after which torch does not let the older setting be read
        return True


class Plugged:
    """What plug() leaves on a transformer."""

    def __init__(self, config: MaskConfig, grids: GridRecorder) -> None:
        self.config, self.grids = config, grids


def plug(
    model: nn.Module,
    init: str = "identity",
    curves: str | Sequence[str] = "violin",
    strategy: str = "mul_v1",
    blocks: Iterable[int] | None = None,
    heads: Iterable[int] | None = None,
    *,
    parameterisation: str = "auto",
    alpha: bool = True,
    decay: float | None = None,
    decay_per_axis: bool = False,
    curve_weights: bool = False,
    prefix_decay: str = "one",
    grid: Sequence[int] | None = None,
    seed: int | None = None,
    table_limit: int = 1 << 30,
) -> nn.Module:
    """Puts a mask into the attention layers of a vision transformer, in place, and returns the model.

    model: timm's VisionTransformer (ViT, DeiT, distilled, DeiT-III, DINO, DINOv2, registers, dynamic_img_size), torchvision's,
    the original DINO and DINOv2 classes, or a model that holds one of them. Call it before torch.compile, before wrapping for
    several processes, and before making the optimiser.

    blocks, heads: numbers of those that get a mask; all unless given. grid: the model's own patch grid (height, width), read
    from the model unless given. seed: initial values as the C++ library draws them; torch's generator unless given.
    table_limit: bytes that all layers together may keep in evaluation. The other options are :class:`MaskConfig`'s. With
    ``init="identity"`` outputs stay what they are, to float rounding.

    Nothing is changed where a layer cannot be plugged: the error names it.
    """
    config = MaskConfig(
        curves=curves,
        strategy=strategy,
        decay=decay,
        decay_per_axis=decay_per_axis,
        alpha=alpha,
        curve_weights=curve_weights,
        prefix_decay=prefix_decay,
        init=init,
        parameterisation=parameterisation,
        blocks=blocks,  # type: ignore[arg-type]  # any iterable: it becomes a tuple
        heads=heads,  # type: ignore[arg-type]
    )
    config.check_fresh()
    return plug_config(model, config, grid=grid, seed=seed, table_limit=table_limit)


def plug_config(
    model: nn.Module,
    config: MaskConfig,
    *,
    grid: Sequence[int] | None = None,
    seed: int | None = None,
    table_limit: int = 1 << 30,
) -> nn.Module:
    """plug() with options in a MaskConfig."""
    table_limit = whole("table_limit", table_limit)
    structure = find(model, None if grid is None else sides("grid", grid))
    places = sites(structure)
    _refuse_built_in(places)
    if is_plugged(structure.vit):
        raise Error("the model has a mask already; violin.unplug(model) takes it out")
    for block in config.blocks or ():
        if not 0 <= block < len(places):
            raise Error(f"blocks are {list(config.blocks or ())}; expected numbers from 0 to {len(places) - 1}")
    places = [site for site in places if config.covers(site.block)]
    _refuse_wrapped(model, structure, places)
    grids = GridRecorder(structure.grid, structure.prefix, hooked=True)
    layers = []
    for site in places:
        weight = next(site.module.parameters())
        mask = from_config(
            config,
            int(site.module.num_heads),  # type: ignore[arg-type]
            structure.grid,
            seed=seed,
            name=f"blocks.{site.block}.attn.violin",
            device=weight.device,
            dtype=torch.float64 if weight.dtype == torch.float64 else torch.float32,
        )
        mask.table_limit = table_limit // len(places)
        layers.append(wrap(site, mask, grids))
    for site, layer in zip(places, layers):
        setattr(site.parent, site.child, layer)
        if isinstance(layer, PairAttention):
            site.parent.register_forward_pre_hook(MapRequest(site.child), with_kwargs=True)
    grids.masks = [cast(ViolinMask, layer.violin) for layer in layers]
    structure.vit.register_forward_pre_hook(grids.begin)
    grids.follow(structure.vit)
    for _, module in structure.blocks:
        module.register_forward_hook(grids.passed)
    if isinstance(structure.norm, nn.Module):
        structure.norm.register_forward_pre_hook(grids.leave)
    structure.vit.register_forward_hook(grids.end, always_call=True)
    structure.vit._violin = Plugged(config, grids)  # type: ignore[assignment]
    return model


def _refuse_built_in(places: list[Site]) -> None:
    for site in places:
        layer = site.module
        if isinstance(layer, Attention) and layer.violin is not None and not layer._original:
            raise Error(
                f"{described(site.name, layer)} was built with a mask, not plugged; set its attribute violin to None, which "
                "leaves plain attention"
            )


def _refuse_wrapped(model: nn.Module, structure: Structure, places: list[Site]) -> None:
    """A wrapper that is there already does not know the parameters and hooks that come in."""
    parts = {structure.vit, *(part for site in places for part in (site.parent, site.module))}
    for name, module in model.named_modules():
        inside = unwrapped(module)
        if inside is not module and any(part in parts for part in inside.modules()):
            raise Error(
                f"{name or 'the model'} is inside of {type(module).__name__} already; plug the model first, then wrap or "
                "compile it"
            )


def restore(site: Site) -> None:
    """Gives a site its original module back, with the weights that are in use now."""
    layer = site.module
    (original,) = layer._original  # type: ignore[misc]
    for store in ("_parameters", "_modules"):
        theirs, ours = getattr(original, store), getattr(layer, store)
        theirs.update({name: ours[name] for name in theirs if ours.get(name) is not None})
    original.training = layer.training
    stands = getattr(site.parent, site.child)  # the layer, or a wrapper around it
    for holder in [site.parent, *stands.modules()]:
        for child, module in holder.named_children():
            if module is layer:
                setattr(holder, child, original)
                if isinstance(holder, OptimizedModule):
                    holder.__setstate__(holder.__getstate__())  # its forward was made for the layer


def unplug(model: nn.Module) -> nn.Module:
    """Takes the masks out, in place: the original attention modules come back, with the weights as they are now."""
    structure = find(model)
    places = sites(structure)
    _refuse_built_in(places)
    places = [site for site in places if isinstance(site.module, (Attention, MultiheadAttention)) and site.module._original]
    for site in places:
        if is_parametrized(site.module):
            raise Error(
                f"{described(site.name, site.module)} has parametrised weights, and the original layer has not; call "
                "torch.nn.utils.parametrize.remove_parametrizations first"
            )
    for site in places:
        restore(site)
    for module in structure.vit.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            owners = {key: getattr(hook, "__self__", hook) for key, hook in hooks.items()}
            for key in [key for key, owner in owners.items() if isinstance(owner, (GridRecorder, MapRequest))]:
                del hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
                module._forward_hooks_always_called.pop(key, None)
    structure.vit.__dict__.pop("_violin", None)
    return model


def is_plugged(model: nn.Module) -> bool:
    """Whether a mask is in the model."""
    return next(masks(model), None) is not None


def masks(model: nn.Module) -> Iterator[tuple[str, ViolinMask]]:
    """Names and masks of the layers, in the order of the blocks; of wrapped and compiled models too."""
    return ((name, module) for name, module in _checked(model).named_modules() if isinstance(module, ViolinMask))


def mask_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of all masks, for an optimiser group of their own (no weight decay, their own learning rate)."""
    return [parameter for _, mask in masks(model) for parameter in mask.parameters()]


def param_groups(
    model: nn.Module, lr: float, weight_decay: float = 0.05, mask_lr_factor: float = 1.0
) -> list[dict[str, Any]]:
    """Optimiser groups: weights with decay; biases, norms, tokens and positions without; masks without, with a factor on
    the learning rate. Only parameters that need a gradient."""
    for name, number in (("lr", lr), ("weight_decay", weight_decay), ("mask_lr_factor", mask_lr_factor)):
        if isinstance(number, str) or not hasattr(type(number), "__float__"):
            raise Error(f"{name} is {number!r}; expected a number")
    ours = {id(parameter) for parameter in mask_parameters(model)}
    tokens = ("cls_token", "dist_token", "reg_token", "register_tokens", "class_token", "pos_embed", "pos_embedding")
    groups: dict[str, list[nn.Parameter]] = {"decayed": [], "plain": [], "mask": []}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if id(parameter) in ours:
            groups["mask"].append(parameter)
        elif parameter.dim() <= 1 or name.rsplit(".", 1)[-1] in tokens:
            groups["plain"].append(parameter)
        else:
            groups["decayed"].append(parameter)
    return [
        {"params": groups["decayed"], "lr": lr, "weight_decay": weight_decay},
        {"params": groups["plain"], "lr": lr, "weight_decay": 0.0},
        {"params": groups["mask"], "lr": lr * mask_lr_factor, "weight_decay": 0.0},
    ]


@torch.no_grad()
def grid_of(structure: Structure, images: Tensor) -> tuple[int, int]:
    """The grid of images: the patch embedding runs, on one of them, and nothing else."""
    recorder = GridRecorder(structure.grid, structure.prefix)
    embed = cast(nn.Module, getattr(structure.vit, "patch_embed", structure.patches))
    flags = {child: child.training for child in embed.modules()}
    handle = structure.patches.register_forward_hook(recorder)
    try:
        embed.eval()(images[:1])  # statistics of a batch stay as they are
    finally:
        handle.remove()
        for child, training in flags.items():
            child.training = training
    return recorder.own


def _patch_grid(structure: Structure, image_size: int | Sequence[int] | None) -> tuple[int, int]:
    if image_size is None:
        return structure.grid
    height, width = pixels("image_size", image_size)
    embed = cast(nn.Module, getattr(structure.vit, "patch_embed", structure.patches))
    channels = next((child.in_channels for child in embed.modules() if isinstance(child, nn.Conv2d)), 3)
    like = next(embed.parameters())
    try:
        return sides("grid", grid_of(structure, like.new_zeros(1, channels, height, width)))
    except (RuntimeError, AssertionError, Error) as problem:
        raise Error(
            f"image_size is {image_size!r}, of which the model makes no patches ({first_line(problem)})"
        ) from problem


def freeze(
    model: nn.Module, image_size: int | Sequence[int] | None = None, dtype: torch.dtype | None = None
) -> nn.Module:
    """Tables for images of this size (the model's own unless given) are made now and are constants, in compiled code too;
    mask parameters need no gradient. For inference. With a 16-bit ``dtype``, that of q, k and v (autocast's where it is
    on), gains on a GPU are kept in the form that the kernels read, about half as large for long sequences, for this type
    alone. ``violin.thaw(model)`` undoes it."""
    structure = find(model)
    if not is_plugged(structure.vit):
        raise Error("the model has no mask to freeze; violin.plug(model) puts one in")
    grid = _patch_grid(structure, image_size)
    for _, mask in masks(structure.vit):
        mask.freeze(grid, structure.prefix, dtype)
    return model


def thaw(model: nn.Module) -> nn.Module:
    """Undoes freeze()."""
    for _, mask in masks(model):
        mask.thaw()
    return model
