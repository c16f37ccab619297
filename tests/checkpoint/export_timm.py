"""export_timm.py VIOLIN: models of timm, exported and run by the command, give timm's own logits. Exits 77 without timm."""

import json
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "tools"))
try:
    import torch

    import export_timm
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer

TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 7}
MODELS = {
    "vit": (VisionTransformer, {}),
    "average pooling": (VisionTransformer, {"global_pool": "avg", "img_size": (24, 40), "mlp_ratio": 2.5}),
    "average pooling without a class token": (
        VisionTransformer,
        {"global_pool": "avg", "class_token": False, "fc_norm": False},
    ),
    "registers": (VisionTransformer, {"reg_tokens": 3, "no_embed_class": True, "init_values": 0.1}),
    "no head": (VisionTransformer, {"num_classes": 0, "qkv_bias": False}),
    "distilled": (VisionTransformerDistilled, {}),
}


def read(path, name):
    data = Path(path).read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    entry = json.loads(data[8 : 8 + length])[name]
    begin, end = entry["data_offsets"]
    return torch.frombuffer(bytearray(data[8 + length + begin : 8 + length + end]), dtype=torch.float32).reshape(entry["shape"])


def check(name, kind, options, violin, folder):
    torch.manual_seed(0)
    model = kind(**{**TINY, **options}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    weights, images, out = folder / "weights.safetensors", folder / "images.safetensors", folder / "out.safetensors"
    export_timm.export(model, str(weights))
    x = torch.randn(2, 3, *model.patch_embed.img_size)
    export_timm.write_safetensors(str(images), {"images": x}, {})
    subprocess.run([violin, "features", weights, "--input", images, "--out", out], check=True, capture_output=True)
    with torch.no_grad():
        expected = model(x)
    error = ((read(out, "logits") - expected).abs().max() / expected.abs().max()).item()
    print(f"{name}: {error:.1e}")
    return error < 1e-5


def main():
    violin = sys.argv[1]
    with tempfile.TemporaryDirectory() as folder:
        good = [check(name, kind, options, violin, Path(folder)) for name, (kind, options) in MODELS.items()]
    try:
        export_timm.describe_model(VisionTransformer(**TINY, qk_norm=True))
        good.append(False)
    except export_timm.Unsupported as error:
        print(f"refused: {error}")
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
