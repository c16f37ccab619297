#!/usr/bin/env python3
"""Writes the weights of a timm vision transformer as a safetensors file that violin takes as it is.

    python tools/export_timm.py deit_small_patch16_224 deit_small.safetensors --pretrained
    python tools/export_timm.py vit_base_patch16_224 mine.safetensors --checkpoint mine.pth --classes names.txt

The model, its preprocessing and the names of its classes go into the file's metadata. Needs torch and timm only.
"""

import argparse
import importlib.util
import json
import os
import struct
import sys
from pathlib import Path

import torch

import without_torchvision

without_torchvision.install()
import timm  # noqa: E402
from timm.models.vision_transformer import VisionTransformer  # noqa: E402

DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64"}
INTERPOLATIONS = ("bilinear", "bicubic", "lanczos")

# What the model of the C++ library is made of; loaded by itself, as the package needs the operator library.
_spec = importlib.util.spec_from_file_location(
    "violin_layout", Path(__file__).resolve().parent.parent / "python" / "violin" / "_layout.py"
)
layout = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(layout)


class Unsupported(Exception):
    pass


def is_identity(module):
    return module is None or isinstance(module, torch.nn.Identity)


def side(size):
    return int(size[0]) if size[0] == size[1] else [int(size[0]), int(size[1])]


def describe_model(model):
    """The model as violin's JSON; raises Unsupported for what violin has no layer for."""
    if not isinstance(model, VisionTransformer):
        raise Unsupported(f"{type(model).__name__} is no plain vision transformer of timm")
    block, embed = model.blocks[0], model.patch_embed
    fc_norm = not is_identity(model.fc_norm)
    last = model.fc_norm if fc_norm else model.norm
    if is_identity(last):
        raise Unsupported("it has no norm behind the last block, which violin always has")
    norms = [last, *(norm for b in model.blocks for norm in (getattr(b, "norm1", None), getattr(b, "norm2", None)))]
    attentions = [getattr(b, "attn", None) for b in model.blocks]
    checks = {
        "a patch embedding other than one convolution": isinstance(embed.proj, torch.nn.Conv2d)
        and embed.proj.stride == embed.proj.kernel_size
        and all(is_identity(child) for child in embed.children() if child is not embed.proj),
        "a norm before the blocks": is_identity(getattr(model, "norm_pre", None)),
        "attention pooling": getattr(model, "attn_pool", None) is None,
        "blocks other than pre-norm ones": all(
            layout.usual_block(b, "norm1", "attn", "norm2", False) for b in model.blocks
        ),
        "attention other than the usual": all(type(attn).__name__ == "Attention" for attn in attentions),
        "norms inside attention": all(
            is_identity(getattr(attn, part, None)) for attn in attentions for part in ("q_norm", "k_norm", "norm")
        ),
        "an MLP other than two layers with GELU between": all(
            layout.usual_mlp(getattr(b, "mlp", b), "fc1", "act", "fc2") for b in model.blocks
        ),
        "norms other than layer norms": all(layout.usual_norm(norm, getattr(last, "eps", None)) for norm in norms),
        f"pooling '{model.global_pool}'": model.global_pool in ("token", "avg", ""),
        "rotary positions": getattr(model, "rope", None) is None,
    }
    for what, fine in checks.items():
        if not fine:
            raise Unsupported(f"it has {what}, which violin has not")
    scale = getattr(block.ls1, "gamma", None)
    config = {
        "img_size": side(model.patch_embed.img_size),
        "patch_size": side(model.patch_embed.patch_size),
        "in_chans": model.patch_embed.proj.in_channels,
        "num_classes": model.num_classes,
        "embed_dim": model.embed_dim,
        "depth": len(model.blocks),
        "num_heads": block.attn.num_heads,
        "mlp_ratio": layout.mlp_ratio(block.mlp.fc1.out_features, model.embed_dim),
        "qkv_bias": block.attn.qkv.bias is not None,
        "class_token": model.cls_token is not None,
        "distilled": getattr(model, "dist_token", None) is not None,
        "reg_tokens": int(getattr(model, "num_reg_tokens", 0) or 0),
        "pos_embed": "none" if model.pos_embed is None else "learn",
        "no_embed_class": bool(getattr(model, "no_embed_class", False)),
        "global_pool": model.global_pool,
        "fc_norm": fc_norm,
        "init_values": None if scale is None else 1e-5,
        "norm_eps": block.norm1.eps,
        "pos_resample": "timm",
    }
    misfit = layout.misfit({name: value.shape for name, value in model.state_dict().items()}, layout.shapes(config))
    if misfit:
        raise Unsupported(f"it {misfit}")
    return config


def describe_preprocessing(model):
    cfg = dict(getattr(model, "pretrained_cfg", None) or {})
    interpolation = cfg.get("interpolation") or "bicubic"
    return {
        "size": side(model.patch_embed.img_size),
        "crop_pct": float(cfg.get("crop_pct") or 0.875),
        "crop": "squash" if cfg.get("crop_mode") == "squash" else "centre",
        "interpolation": interpolation if interpolation in INTERPOLATIONS else "bicubic",
        "mean": [float(x) for x in cfg.get("mean") or (0.485, 0.456, 0.406)],
        "std": [float(x) for x in cfg.get("std") or (0.229, 0.224, 0.225)],
    }


def class_names(model, path):
    """Names from a file (lines or a JSON list), or timm's own where the head is one of ImageNet's."""
    if path:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        names = json.loads(text) if text.lstrip().startswith("[") else [line for line in text.splitlines() if line]
        if len(names) != model.num_classes:
            raise Unsupported(f"{path} has {len(names)} names, the model has {model.num_classes} classes")
        return names
    try:
        from timm.data import ImageNetInfo, infer_imagenet_subset

        subset = infer_imagenet_subset(model)
        if not subset:
            return []
        info = ImageNetInfo(subset)
        # The id, which folders of ImageNet are called by, and words: "n01440764 tench, Tinca tinca".
        return [f"{info.index_to_label_name(i)} {info.index_to_description(i)}" for i in range(model.num_classes)]
    except (ImportError, OSError, ValueError, AttributeError) as error:
        print(f"no class names: {error}", file=sys.stderr)
        return []


def write_safetensors(path, tensors, metadata):
    header, offset = {"__metadata__": metadata}, 0
    # Large elements first, so that every tensor is aligned.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    for name, tensor in ordered:
        if tensor.dtype not in DTYPES:
            raise Unsupported(f"{name} is {tensor.dtype}")
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    beside = f"{path}.{os.getpid()}.part"
    try:
        with open(beside, "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for _, tensor in ordered:
                flat = tensor.detach().cpu().contiguous().reshape(-1)
                if flat.numel():
                    file.write(flat.view(torch.uint8).numpy().tobytes())
        os.replace(beside, path)
    finally:
        if os.path.exists(beside):
            os.remove(beside)


def export(model, path, classes=None):
    config = describe_model(model)
    names = class_names(model, classes)
    metadata = {
        "violin.model": json.dumps(config),
        "violin.preprocessing": json.dumps(describe_preprocessing(model)),
    }
    if names:
        metadata["violin.classes"] = json.dumps(names, ensure_ascii=False)
    write_safetensors(path, dict(model.state_dict()), metadata)
    return config, len(names)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="timm's name, with a tag where it has several sets of weights")
    parser.add_argument("out", help="the safetensors file to write")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--pretrained", action="store_true", help="timm's weights, from its cache or the hub")
    source.add_argument("--checkpoint", help="weights from a file that timm reads")
    parser.add_argument("--classes", help="names of the classes, one per line or a JSON list")
    parser.add_argument("--num-classes", type=int, help="another number of classes than the model's")
    parser.add_argument("--seed", type=int, default=0, help="of random weights, where none are given")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    options = {} if args.num_classes is None else {"num_classes": args.num_classes}
    try:
        model = timm.create_model(args.model, pretrained=args.pretrained, checkpoint_path=args.checkpoint or "", **options)
        config, names = export(model.eval(), args.out, args.classes)
    except (Unsupported, RuntimeError, OSError, ValueError) as error:
        sys.exit(f"export_timm: {args.model}: {str(error).splitlines()[0] if str(error) else type(error).__name__}")
    kind = "pretrained" if args.pretrained else args.checkpoint or f"random, seed {args.seed}"
    print(f"wrote {args.out}: {args.model} ({kind}), {config['num_classes']} classes, {names} names")


if __name__ == "__main__":
    main()
