#!/usr/bin/env python3
"""torchvision's loader per core, beside `violin bench data`.

    violin bench data --data photos --json > ours.json
    python3 bench/data_peer.py --data photos --ours ours.json

Measures the same steps on one core: decode (PIL), eval (resize, centre crop), finetune (random resized crop, flip) and,
where timm is importable, deit (the same with RandAugment and erasing). With --ours it prints the ratios.
"""
import argparse
import json
import os
import sys
import time

import torch
from torchvision import datasets, transforms
from torchvision.transforms import InterpolationMode

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def recipes(size):
    bicubic = InterpolationMode.BICUBIC
    tensor = [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    yield "decode", None
    yield "eval", transforms.Compose(
        [transforms.Resize(int(size / 0.875), bicubic), transforms.CenterCrop(size)] + tensor)
    yield "finetune", transforms.Compose(
        [transforms.RandomResizedCrop(size, interpolation=bicubic), transforms.RandomHorizontalFlip()] + tensor)
    try:
        from timm.data import create_transform
    except ImportError:
        return
    yield "deit", create_transform(size, is_training=True, color_jitter=0.3, auto_augment="rand-m9-mstd0.5-inc1",
                                   interpolation="bicubic", re_prob=0.25, re_mode="pixel", re_count=1)


def rate(dataset, order, seconds):
    """Images per processor second of reading items one after another, in this process."""
    for i in order[:16]:
        dataset[i]
    begin, count = time.process_time(), 0
    while time.process_time() - begin < seconds:
        for _ in range(8):
            try:
                dataset[order[count % len(order)]]
            except ValueError:
                pass  # Pillow refuses the strongest posterization of RandAugment
            count += 1
    return count / (time.process_time() - begin)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder of classes, or with a train folder")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--ours", help="output of violin bench data --json on the same folder")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    folder = os.path.join(arguments.data, "train")
    folder = folder if os.path.isdir(folder) else arguments.data
    rates = {}
    for name, recipe in recipes(arguments.size):
        dataset = datasets.ImageFolder(folder, transform=recipe)
        order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(0)).tolist()[:2000]
        rates[name] = rate(dataset, order, arguments.seconds)

    result = {"peer": {"images_per_second_per_core": rates}}
    if arguments.ours:
        with open(arguments.ours) as file:
            ours = json.load(file)
        if ours["size"] != arguments.size:
            sys.exit(f"data_peer: --ours was measured at size {ours['size']}, this at {arguments.size}")
        result["ratio"] = {name: ours["images_per_second_per_core"][name] / value for name, value in rates.items()}
    if arguments.json:
        print(json.dumps(result, indent=2))
        return
    for name, value in rates.items():
        ratio = f"   violin {result['ratio'][name]:.2f}x" if arguments.ours else ""
        print(f"{name:10} {value:9.1f} images/s{ratio}")


if __name__ == "__main__":
    main()
