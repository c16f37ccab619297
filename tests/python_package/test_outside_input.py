"""What comes from outside (files, wrappers, arguments) is taken as it is meant, or refused in one line that names it."""

import json
import re
import struct
from pathlib import Path

import pytest
import torch
from models import TINY, build, images, run
from standins import Wrapped
from torch import nn

import violin
from violin import _fields, _safetensors, ops


def saved(path, model=None):
    """Tensors and description of a saved model, for tests that damage them."""
    violin.save(violin.plug(build("vit"), curves=["hilbert", "z"]) if model is None else model, path)
    tensors, metadata = _safetensors.load_file(path)
    return tensors, json.loads(metadata["violin.model"])


def write(path, tensors, description):
    _safetensors.save_file(tensors, path, {"violin.model": json.dumps(description)})
    return path


def refused(call, message):
    with pytest.raises(violin.Error, match=message) as raised:
        call()
    assert "\n" not in str(raised.value)


# -- saving ------------------------------------------------------------------------------------------------------------


def test_saving_refuses_a_plugged_model_with_masks_of_several_kinds(tmp_path):
    model = violin.plug(build("vit"), init="spread")
    model.blocks[1].attn.violin = violin.ViolinMask(3, grid=(4, 4), strategy="log", init="spread")
    refused(lambda: violin.save(model, tmp_path / "m"), r"blocks\.1\.attn has another kind of mask than blocks\.0\.")
    assert not list(tmp_path.iterdir())


def test_a_model_that_was_pruned_after_plug_is_saved_with_the_numbers_that_it_has(tmp_path, timm):
    model = violin.plug(build("vit"), init="none", blocks=[1]).eval()
    model.blocks = nn.Sequential(model.blocks[1])
    violin.save(model, tmp_path / "m.safetensors")
    x = images((32, 32))
    assert "blocks" not in violin.model_config(model)["violin"]
    assert torch.equal(run(violin.load(tmp_path / "m.safetensors").eval(), x), run(model, x))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.vit, self.classifier = build("vit"), nn.Linear(5, 7)

    def forward(self, x):
        return self.classifier(self.vit(x))


def test_saving_names_parameters_around_the_transformer(tmp_path):
    model = violin.plug(Classifier())
    message = r"Classifier has parameters outside .*\(classifier.weight, classifier.bias\).*violin\.save\(model\.vit"
    refused(lambda: violin.save(model, tmp_path / "m"), message)
    violin.save(model.vit, tmp_path / "m")
    averaged = torch.optim.swa_utils.AveragedModel(model.vit)  # has a buffer of its own, no parameter
    violin.save(averaged, tmp_path / "m")


def test_saving_names_layers_that_stand_for_others(tmp_path, timm):
    model = violin.plug(build("vit"))
    model.blocks[0].attn.qkv = Wrapped(model.blocks[0].attn.qkv)
    refused(lambda: violin.save(model, tmp_path / "m"), r"blocks\.0\.attn\.qkv \(Wrapped\) instead of a linear layer")
    model = build("vit")
    model.blocks[0].mlp.fc1 = Wrapped(model.blocks[0].mlp.fc1)
    refused(lambda: violin.save(model, tmp_path / "m"), r"another kind of MLP \(Mlp\), without linear fc1")
    model = build("torchvision")
    model.heads = nn.Linear(24, 5)
    refused(lambda: violin.save(model, tmp_path / "m"), r"another head than one linear layer \(Linear")
    model = violin.plug(build("vit")).to("meta")
    refused(lambda: violin.save(model, tmp_path / "m"), "is on the device meta")
    names = ["a", "b", "c", "d", "\ud800"]
    refused(lambda: violin.save(build("vit"), tmp_path / "m", classes=names), "classes has .*UTF-8")
    assert not list(tmp_path.iterdir())


def tiny(**options):
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(**{**TINY, **options})


def test_images_that_are_no_whole_number_of_patches_are_no_overlap(tmp_path, timm):
    model = violin.plug(tiny(img_size=36), init="spread", parameterisation="rate").eval()
    violin.save(model, tmp_path / "m.safetensors")
    x = images((36, 36))
    assert torch.equal(run(violin.load(tmp_path / "m.safetensors").eval(), x), run(model, x))
    padded = tiny(img_size=36, dynamic_img_size=True, dynamic_img_pad=True)
    refused(lambda: violin.save(padded, tmp_path / "n"), "images of 36x36 that are padded to patches of 8x8")
    overlapping = build("vit")
    overlapping.patch_embed.proj.stride = (4, 4)
    refused(lambda: violin.save(overlapping, tmp_path / "n"), "patches of 8x8 at a distance of 4x4")


# -- descriptions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, message",
    [
        ("x", "the description is 'x'; expected an object"),
        (None, "the description is None; expected an object"),
        ({"img_size": [32]}, r"img_size is \[32\]; expected a whole number or \[height, width\]"),
        ({"img_size": "wide"}, "img_size is 'wide'"),
        ({"img_size": 4}, r"img_size is \[4, 4\]; expected at least the patch size, \[8, 8\]"),
        ({"patch_size": 0}, "patch_size is 0; expected whole numbers from 1 to 65536"),
        ({"violin": 5}, "violin is 5; expected an object"),
        ({"violin": {"blocks": [7]}}, r"violin.blocks is \[7\]; expected numbers from 0 to 1"),
        ({"violin": {"heads": [3]}}, r"violin.heads is \[3\]; expected numbers from 0 to 2"),
        ({"violin": {"curves": [1]}}, r"violin\.model: curves is"),
        ({"unknown": 3}, "'unknown' is not a field of a model"),
        ({"norm_eps": "a"}, "norm_eps is 'a'; expected a number above 0"),
        ({"norm_eps": 10**400}, "norm_eps is 1000.*…; expected a number above 0"),
        ({"mlp_ratio": float("nan")}, "violin.model is no JSON"),
        ({"global_pool": "zz"}, "global_pool is 'zz'; expected one of token, avg"),
        ({"num_heads": 5}, "num_heads is 5; expected a divisor of embed_dim, 24"),
        ({"depth": 2.0}, "depth is 2.0; expected a whole number from 1 to 1000"),
        ({"qkv_bias": 1}, "qkv_bias is 1; expected true or false"),
        ({"class_token": False}, "global_pool is 'token'; expected avg"),
        ({"distilled": True, "global_pool": "avg"}, "distilled is True; expected"),
    ],
)
def test_damaged_descriptions_are_refused_before_anything_is_built(change, message, tmp_path, timm):
    tensors, description = saved(tmp_path / "m.safetensors")
    path = write(tmp_path / "m.safetensors", tensors, {**description, **change} if isinstance(change, dict) else change)
    refused(lambda: violin.load(path), message)
    model = build("vit")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    refused(lambda: violin.load_state(model, path), message)
    assert not violin.is_plugged(model) and not model.patch_embed.proj._forward_hooks
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_fields_of_a_description_are_those_of_the_binary():
    source = Path(__file__).parent.parent.parent / "violin" / "nn" / "config.cpp"
    reader = source.read_text().partition("void merge_json(const json& object, ModelConfig& config)")[2]
    known = re.findall(r'^      \{"(\w+)",', reader.partition('merge(object, "", readers)')[0], re.MULTILINE)
    assert sorted(known) == sorted(_fields._FIELDS)


def test_a_description_leaves_out_what_is_usual_and_sizes_have_three_forms(tmp_path, timm):
    tensors, description = saved(tmp_path / "m.safetensors")
    for usual in ("in_chans", "mlp_ratio", "qkv_bias", "class_token", "fc_norm", "norm_eps", "pos_resample"):
        del description[usual]
    path = tmp_path / "n.safetensors"
    for size in (32, [32, 32], "32x32"):
        loaded = violin.load(write(path, tensors, {**description, "img_size": size}))
        assert torch.equal(loaded.pos_embed, tensors["pos_embed"]) and violin.is_plugged(loaded)


def test_sizes_that_no_tensor_proves_build_nothing(tmp_path, timm):
    tensors, description = saved(tmp_path / "m.safetensors")
    path = write(tmp_path / "m.safetensors", tensors, {**description, "embed_dim": 65535, "depth": 1000})
    refused(lambda: violin.load(path), r"is \[.*\] in the weights, whose description has it as \[.*65535")
    path = write(tmp_path / "m.safetensors", tensors, {**description, "depth": 1000})
    refused(lambda: violin.load(path), r"the weights have no blocks\.2\.norm1\.weight")
    del description["img_size"]  # which then is 224
    path = write(tmp_path / "m.safetensors", tensors, description)
    refused(lambda: violin.load_state(build("vit"), path), r"pos_embed is \[1, 17, 24\] in the weights, whose desc")


def test_other_texts_of_a_file_are_checked_too(tmp_path, timm):
    tensors, description = saved(tmp_path / "m.safetensors")
    about = {"violin.model": json.dumps(description)}
    for key, text, message in [
        ("classes", '{"a": 1}', "violin.classes is no list of names"),
        ("classes", "[1]", "violin.classes is no list of names"),
        ("preprocessing", "[]", "violin.preprocessing is no JSON object"),
        ("preprocessing", "[" * 100000, "violin.preprocessing is no JSON"),
    ]:
        _safetensors.save_file(tensors, tmp_path / "n.safetensors", {**about, "violin." + key: text})
        refused(lambda: violin.load_state(build("vit"), tmp_path / "n.safetensors"), message)
    for text, message in [
        ('{"mean": "grey"}', "violin.preprocessing: preprocessing: mean is 'grey'; expected three numbers"),
        ('{"crop_ptc": 1}', "violin.preprocessing: preprocessing has a field 'crop_ptc'"),
        ('{"size": 1e9}', "violin.preprocessing: preprocessing: size is 1000000000.0; expected"),
    ]:
        _safetensors.save_file(tensors, tmp_path / "n.safetensors", {**about, "violin.preprocessing": text})
        refused(lambda: violin.load(tmp_path / "n.safetensors"), message)


def test_a_described_mask_without_tensors_is_missing(tmp_path, timm):
    tensors, description = saved(tmp_path / "m.safetensors")
    plain = {name: value for name, value in tensors.items() if ".violin." not in name}
    path, model = write(tmp_path / "m.safetensors", plain, description), build("vit")
    refused(lambda: violin.load(path), r"missing \(blocks\.0\.attn\.violin\.alpha")
    refused(lambda: violin.load_state(model, path), r"missing \(blocks\.0\.attn\.violin\.alpha")
    assert not violin.is_plugged(model)
    violin.load_state(model, path, strict=False)
    assert not violin.is_plugged(model)


def test_a_mask_that_a_description_does_not_have_is_not_guessed(tmp_path, timm):
    tensors, description = saved(tmp_path / "m.safetensors", violin.plug(build("vit"), init="none"))
    del description["violin"]
    path, model = write(tmp_path / "m.safetensors", tensors, description), build("vit")
    refused(lambda: violin.load_state(model, path), "have a mask that their description does not have; plug the model")
    refused(lambda: violin.load(path), "not expected")
    assert not violin.is_plugged(model)
    violin.load_state(violin.plug(model, init="none"), path)
    assert torch.equal(model.blocks[0].attn.violin.beta, tensors["blocks.0.attn.violin.beta"])


@pytest.mark.parametrize("shape", [(3,), (5, 3), (1, 3)])
def test_rates_of_another_shape_are_refused_before_they_change_their_unit(shape, tmp_path, timm):
    tensors, description = saved(tmp_path / "m.safetensors")
    tensors["blocks.0.attn.violin.rate"] = torch.zeros(shape)
    del tensors["pos_embed"]
    path, model = write(tmp_path / "m.safetensors", tensors, {**description, "img_size": 64}), build("vit")
    refused(lambda: violin.load_state(model, path, strict=False), r"violin\.rate is \[.*\] in the weights and \[2, 3\]")
    assert not violin.is_plugged(model)


def test_a_model_is_what_the_file_describes_where_tensors_prove_nothing(tmp_path, timm):
    path = tmp_path / "m.safetensors"
    violin.save(tiny(), path)
    for options, message in [
        ({"num_heads": 6}, "num_heads is 3 in the weights' description and 6 in the model"),
        ({"global_pool": "avg", "fc_norm": False}, "global_pool is 'token' in the weights' description and 'avg'"),
        ({"norm_layer": nn.LayerNorm}, "norm_eps is 1e-06 in the weights' description and 1e-05"),
    ]:
        model = tiny(**options)
        before = model.cls_token.clone()
        refused(lambda model=model: violin.load_state(model, path), message)
        assert torch.equal(model.cls_token, before)
        violin.load_state(model, path, strict=False)
        assert not torch.equal(model.cls_token, before)
    violin.load_state(tiny(global_pool=""), path)  # whose caller pools
    assert violin.load(path, global_pool="avg").global_pool == "avg"  # as the caller wants it
    violin.save(tiny(img_size=(24, 40)), path)
    refused(lambda: violin.load_state(tiny(img_size=(40, 24)), path), "positions for 3x5 patches and the model for 5x3")


def test_heads_of_a_mask_are_compared_though_one_side_has_all(tmp_path):
    path = tmp_path / "m.safetensors"
    violin.save(violin.plug(build("vit"), init="none", heads=[0, 2]), path)
    model = violin.plug(build("vit"), init="none")
    refused(lambda: violin.load_state(model, path), r"the weights' mask has heads \[0, 2\] and the model's \[0, 1, 2\]")
    violin.save(model, path)
    violin.load_state(violin.plug(build("vit"), init="none", heads=[0, 1, 2]), path)


# -- files -------------------------------------------------------------------------------------------------------------


def test_formats_are_told_by_content(tmp_path, timm):
    model = violin.plug(build("vit"), init="none").eval()
    x = images((32, 32))
    for name in ("m.pth", "m.SAFETENSORS", "m", "m.safetensors"):
        violin.save(model, tmp_path / name)
        assert torch.equal(run(violin.load(tmp_path / name).eval(), x), run(model, x))
    for legacy in (False, True):
        torch.save(model.state_dict(), tmp_path / "t.safetensors", _use_new_zipfile_serialization=not legacy)
        fresh = build("vit").eval()
        violin.load_state(fresh, tmp_path / "t.safetensors")
        assert torch.equal(run(fresh, x), run(model, x))


def test_files_without_weights_are_named(tmp_path):
    path = tmp_path / "w.pth"
    refused(lambda: violin.load_state(build("vit"), path), r"w\.pth does not exist")
    path.write_bytes(b"")
    refused(lambda: violin.load_state(build("vit"), path), r"w\.pth is empty")
    path.write_bytes(b"junk" * 100)
    refused(lambda: violin.load_state(build("vit"), path), "neither a safetensors file nor a file of torch.save")
    for content, kind in (([1], "list"), (torch.ones(3), "Tensor"), (None, "NoneType")):
        torch.save(content, path)
        refused(lambda: violin.load_state(build("vit"), path), rf"w\.pth holds a {kind}; expected a state dict")
    endless = {}
    endless["model"] = endless
    torch.save(endless, path)
    refused(lambda: violin.load_state(build("vit"), path), r"w\.pth holds dicts within dicts without an end")
    torch.save({"model": {}}, path)
    path.write_bytes(path.read_bytes()[:100])
    refused(lambda: violin.load_state(build("vit"), path), r"w\.pth is no file of plain weights")
    refused(lambda: violin.load_state(build("vit"), build("vit")), "weights is a VisionTransformer; expected a path")
    refused(lambda: violin.load({}), "path is a state dict; expected a file")


@pytest.mark.parametrize(
    "strange", [torch.ones(24, dtype=torch.complex64), torch.ones(24).to_sparse(), torch.ones(24, device="meta")]
)
def test_weights_that_are_no_plain_numbers_change_nothing(strange, timm):
    model, other = build("vit"), violin.plug(build("vit")).state_dict()
    before = model.cls_token.clone()
    refused(lambda: violin.load_state(model, {**other, "norm.weight": strange}), "norm.weight is no plain tensor")
    assert torch.equal(model.cls_token, before) and not violin.is_plugged(model)


@pytest.mark.parametrize("shape", [[0, 2**70], [2**33, 2**33, 0], [1] * 65, [2**62]])
def test_shapes_beyond_every_memory(shape, tmp_path):
    header = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0 if 0 in shape else 4]}}).encode()
    (tmp_path / "h").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    refused(lambda: _safetensors.load_file(tmp_path / "h"), "tensor 'a' has a shape beyond every memory")


def test_published_decays_that_do_not_go_together():
    decays = {"blocks.0.attn.ai_list.0": torch.zeros(3), "blocks.0.attn.ai_list.1": torch.zeros(2)}
    refused(lambda: violin.translate(decays), r"blocks\.0\.attn\.ai_list has curves of several shapes")
    nothing = {"blocks.0.attn.ai_list": torch.zeros(0, 3)}
    refused(lambda: violin.load_state(build("vit"), nothing, strict=False), r"decays of shape \[0, 3\]")


# -- arguments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["log", "add_v1"])
def test_identity_refuses_an_alpha_that_would_receive_no_gradient(strategy):
    model = build("vit")
    refused(lambda: violin.plug(model, curves="", strategy=strategy), f"strategy is '{strategy}'; expected another")
    assert not violin.is_plugged(model)
    violin.plug(model, curves="", strategy="mul_v1")


@pytest.mark.parametrize("strategy", ["log", "add_v1"])
def test_files_of_trained_masks_are_read_whatever_they_began_with(strategy, tmp_path, timm):
    model = violin.plug(build("vit"), curves="", strategy=strategy, init="spread", parameterisation="rate")
    violin.save(model, tmp_path / "model.safetensors")
    tensors, metadata = _safetensors.load_file(tmp_path / "model.safetensors")
    description = json.loads(metadata["violin.model"])
    description["violin"]["init"] = "identity"
    metadata["violin.model"] = json.dumps(description)
    _safetensors.save_file(tensors, tmp_path / "model.safetensors", metadata)
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(violin.load(tmp_path / "model.safetensors").eval()(x), model.eval()(x))


class Resizing(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.vit = nn.BatchNorm2d(3), build("dynamic")

    def forward(self, x):
        return self.vit(nn.functional.interpolate(self.norm(x), size=(32, 32)))


@pytest.mark.parametrize("plugged", [True, False])
def test_patches_of_maps_are_those_behind_a_wrapper_that_resizes(plugged):
    model = Resizing().eval()
    if plugged:
        violin.plug(model, init="spread")
    x = images((64, 64), 1)
    maps = violin.attention_maps(model, x, [(1, 1), (3, 3)])[1]
    small = nn.functional.interpolate(model.norm(x), size=(32, 32))
    torch.testing.assert_close(maps, violin.attention_maps(model.vit, small, [6, 16])[1])
    refused(lambda: violin.attention_maps(model, x, [(4, 0)]), "outside of the grid, 4x4")
    assert len(model.vit.patch_embed.proj._forward_hooks) == plugged  # plug()'s own
    model.train()
    counted = model.norm.num_batches_tracked.clone()
    violin.attention_maps(model, x, 0)
    assert model.norm.num_batches_tracked == counted + 1 and model.training and model.vit.training


def test_queries_of_maps_are_whole_numbers_of_any_library():
    model, x = build("vit").eval(), images((32, 32), 1)
    expected = violin.attention_maps(model, x, (1, 2))[0]
    pairs = [(torch.tensor(1), torch.tensor(2))]
    try:
        import numpy

        pairs.append(tuple(numpy.unravel_index(6, (4, 4))))
    except ImportError:
        pass
    for pair in pairs:
        for queries in (pair, [pair]):
            torch.testing.assert_close(violin.attention_maps(model, x, queries)[0], expected)
    refused(lambda: violin.attention_maps(model, x, [(1.7, 2.2)]), r"query patch \(1.7, 2.2\) is no \(row, column\)")
    refused(lambda: violin.attention_maps(model, x[0]), r"images are \[3, 32, 32\]; expected \[batch, channels")
    refused(lambda: violin.attention_maps(model, "cat.png"), "images is a str; expected a tensor")


def test_operators_name_arguments_of_another_type():
    q, ranks, decays = torch.randn(2, 3, 5, 8), ops.curve_ranks("z", (2, 2)), -torch.rand(1, 3)
    table, lse = torch.ones(3, 5, 5), torch.zeros(2, 3, 5)
    for call, message in [
        (lambda: ops.attention([1.0], q, q), "q is a list; expected a tensor"),
        (lambda: ops.attention(None, q, q), "q is None; expected a tensor"),
        (lambda: ops.attention(q, q, q, [1.0]), "gain is a list; expected a tensor"),
        (lambda: ops.attention(q, q, q, scale="1"), "scale is '1'; expected a number"),
        (lambda: ops.attention(q.to_sparse(), q, q), "q is a torch.sparse_coo tensor; expected a plain one"),
        (lambda: ops.attention_qkv(3), "qkv is a int; expected a tensor"),
        (lambda: ops.attention_with_lse(q, None, q), "k is None; expected a tensor"),
        (lambda: ops.attention_rows(q, q, lse, [0]), "rows is a list; expected a tensor"),
        (lambda: ops.decay_mask(ranks, 0.5), "log_decay is a float; expected a tensor"),
        (lambda: ops.decay_mask(ranks, decays, None, 1.5), "prefix is 1.5; expected a whole number"),
        (lambda: ops.decay_gain(ranks, None), "log_decay is None; expected a tensor"),
        (lambda: ops.pack_gain(None, torch.float16), "gain is None; expected a tensor"),
        (lambda: ops.curve_ranks("z", 5), r"grid is 5; expected \(height, width\)"),
        (lambda: ops.curve_ranks("z", (2.0, 2)), r"grid is \(2.0, 2\); expected \(height, width\)"),
        (lambda: ops.compose("mul_v1", table, torch.ones(2)), r"alpha is \[2\]; expected one number, or one per head"),
        (lambda: ops.compose("mul_v1", table, 2.0), "alpha is a float; expected a tensor"),
        (lambda: ops.compose("mul_v1", None), "mask is None; expected a tensor"),
    ]:
        refused(call, message)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_operators_refuse_nested_tensors():
    q = torch.randn(2, 3, 5, 8)
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor([q[0], q[1]], layout=layout)
        refused(lambda nested=nested: ops.attention(nested, q, q), "q is a nested tensor; expected a plain one")


def test_checks_of_arguments_leave_compiled_code_whole():
    ranks, decays, x = ops.curve_ranks("z", (2, 2)), -torch.rand(1, 3), torch.randn(2, 3, 5, 8)

    def attend(q, log_decay):
        gain = ops.compose("mul_v2", ops.decay_mask(ranks, log_decay, None, 1), torch.ones(3))[0]
        return ops.attention(q, q, q, gain, scale=0.5)

    class Module(nn.Module):
        def forward(self, q, log_decay):
            return attend(q, log_decay)

    expected = attend(x, decays)
    torch.testing.assert_close(torch.compile(attend, fullgraph=True, backend="eager")(x, decays), expected)
    program = torch.export.export(Module(), (x, decays), dynamic_shapes=({0: torch.export.Dim("batch")}, None))
    names = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert any("violin.attention" in name for name in names)
    torch.testing.assert_close(program.module()(x[:1], decays), attend(x[:1], decays))
    torch.testing.assert_close(torch.vmap(lambda q: attend(q, decays))(x[None])[0], expected)
