"""Makes the files beside it: what Pillow, torchvision and timm give for a small picture.

    pip install pillow==12.3.0 timm==1.0.29 torchvision && python tests/golden/data/make.py

Pillow 13 may scale rows before columns where that is cheaper, which rounds differently; before, columns came first.
operations.png holds the results of operations.json one below the other; each resize_*.png is one line of resize.json.
"""
import json
import pathlib

import numpy as np
from PIL import Image, ImageEnhance, ImageOps
from timm.data import auto_augment
from timm.data.transforms_factory import transforms_imagenet_eval
from torchvision.transforms import Compose

HERE = pathlib.Path(__file__).parent
WIDTH, HEIGHT = 45, 31
FILL = (124, 116, 104)
FILTERS = {"bilinear": Image.BILINEAR, "bicubic": Image.BICUBIC, "lanczos": Image.LANCZOS}


def picture():
    """Smooth, with noise, hard edges, and areas at both ends of the range."""
    random = np.random.default_rng(7)
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH]
    red = 200 * x / WIDTH + 20
    green = 128 + 100 * np.sin(x / 5) * np.cos(y / 4)
    blue = np.where((x // 6 + y // 6) % 2 == 0, 40, 230)
    values = np.stack([red, green, blue], -1) + random.normal(0, 12, (HEIGHT, WIDTH, 3))
    values[3:9, 30:40] = 255
    values[20:27, 4:12] = 0
    return Image.fromarray(values.clip(0, 255).astype(np.uint8))


def operations(image):
    yield "auto_contrast", 0, ImageOps.autocontrast(image)
    yield "equalize", 0, ImageOps.equalize(image)
    yield "invert", 0, ImageOps.invert(image)
    for bits in (1, 3, 4):
        yield "posterize", bits, ImageOps.posterize(image, bits)
    for threshold in (0, 26, 128, 256):
        yield "solarize", threshold, ImageOps.solarize(image, threshold)
    for addition in (0, 99, 110):
        yield "solarize_add", addition, auto_augment.solarize_add(image, addition)
    for name, kind in (("brightness", ImageEnhance.Brightness), ("contrast", ImageEnhance.Contrast),
                       ("saturation", ImageEnhance.Color), ("sharpness", ImageEnhance.Sharpness)):
        for factor in (0.0, 0.1, 0.37, 1.0, 1.19, 1.9):
            yield name, factor, kind(image).enhance(factor)
    for filter in ("bilinear", "bicubic"):
        settings = dict(resample=FILTERS[filter], fillcolor=FILL)
        for degrees in (-27.0, 13.5, 30.0):
            yield "rotate " + filter, degrees, auto_augment.rotate(image, degrees, **settings)
        for factor in (-0.27, 0.3):
            yield "shear_x " + filter, factor, auto_augment.shear_x(image, factor, **settings)
            yield "shear_y " + filter, factor, auto_augment.shear_y(image, factor, **settings)
        for share in (-0.405, 0.2):
            yield "translate_x " + filter, share, auto_augment.translate_x_rel(image, share, **settings)
            yield "translate_y " + filter, share, auto_augment.translate_y_rel(image, share, **settings)


def main():
    image = picture()
    image.save(HERE / "picture.png")

    rows = list(operations(image))
    sheet = Image.new("RGB", (WIDTH, HEIGHT * len(rows)))
    for i, (_, _, result) in enumerate(rows):
        sheet.paste(result, (0, i * HEIGHT))
    sheet.save(HERE / "operations.png", optimize=True)
    (HERE / "operations.json").write_text(
        "[\n" + ",\n".join(json.dumps([name, value]) for name, value, _ in rows) + "\n]\n")

    cases = []
    for filter in FILTERS:
        for box, size in (((0, 0, WIDTH, HEIGHT), (20, 20)), ((0, 0, WIDTH, HEIGHT), (61, 40)),
                          ((0, 0, WIDTH, HEIGHT), (WIDTH, 10)), ((0, 0, WIDTH, HEIGHT), (7, HEIGHT)),
                          ((5, 3, 30, 21), (16, 16)), ((44, 30, 1, 1), (3, 2)), ((10, 4, 8, 5), (32, 32))):
            x, y, w, h = box
            name = f"resize_{filter}_{w}x{h}_{size[0]}x{size[1]}.png"
            image.crop((x, y, x + w, y + h)).resize(size, FILTERS[filter]).save(HERE / name, optimize=True)
            cases.append({"file": name, "box": box, "size": size, "interpolation": filter})
    (HERE / "resize.json").write_text("[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n")

    evaluations = []
    for size, crop_pct, mode in ((24, 0.875, "center"), (24, 0.9, "center"), (31, 1.0, "center"), (24, 1.0, "squash")):
        for turned in (False, True):
            steps = transforms_imagenet_eval(size, crop_pct=crop_pct, crop_mode=mode, interpolation="bicubic").transforms
            name = f"eval_{size}_{int(crop_pct * 1000)}_{mode}{'_turned' if turned else ''}.png"
            source = image.transpose(Image.TRANSPOSE) if turned else image
            Compose(steps[:2])(source).save(HERE / name, optimize=True)
            evaluations.append({"file": name, "size": size, "crop_pct": crop_pct, "crop": mode, "turned": turned})
    (HERE / "eval.json").write_text("[\n" + ",\n".join(json.dumps(case) for case in evaluations) + "\n]\n")


if __name__ == "__main__":
    main()
