"""Small models of every family that plug() knows, by name."""

import pytest
import torch
from standins import DinoTransformer, TorchvisionTransformer

TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 5}
TIMM = {
    "vit": {},
    "deit_distilled": {"distilled": True},
    "deit3": {"init_values": 0.5, "no_embed_class": True},
    "registers": {"reg_tokens": 4, "init_values": 0.5, "no_embed_class": True},
    "average": {"class_token": False, "global_pool": "avg", "fc_norm": False},
    "rectangle": {"img_size": (24, 40), "global_pool": "avg"},
    "qk_norm": {"qk_norm": True},
    "dynamic": {"dynamic_img_size": True},
    "padded": {"dynamic_img_size": True, "dynamic_img_pad": True},
}
FAMILIES = [*TIMM, "torchvision", "dino"]


def build(name):
    """With weights large enough that attention is no average and logits are not all alike."""
    model = _build(name)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 0.3 if "qkv" in key or "in_proj" in key else 0.1)
    return model


def _build(name):
    if name == "torchvision":
        return TorchvisionTransformer()
    if name == "dino":
        return DinoTransformer()
    pytest.importorskip("timm", reason="timm is not installed (pip install --no-deps timm)")
    from timm.models.deit import VisionTransformerDistilled
    from timm.models.vision_transformer import VisionTransformer

    options = {**TINY, **TIMM[name]}
    kind = VisionTransformerDistilled if options.pop("distilled", False) else VisionTransformer
    return kind(**options)


def image_sizes(name):
    """What the model takes: its own size first."""
    if name == "rectangle":
        return [(24, 40)]
    if name == "dino":
        return [(32, 32), (16, 16), (24, 32)]
    if name == "dynamic":
        return [(32, 32), (48, 24), (24, 48), (16, 16)]
    if name == "padded":
        return [(32, 32), (45, 20)]
    return [(32, 32)]


def images(size, batch=2):
    return torch.randn(batch, 3, *size)


def run(model, x):
    with torch.no_grad():
        return model(x)
