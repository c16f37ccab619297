"""A timm model with a mask: the same logits at the start, attention maps, decays, and back again.

    python3 examples/python/plug_timm.py [--out FOLDER]

Writes into FOLDER, or here.
"""

import argparse
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path += [str(ROOT / "tools"), str(ROOT / "python")]  # unless installed
import without_torchvision

without_torchvision.install()
import timm

import violin

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--out", type=Path, default=Path())
out = parser.parse_args().out
out.mkdir(parents=True, exist_ok=True)

torch.manual_seed(0)
model = timm.create_model("vit_tiny_patch16_224", depth=4, dynamic_img_size=True).eval()
images = torch.randn(1, 3, 224, 160)
with torch.no_grad():
    before = model(images)
    violin.plug(model)  # init="identity"
    after = model(images)
print(f"plugging changed logits by {(after - before).abs().max() / before.abs().max():.1e} of the largest")
print(f"{sum(p.numel() for p in violin.mask_parameters(model))} parameters of masks")

# A mask that does something, to look at.
violin.unplug(model)
violin.plug(model, init="spread")
rows = violin.attention_maps(model, images, queries=[(7, 5)], blocks=[3])[3]  # [1,heads,1,1+14*10]
figure, axes = plt.subplots(1, 3, figsize=(7, 3))
for head, axis in enumerate(axes):
    axis.imshow(rows[0, head, 0, 1:].view(14, 10))
    axis.set(title=f"head {head}", xticks=[], yticks=[])
figure.savefig(out / "attention.png", dpi=80)
violin.plot.decays(model).savefig(out / "decays.png", dpi=80)
print(f"attention.png and decays.png are in {out.resolve()}")
