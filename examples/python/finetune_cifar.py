"""Fine-tunes a small vision transformer on a folder of images, with a mask and without, from the same weights:

    python3 examples/python/finetune_cifar.py cifar100/ [--out model.safetensors]

The folder holds train/<class>/*.png and test/<class>/*.png (CIFAR-100 as image folders). Half of the chosen classes train the
model first, since nothing pretrained is downloaded; the other half fine-tune it twice with the same seed: as it is, and
plugged with violin.plug(model), which changes no output at the start. Both accuracies are printed: with so few images and
epochs they differ by chance as much as by the mask, so --seeds repeats both. Under two minutes on two cores.
"""

import argparse
import copy
import os
import random
import sys
import time
from pathlib import Path

# Threads that spin while they wait take the cores from each other wherever something else runs too.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.nn.functional as F
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path += [str(ROOT / "tools"), str(ROOT / "python")]  # unless installed
import without_torchvision

without_torchvision.install()
from timm.models.vision_transformer import VisionTransformer

import violin

MEAN, STD = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)


def images_of(folder, classes, per_class):
    """Images [n,3,32,32] uint8 and labels [n]."""
    pictures, labels = [], []
    for label, name in enumerate(classes):
        for path in sorted((folder / name).glob("*.png"))[:per_class]:
            with Image.open(path) as image:
                rgb = image.convert("RGB").resize((32, 32))
            pictures.append(torch.frombuffer(bytearray(rgb.tobytes()), dtype=torch.uint8).view(32, 32, 3))
            labels.append(label)
    if not pictures:
        raise SystemExit(f"no images in {folder}/<class>/*.png")
    return torch.stack(pictures).permute(0, 3, 1, 2).contiguous(), torch.tensor(labels)


def normalised(pictures):
    mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)
    return (pictures.float() / 255 - mean) / std


def augmented(pictures):
    """Random shifts by up to four pixels, and mirror images."""
    row, column = random.randrange(9), random.randrange(9)
    shifted = F.pad(pictures, (4, 4, 4, 4))[:, :, row : row + 32, column : column + 32]
    mirror = torch.rand(len(pictures)) < 0.5
    return torch.where(mirror[:, None, None, None], shifted.flip(-1), shifted)


def train(model, data, epochs, lr, batch, mask_lr_factor=10.0):
    pictures, labels = data
    groups = violin.param_groups(model, lr, weight_decay=0.05, mask_lr_factor=mask_lr_factor)
    steps = epochs * (len(labels) // batch)
    optimiser = torch.optim.AdamW([group for group in groups if group["params"]])
    rates = [group["lr"] for group in optimiser.param_groups]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rates, max(steps, 2))
    model.train()
    for _ in range(epochs):
        order = torch.randperm(len(labels))
        for chosen in order[: len(labels) // batch * batch].split(batch):
            loss = F.cross_entropy(model(augmented(normalised(pictures[chosen]))), labels[chosen])
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()
            schedule.step()


@torch.inference_mode()
def accuracy(model, data):
    pictures, labels = data
    model.eval()
    right = sum((model(normalised(p)).argmax(1) == y).sum() for p, y in zip(pictures.split(256), labels.split(256)))
    return 100 * float(right) / len(labels)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, default=Path("model.safetensors"))
    parser.add_argument("--classes", type=int, default=20)
    parser.add_argument("--per-class", type=int, default=160)
    parser.add_argument("--pretrain-epochs", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--dim", type=int, default=96)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=1)
    args = parser.parse_args()
    started = time.perf_counter()

    if not (args.data / "train").is_dir():
        raise SystemExit(f"{args.data} has no folder train/<class>/*.png")
    names = sorted(path.name for path in (args.data / "train").iterdir() if path.is_dir())[: args.classes]
    half = len(names) // 2 if len(names) >= 4 else 0
    first, second = names[:half] or names, names[half:]
    options = {"img_size": 32, "patch_size": 4, "embed_dim": args.dim, "depth": args.depth, "num_heads": 3,
               "global_pool": "avg", "class_token": False}  # fmt: skip

    torch.manual_seed(0)
    random.seed(0)
    base = VisionTransformer(**options, num_classes=len(first))
    train(base, images_of(args.data / "train", first, args.per_class), args.pretrain_epochs, 2e-3, args.batch)
    print(f"trained on {len(first)} classes in {time.perf_counter() - started:.0f} s")

    data, test = (images_of(args.data / split, second, args.per_class) for split in ("train", "test"))
    for seed in range(args.seeds):
        for masked in (False, True):
            torch.manual_seed(seed)
            random.seed(seed)
            model = copy.deepcopy(base)
            model.reset_classifier(len(second))
            if masked:
                violin.plug(model, init="identity", seed=seed)
            train(model, data, args.epochs, 5e-4, args.batch)
            kind = "with a mask" if masked else "as it is"
            print(f"seed {seed}, {kind:12}: {accuracy(model, test):5.1f}% of {len(test[1])} test images", flush=True)
    for name, mask in violin.masks(model):
        gamma, alpha = mask.log_decay().exp(), mask.alpha
        print(
            f"mask of {name}: gamma {gamma.min():.4f} to {gamma.max():.4f}, alpha {alpha.min():.3f} to {alpha.max():.3f}"
        )
    violin.save(model, args.out, classes=second,
                preprocessing={"size": 32, "crop_pct": 1.0, "interpolation": "bicubic", "mean": MEAN, "std": STD})  # fmt: skip
    print(f"{args.out} holds model, classes and preprocessing; {time.perf_counter() - started:.0f} s in all")


if __name__ == "__main__":
    main()
