"""What weights files say of how images are prepared: sizes, crops, statistics."""

import json

import pytest
import torch
from models import TINY, build

import violin
from violin import _safetensors


@pytest.mark.parametrize(
    "given, size",
    [
        ({"crop_pct": 1.0}, [24, 40]),
        ({"input_size": (3, 24, 40)}, [24, 40]),
        ({"size": (48, 80)}, [48, 80]),
        ({"size": 32}, 32),
        ({"input_size": (3, 32, 32)}, 32),
    ],
)
def test_preprocessing_says_both_sides_of_rectangles(given, size, tmp_path, timm):
    violin.save(build("rectangle"), tmp_path / "m.safetensors", preprocessing=given)
    assert violin.load(tmp_path / "m.safetensors").violin_file["preprocessing"]["size"] == size
    with pytest.raises(violin.Error, match="expected a number or \\(height, width\\)"):
        violin.save(build("rectangle"), tmp_path / "m.safetensors", preprocessing={"size": "24x40"})


def written(path, model, preprocessing=None):
    violin.save(model, path, preprocessing=preprocessing)
    return json.loads(_safetensors.load_file(path)[1]["violin.preprocessing"])


def test_preprocessing_that_is_not_given_is_the_models_own(tmp_path, timm):
    model, path = build("vit"), tmp_path / "m.safetensors"
    model.pretrained_cfg = {"mean": (0.5, 0.5, 0.5), "std": (0.4, 0.4, 0.4), "crop_pct": 0.95, "crop_mode": "squash",
                            "interpolation": "bilinear", "input_size": (3, 224, 224)}  # fmt: skip
    own = {"size": 32, "crop_pct": 0.95, "crop": "squash", "interpolation": "bilinear", "mean": [0.5] * 3,
           "std": [0.4] * 3}  # fmt: skip
    assert written(path, model) == own
    assert written(path, model, {"crop_pct": 1.0}) == {**own, "crop_pct": 1.0}
    changed = {"crop": "centre", "mean": torch.zeros(3)}
    assert written(path, model, changed) == {**own, "crop": "centre", "mean": [0.0] * 3}
    model.pretrained_cfg = {}
    assert written(path, model, {"crop_pct": 1}) == {
        "size": 32, "crop_pct": 1.0, "crop": "centre", "interpolation": "bicubic",
        "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225],
    }  # fmt: skip
    timms = {"input_size": (3, 32, 32), "interpolation": "lanczos", "mean": (0.5,) * 3, "std": (0.5,) * 3,
             "crop_pct": 0.9, "crop_mode": "center"}  # fmt: skip
    assert written(path, model, timms)["crop"] == "centre"


@pytest.mark.parametrize("name", ["vit", "rectangle"])
def test_preprocessing_stays_with_a_model_that_is_loaded_and_saved(name, tmp_path, timm):
    given = {"crop_pct": 0.95, "crop": "squash", "interpolation": "lanczos", "mean": (0.5,) * 3, "std": (0.4,) * 3}
    model, path = build(name), tmp_path / "m.safetensors"
    first = written(path, model, given)
    again = violin.load(path)
    assert timm.data.resolve_model_data_config(again) == {
        "input_size": (3, 24, 40) if name == "rectangle" else (3, 32, 32), "crop_pct": 0.95, "crop_mode": "squash",
        "interpolation": "lanczos", "mean": (0.5,) * 3, "std": (0.4,) * 3,
    }  # fmt: skip
    assert written(path, again) == first
    violin.save(model, path)
    assert "violin.preprocessing" not in _safetensors.load_file(path)[1]
    assert not hasattr(violin.load(path), "pretrained_cfg")


def test_a_size_of_images_stays_as_long_as_the_model_is_what_the_file_describes(tmp_path, timm):
    first, path = written(tmp_path / "m", build("dynamic"), {"size": (48, 40)}), tmp_path / "again"
    model = violin.load(tmp_path / "m", dynamic_img_size=True)
    assert written(path, model) == first
    assert written(path, model, {"crop_pct": 1.0}) == {**first, "crop_pct": 1.0}
    assert written(path, model, {"size": 40})["size"] == 40
    model.pretrained_cfg["input_size"] = (3, 56, 56)
    assert written(path, model)["size"] == 56
    model.set_input_size((64, 64))
    assert written(path, model)["size"] == 64


def test_a_model_that_is_built_for_another_size_than_the_file_says_so(tmp_path, timm):
    from timm.models.vision_transformer import VisionTransformer

    violin.save(VisionTransformer(**TINY, pos_embed="none"), tmp_path / "m", preprocessing={"crop_pct": 0.9})
    for size, sides in ((64, (64, 64)), ((48, 40), (48, 40)), (32, (32, 32))):
        model = violin.load(tmp_path / "m", img_size=size)
        assert model.pretrained_cfg["input_size"] == (3, *sides) and model.pretrained_cfg["crop_pct"] == 0.9
        assert written(tmp_path / "again", model)["size"] == (sides[0] if sides[0] == sides[1] else list(sides))


@pytest.mark.parametrize(
    "given, message",
    [
        ({"crop_ptc": 0.9}, "preprocessing has a field 'crop_ptc'; there are size, crop_pct"),
        ({"interpolation": "nearest"}, "interpolation is 'nearest'; expected one of bilinear, bicubic, lanczos"),
        ({"crop": "border"}, "crop is 'border'; expected centre or squash"),
        ({"crop_pct": 0}, "crop_pct is 0; expected a share from 0.05 to 1"),
        ({"crop_pct": 1.1}, "crop_pct is 1.1"),
        ({"crop_pct": "0.9"}, "crop_pct is '0.9'"),
        ({"mean": (0.5, 0.5)}, "mean is .*; expected three numbers"),
        ({"mean": 0.5}, "mean is 0.5; expected three numbers"),
        ({"mean": (0.5, 0.5, float("nan"))}, "mean is .*; expected three numbers"),
        ({"std": (0.5, 0.5, 0)}, "std is .*; expected three numbers above 0"),
        ({"std": (0.5, 0.5, float("inf"))}, "std is .*; expected three numbers above 0"),
        ({"size": 20000}, "size is 20000; expected at most 16384"),
        ({"size": 0}, "size is 0; expected a number or"),
        ("bicubic", "preprocessing is 'bicubic'; expected a dict"),
    ],
)
def test_mistakes_in_preprocessing_are_named(given, message, tmp_path):
    with pytest.raises(violin.Error, match=message):
        violin.save(build("torchvision"), tmp_path / "m.safetensors", preprocessing=given)
    with pytest.raises(violin.Error, match="classes has 3; expected names, each a text"):
        violin.save(build("torchvision"), tmp_path / "m.safetensors", classes=["a", "b", "c", "d", 3])
    assert not list(tmp_path.iterdir())
