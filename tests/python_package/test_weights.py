"""Weights files: round trips, published checkpoints with their goldens, hostile files, the C++ binary."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from models import TINY, build, image_sizes, run
from standins import DinoTransformer

import violin
from violin import _safetensors


def test_own_safetensors_agree_with_the_package(tmp_path):
    package = pytest.importorskip("safetensors.torch", reason="the safetensors package is not installed")
    tensors = {
        "a": torch.randn(3, 4).t(),
        "b": torch.arange(5),
        "c": torch.randn(2, 2).bfloat16(),
        "nothing": torch.empty(0, 3),
        "one": torch.tensor(True),
        "ä": torch.randn(1, dtype=torch.float64),
    }
    _safetensors.save_file(tensors, tmp_path / "x.safetensors", {"key": "value – ü"})
    theirs = package.load_file(tmp_path / "x.safetensors")
    package.save_file({k: v.contiguous() for k, v in tensors.items()}, tmp_path / "y.safetensors", {"k": "v"})
    ours, metadata = _safetensors.load_file(tmp_path / "y.safetensors")
    mine, about = _safetensors.load_file(tmp_path / "x.safetensors")
    assert metadata == {"k": "v"} and about == {"key": "value – ü"}
    for name, value in tensors.items():
        for other in (theirs[name], ours[name], mine[name]):
            assert other.dtype == value.dtype and torch.equal(other, value)


def test_writing_is_repeatable_and_leaves_no_scraps(tmp_path):
    tensors = {"a": torch.ones(2), "b": torch.zeros(3, dtype=torch.int32)}
    _safetensors.save_file(tensors, tmp_path / "x")
    first = (tmp_path / "x").read_bytes()
    _safetensors.save_file(dict(reversed(tensors.items())), tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == first
    with pytest.raises(violin.Error, match="complex64"):
        _safetensors.save_file({"z": torch.ones(1, dtype=torch.complex64)}, tmp_path / "x")
    assert [path.name for path in tmp_path.iterdir()] == ["x"] and (tmp_path / "x").read_bytes() == first


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 8,
        b"\x02\0\0\0\0\0\0\0[]",
        b"\x02\0\0\0\0\0\0\0{]",
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,99999999999]}}',
        b'{"a":{"dtype":"F32","shape":["1"],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"Q7","shape":[1],"data_offsets":[0,4]}}',
        b'{"a":7}',
        b'{"__metadata__":{"a":7}}',
    ],
)
def test_broken_files_are_errors_that_name_the_file(content, tmp_path):
    if content.startswith(b"{"):
        content = len(content).to_bytes(8, "little") + content + b"\0" * 4
    path = tmp_path / "broken.safetensors"
    path.write_bytes(content)
    with pytest.raises(violin.Error, match="broken.safetensors"):
        _safetensors.load_file(path)


@pytest.mark.parametrize("name", ["vit", "deit_distilled", "registers", "average", "rectangle"])
def test_a_saved_model_comes_back_with_its_masks(name, tmp_path, timm):
    model = violin.plug(build(name), init="none", curves=["hilbert", "snake_T"], curve_weights=True).eval()
    x = torch.randn(2, 3, *image_sizes(name)[0])
    classes = [f"class {i}" for i in range(5)]
    preprocessing = {"mean": (0.5,) * 3, "std": (0.5,) * 3, "crop_pct": 1.0, "interpolation": "bicubic"}
    violin.save(model, tmp_path / "m.safetensors", classes, preprocessing)
    again = violin.load(tmp_path / "m.safetensors").eval()
    assert torch.equal(run(again, x), run(model, x))
    about = again.violin_file
    assert about["classes"] == classes and about["preprocessing"]["crop_pct"] == 1.0
    assert about["model"] == violin.model_config(again) == violin.model_config(model)
    with pytest.raises(violin.Error, match="4 class names for a model of 5 classes"):
        violin.save(model, tmp_path / "m.safetensors", classes[:4])


def test_files_hold_timm_names_whatever_the_model(tmp_path, timm):
    from timm.models.vision_transformer import VisionTransformer

    model = violin.plug(build("torchvision"), init="spread").eval()
    x = torch.randn(2, 3, 32, 32)
    violin.save(model, tmp_path / "m.safetensors")
    tensors, _ = _safetensors.load_file(tmp_path / "m.safetensors")
    assert {"cls_token", "pos_embed", "blocks.1.attn.qkv.weight", "blocks.0.attn.violin.beta", "head.bias"} <= set(
        tensors
    )
    same = VisionTransformer(
        img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3, mlp_ratio=2, num_classes=5
    ).eval()
    violin.load_state(same, tmp_path / "m.safetensors")
    torch.testing.assert_close(run(same, x), run(model, x), rtol=1e-5, atol=1e-6)
    fresh = build("torchvision").eval()
    violin.load_state(fresh, tmp_path / "m.safetensors")
    assert torch.equal(run(fresh, x), run(model, x))


@pytest.mark.parametrize("name", ["vit", "torchvision", "dino"])
def test_state_dicts_with_the_names_of_the_models_own_class(name):
    model, fresh = violin.plug(build(name), init="none").eval(), build(name).eval()
    violin.load_state(fresh, {"model": model.state_dict(), "epoch": 3})
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(run(fresh, x), run(model, x))


def test_masks_in_some_heads_are_asked_for_where_no_file_describes_them():
    model, fresh = violin.plug(build("vit"), init="none", heads=[0, 2]).eval(), build("vit").eval()
    with pytest.raises(violin.Error, match=r"masks for 2 of 3 heads; say which, plug\(model, heads="):
        violin.load_state(fresh, model.state_dict())
    violin.load_state(violin.plug(fresh, init="none", heads=[0, 2]), model.state_dict())
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(run(fresh, x), run(model, x))


def test_dino_weights_round_trip(tmp_path):
    model, fresh = violin.plug(build("dino"), init="none").eval(), build("dino").eval()
    violin.save(model, tmp_path / "m.safetensors")
    assert violin.model_config(model)["num_classes"] == 0 and violin.model_config(model)["pos_resample"] == "dino"
    violin.load_state(fresh, tmp_path / "m.safetensors")
    x = torch.randn(1, 3, 16, 24)
    assert torch.equal(run(fresh, x), run(model, x))


def test_decay_survives_another_own_grid(tmp_path, timm):
    model = violin.plug(build("dynamic"), init="spread", parameterisation="rate").eval()
    decay = model.blocks[0].attn.violin.log_decay()
    model.set_input_size((64, 64))
    violin.save(model, tmp_path / "m.safetensors")
    again = violin.load(tmp_path / "m.safetensors")
    assert again.patch_embed.grid_size == (8, 8)
    torch.testing.assert_close(again.blocks[0].attn.violin.log_decay(), decay)
    small = build("vit")
    tensors, metadata = _safetensors.load_file(tmp_path / "m.safetensors")
    del tensors["pos_embed"]
    _safetensors.save_file(tensors, tmp_path / "n.safetensors", metadata)
    violin.load_state(small, tmp_path / "n.safetensors", strict=False)
    torch.testing.assert_close(small.blocks[0].attn.violin.log_decay(), decay)


def test_16_bit_rates_survive_another_own_grid(tmp_path, timm):
    from timm.models.vision_transformer import VisionTransformer

    def model(size):
        options = {**TINY, "img_size": size, "patch_size": 2, "pos_embed": "none"}
        return violin.plug(VisionTransformer(**options), init="spread", parameterisation="rate")

    large, small = model(64).half(), model(48)
    decay = large.blocks[0].attn.violin.log_decay()
    violin.save(large, tmp_path / "m.safetensors")
    violin.load_state(small, tmp_path / "m.safetensors")
    torch.testing.assert_close(small.blocks[0].attn.violin.log_decay(), decay)
    mask = large.blocks[0].attn.violin
    for size in (24, 64):
        rate = mask.rate_for((size, size))
        assert rate.dtype == torch.float16
        torch.testing.assert_close(rate.float(), mask.rate.float() * (size * size - 1) / 1023, rtol=1e-3, atol=0)


def test_published_classifier(golden, timm):
    from timm.models.vision_transformer import VisionTransformer

    data, _ = _safetensors.load_file(golden / "violin" / "violin_deit.golden.safetensors")
    model = VisionTransformer(
        img_size=32, patch_size=4, num_classes=7, embed_dim=24, depth=2, num_heads=3, class_token=False,
        global_pool="avg", fc_norm=False,
    ).eval()  # fmt: skip
    violin.load_state(model, golden / "violin" / "violin_deit.weights.safetensors")
    check_golden(model, data)


def test_published_backbone(golden):
    data, _ = _safetensors.load_file(golden / "violin" / "violin_dino.golden.safetensors")
    model = DinoTransformer().eval()
    violin.load_state(model, golden / "violin" / "violin_dino.weights.safetensors")
    check_golden(model, data)
    with torch.no_grad():
        for prefix in ("", "crop_16."):
            image = data[prefix + "image"]
            torch.testing.assert_close(model(image), data[prefix + "output"], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(
                model.get_last_selfattention(image), data[prefix + "last_attention"], rtol=1e-4, atol=1e-6
            )
        maps = violin.attention_maps(model, data["image"], [0, 5], blocks=[1])[1]
        torch.testing.assert_close(maps, data["last_attention"][:, :, [0, 5]], rtol=1e-4, atol=1e-6)


def check_golden(model, data):
    image = data["image"].clone().requires_grad_()
    out = model(image)
    torch.testing.assert_close(out, data["output"], rtol=1e-4, atol=1e-5)
    out.backward(data["d_output"])
    torch.testing.assert_close(image.grad, data["d_image"], rtol=1e-3, atol=1e-5 * data["d_image"].abs().max().item())
    for name, wanted in data.items():
        if not name.startswith("grad."):
            continue
        layer, _, which = name[len("grad.") :].partition(".attn.")
        mask = model.get_submodule(layer).attn.violin
        actual = mask.alpha.grad if which == "normalize" else mask.beta.grad[int(which.split(".")[1])]
        torch.testing.assert_close(actual, wanted, rtol=1e-3, atol=1e-5 * max(wanted.abs().max().item(), 1e-3))


def test_published_fixed_decay_and_training_wrappers():
    weights = {"module.backbone.blocks.0.attn.ai_list": torch.full((8, 3), 0.996)}
    model = violin.plug(build("vit"))
    state = violin.unplug(model).state_dict()
    weights.update({f"module.backbone.{name}": value for name, value in state.items()})
    weights["module.backbone.blocks.1.attn.ai_list"] = torch.full((8, 3), 0.996)
    violin.load_state(model, {"teacher": weights, "student": {}, "epoch": 3})
    mask = model.blocks[0].attn.violin
    assert mask.alpha is None and mask.config.decay == pytest.approx(0.996) and mask.gamma.shape == (8, 3)


def test_a_model_comes_before_its_average_and_branches_are_chosen(tmp_path):
    kinds = ("model", "model_ema", "teacher", "student")
    models = {kind: build("torchvision") for kind in kinds}
    states = {kind: model.state_dict() for kind, model in models.items()}

    def loaded(source, **options):
        model = build("torchvision")
        violin.load_state(model, source, **options)
        return next(k for k in kinds if torch.equal(model.conv_proj.weight, states[k]["conv_proj.weight"]))

    averaged = {"model_ema": states["model_ema"], "model": states["model"], "optimizer": {"state": {0: torch.ones(1)}}}
    assert loaded(averaged) == "model"
    assert loaded(averaged, branch="ema") == loaded(averaged, branch="model_ema") == "model_ema"
    both = {"student": states["student"], "teacher": {f"module.backbone.{k}": v for k, v in states["teacher"].items()}}
    torch.save(both, tmp_path / "both.pth")
    assert loaded(both) == loaded(tmp_path / "both.pth") == "teacher"
    assert loaded(tmp_path / "both.pth", branch="student") == "student"
    with pytest.raises(violin.Error, match=r"both\.pth has no branch 'ema'; at the top it has student, teacher"):
        loaded(tmp_path / "both.pth", branch="ema")


@pytest.mark.parametrize("prefix", ["_orig_mod.module.", "module._orig_mod.", "module.module.", "model._orig_mod."])
def test_prefixes_of_wrappers_in_any_order(prefix):
    model, x = violin.plug(build("torchvision"), init="none").eval(), torch.randn(1, 3, 32, 32)
    fresh = build("torchvision").eval()
    violin.load_state(fresh, {prefix + name: value for name, value in violin.weights.state(model).items()})
    assert torch.equal(run(fresh, x), run(model, x))
    with pytest.raises(violin.Error, match="the weights do not fit"):
        violin.load_state(fresh, {"other." + name: value for name, value in violin.weights.state(model).items()})


def test_the_folder_of_a_run_gives_its_best_weights(tmp_path, timm):
    models = {place: violin.plug(build("vit"), init="none") for place in ("last", "best", "best/ema")}
    for place, model in models.items():
        folder = tmp_path / place.split("/")[0]
        folder.mkdir(exist_ok=True)
        violin.save(model, folder / ("ema.safetensors" if "ema" in place else "model.safetensors"))

    def same(model, place):
        return torch.equal(model.blocks[0].attn.qkv.weight, models[place].blocks[0].attn.qkv.weight)

    assert same(violin.load(tmp_path), "best") and same(violin.load(tmp_path, branch="ema"), "best/ema")
    (tmp_path / "best" / "model.safetensors").unlink()
    assert same(violin.load(tmp_path), "last")
    (tmp_path / "last" / "model.safetensors").unlink()
    with pytest.raises(violin.Error, match="holds no weights: neither best/model.safetensors nor last"):
        violin.load(tmp_path)


def test_weights_that_do_not_fit_are_named(tmp_path):
    model = build("torchvision")
    state = violin.weights.state(model)
    del state["blocks.1.norm1.weight"]
    with pytest.raises(violin.Error, match=r"1 missing \(blocks.1.norm1.weight\)"):
        violin.load_state(model, state)
    state["blocks.1.norm1.weight"] = torch.ones(7)
    with pytest.raises(violin.Error, match=r"ln_1.weight is \[7\] in the weights and \[24\]"):
        violin.load_state(model, state)
    with pytest.raises(violin.Error, match="5 curves; say which"):
        violin.load_state(build("torchvision"), {"blocks.0.attn.violin.beta": torch.zeros(5, 3)}, strict=False)
    with pytest.raises(violin.Error, match="ai_list.0 is missing"):
        violin.translate({"blocks.0.attn.ai_list.1": torch.zeros(3)})
    with pytest.raises(violin.Error, match=f"{tmp_path} cannot be written: Is a directory"):
        violin.save(model, tmp_path)
    assert not list(tmp_path.parent.glob("*.part"))
    with pytest.raises(violin.Error, match="classes is 'abcde'; expected a list of names"):
        violin.save(model, tmp_path / "m.safetensors", classes="abcde")
    (tmp_path / "evil.pth").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(violin.Error, match="evil.pth"):
        violin.load_state(model, tmp_path / "evil.pth")


def test_models_that_the_binary_does_not_have_are_refused(tmp_path, timm):
    model = violin.plug(build("qk_norm"))
    with pytest.raises(violin.Error, match="q_norm in its attention"):
        violin.save(model, tmp_path / "m.safetensors")
    model = build("vit")
    model.blocks[0].mlp.act = torch.nn.SiLU()
    with pytest.raises(violin.Error, match="SiLU in its MLP"):
        violin.save(model, tmp_path / "m.safetensors")
    assert not list(tmp_path.iterdir())


def tiny(**options):
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(**{**TINY, **options})


def strange_models():
    """Models that the C++ side does not have, with the part that an error names."""
    from functools import partial

    from timm.layers import RmsNorm
    from timm.models.vision_transformer import ResPostBlock
    from timm.models.vision_transformer_relpos import VisionTransformerRelPos

    bare = partial(torch.nn.LayerNorm, elementwise_affine=False)
    hybrid = tiny()
    hybrid.patch_embed.backbone = torch.nn.Conv2d(3, 3, 1)
    other_eps, other_scale = tiny(), violin.plug(tiny())
    other_eps.norm.eps = 1e-3
    other_scale.blocks[1].attn.scale = 1.0
    return {
        "post-norm": (tiny(block_fn=ResPostBlock), r"blocks\.0 \(ResPostBlock\)"),
        "mlp norm": (tiny(scale_mlp_norm=True), r"blocks\.0\.mlp \(Mlp\)"),
        "difference": (tiny(attn_layer="diff"), r"blocks\.0\.attn \(DiffAttention\)"),
        "no bias": (tiny(proj_bias=False), r"has no blocks\.0\.attn\.proj\.bias"),
        "rms": (tiny(norm_layer=RmsNorm), r"blocks\.0\.norm1 \(RmsNorm\)"),
        "bare norms": (tiny(norm_layer=bare), r"has no blocks\.0\.norm1"),
        "hybrid": (hybrid, r"patch embedding \(PatchEmbed\)"),
        "relative": (VisionTransformerRelPos(**TINY), r"blocks\.0\.attn \(RelPosAttention\)"),
        "shared relative": (VisionTransformerRelPos(**TINY, shared_rel_pos=True), "RelPosAttention"),
        "epsilon": (other_eps, "norm behind its blocks"),
        "scale": (other_scale, "attention with scale 1.0"),
        "no norm": (tiny(final_norm=False), "has no final norm, which"),
    }


def test_parts_that_the_binary_does_not_have_are_named(tmp_path, timm):
    for name, (model, part) in strange_models().items():
        with pytest.raises(violin.Error, match=part):
            violin.save(model, tmp_path / "m.safetensors")
            pytest.fail(name)
    with pytest.raises(violin.Error, match=r"blocks\.0 \(ResPostBlock\)"):
        violin.save(violin.plug(strange_models()["post-norm"][0]), tmp_path / "m.safetensors")
    changed = violin.plug(build("torchvision"))
    changed.encoder.layers[1].mlp[1] = torch.nn.ReLU()
    with pytest.raises(violin.Error, match=r"encoder_layer_1\.mlp"):
        violin.save(changed, tmp_path / "m.safetensors")
    assert not list(tmp_path.iterdir())


def test_the_tool_refuses_what_the_package_refuses(timm):
    import export_timm

    export_timm.describe_model(tiny())
    config = export_timm.describe_model(tiny(embed_dim=177, mlp_ratio=784.5 / 177))
    assert int(177 * config["mlp_ratio"]) == 784
    for name, (model, _) in strange_models().items():
        with pytest.raises(export_timm.Unsupported):
            export_timm.describe_model(model)
            pytest.fail(name)


@pytest.fixture
def binary():
    """Runs the command that stands beside the operator library."""
    library = os.environ.get("VIOLIN_OPS_LIBRARY")
    path = Path(library).parent / "violin" if library else Path("violin")
    shown = subprocess.run([path, "--help"], capture_output=True, text=True, check=False) if path.exists() else None
    if shown is None or "features" not in shown.stdout:
        pytest.skip("there is no binary with the verb `features` beside the operator library")

    def call(*arguments):
        command = [path, *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return call


@pytest.mark.parametrize("name", ["vit", "deit_distilled", "registers", "average", "torchvision", "dino"])
def test_the_binary_gives_the_same_logits(name, binary, tmp_path):
    """Trained in Python, evaluated in C++, and back: both parameterisations, all tensors."""
    x = torch.randn(2, 3, 32, 32)
    _safetensors.save_file({"images": x}, tmp_path / "images.safetensors")
    for options in (
        {"init": "none"},
        {"init": "spread", "parameterisation": "rate", "prefix_decay": "learned", "curve_weights": True, "heads": [1]},
        {"init": "identity", "curves": "hilbert,z_T", "strategy": "add_v1", "blocks": [1]},
    ):
        model = violin.plug(build(name), **options).eval()
        with torch.no_grad():
            for parameter in violin.mask_parameters(model):
                parameter.add_(torch.rand_like(parameter) * 0.3)
        classes = [f"c{i}" for i in range(5)] if name != "dino" else None
        violin.save(model, tmp_path / "m.safetensors", classes, {"size": 32, "crop_pct": 1.0})
        arguments = ["--input", tmp_path / "images.safetensors", "--device", "cpu", "--threads", "1"]
        binary("features", tmp_path / "m.safetensors", *arguments, "--out", tmp_path / "out.safetensors")
        tensors, _ = _safetensors.load_file(tmp_path / "out.safetensors")
        torch.testing.assert_close(tensors["logits"], run(model, x), rtol=1e-4, atol=1e-5)
        binary("convert", tmp_path / "m.safetensors", tmp_path / "again.safetensors")
        fresh = build(name).eval()
        about = violin.load_state(fresh, tmp_path / "again.safetensors")
        torch.testing.assert_close(run(fresh, x), run(model, x), rtol=1e-5, atol=1e-6)
        assert about.get("classes") == classes and about["preprocessing"]["crop_pct"] == 1
        for path in tmp_path.glob("*.safetensors"):
            if path.name != "images.safetensors":
                path.unlink()


@pytest.mark.parametrize("init", ["pretrain", "finetune", "none", "spread", "identity"])
@pytest.mark.parametrize("parameterisation", ["auto", "rate"])
def test_a_seed_gives_the_initial_values_of_the_binary(init, parameterisation, binary, tmp_path):
    model = build("torchvision")
    violin.save(model, tmp_path / "vanilla.safetensors")
    options = {"init": init, "parameterisation": parameterisation, "prefix_decay": "learned", "curve_weights": True}
    violin.plug(model, seed=0, **options)
    (tmp_path / "config.json").write_text(json.dumps(violin.model_config(model)))
    binary("convert", tmp_path / "vanilla.safetensors", tmp_path / "masked.safetensors",
           "--config", tmp_path / "config.json", "--allow-missing")  # fmt: skip
    theirs, _ = _safetensors.load_file(tmp_path / "masked.safetensors")
    ours = violin.weights.state(model)
    names = [name for name in ours if ".violin." in name]
    assert len(names) == 8
    for name in names:
        torch.testing.assert_close(theirs[name], ours[name], rtol=1e-6, atol=0)


def test_description_has_only_fields_that_the_binary_knows(timm):
    source = Path(__file__).parent.parent.parent / "violin" / "nn" / "config.cpp"
    text = source.read_text()
    config = violin.model_config(violin.plug(build("registers"), blocks=[1], heads=[0]))
    for field in (*config, *config["violin"]):
        assert f'{{"{field}"' in text, field
    json.dumps(config)


def test_checkpoints_of_training_scripts_load(tmp_path):
    import argparse

    model = violin.plug(build("vit"), init="spread").eval()
    beside = {"args": argparse.Namespace(lr=1e-3, out=tmp_path), "epoch": 3}
    try:
        import numpy

        beside["best"] = numpy.float64(3)
    except ImportError:
        pass
    torch.save({"model": model.state_dict(), **beside}, tmp_path / "c.pth")
    other = build("vit").eval()
    violin.load_state(other, tmp_path / "c.pth")
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(run(other, x), run(model, x))
    torch.save({"model": model.state_dict(), "scheduler": torch.optim.lr_scheduler.LambdaLR}, tmp_path / "d.pth")
    with pytest.raises(violin.Error, match=r"holds a torch.optim.lr_scheduler.LambdaLR beside its weights"):
        violin.load_state(build("vit"), tmp_path / "d.pth")


def with_layers(timm_options=None, **mask):
    from timm.models.vision_transformer import VisionTransformer

    class Layer(violin.Attention):
        def __init__(self, dim, num_heads, **options):
            super().__init__(dim, num_heads, mask=dict(mask), grid=(4, 4), prefix=1, **options)

    options = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 5}
    return VisionTransformer(**{**options, **(timm_options or {})}, attn_layer=Layer)


def test_models_built_with_our_layers_come_back(tmp_path, timm):
    model = with_layers(init="spread", strategy="mul_after_sm").eval()
    violin.save(model, tmp_path / "m.safetensors")
    assert violin.model_config(model)["violin"]["strategy"] == "mul_after_sm"
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(run(violin.load(tmp_path / "m.safetensors").eval(), x), run(model, x))
    model.blocks[1].attn.violin = violin.ViolinMask(3, "hilbert", grid=(4, 4))
    with pytest.raises(violin.Error, match=r"blocks\.1\.attn has another kind of mask"):
        violin.save(model, tmp_path / "n.safetensors")
    model.blocks[1].attn.violin = None
    assert violin.model_config(model)["violin"]["blocks"] == [0]


def test_a_plugged_model_refuses_weights_of_another_mask(tmp_path, timm):
    violin.save(violin.plug(build("vit"), init="spread", curves="normal"), tmp_path / "m.safetensors")
    for options, field in [
        ({"curves": "transposed"}, "curves"),
        ({"curves": "normal", "strategy": "mul_after_sm"}, "strategy"),
        ({"curves": "normal", "blocks": [0]}, "blocks"),
    ]:
        model = violin.plug(build("vit"), init="spread", **options)
        with pytest.raises(violin.Error, match=f"the weights' mask has {field} "):
            violin.load_state(model, tmp_path / "m.safetensors")
    same = violin.plug(build("vit"), init="pretrain", curves="snake,hilbert,peano,zigzag")
    violin.load_state(same, tmp_path / "m.safetensors")


def test_weights_without_a_mask_are_told_when_to_be_loaded():
    source, x = build("torchvision").eval(), torch.randn(2, 3, 32, 32)
    model = violin.plug(build("torchvision")).eval()
    with pytest.raises(violin.Error, match=r"missing \(.*; weights without a mask are loaded before violin\.plug"):
        violin.load_state(model, source.state_dict())
    violin.load_state(model, source.state_dict(), strict=False)
    torch.testing.assert_close(run(model, x), run(source, x))


def test_refused_weights_leave_the_model_alone(tmp_path, timm):
    model = violin.plug(build("vit"), init="spread")
    weights = model.state_dict()
    weights.pop("norm.weight")
    plain = build("vit")
    with pytest.raises(violin.Error, match="1 missing"):
        violin.load_state(plain, weights)
    assert not violin.is_plugged(plain)


def test_hidden_widths_that_no_short_quotient_gives(tmp_path, timm):
    from timm.models.vision_transformer import VisionTransformer

    options = {"img_size": 32, "patch_size": 8, "embed_dim": 176, "depth": 1, "num_heads": 2, "num_classes": 5}
    model = VisionTransformer(**options, mlp_ratio=784.5 / 176)
    violin.save(model, tmp_path / "m.safetensors")
    assert violin.load(tmp_path / "m.safetensors").blocks[0].mlp.fc1.out_features == 784
