"""plug and unplug: identity, weights in place, grids, freezing."""

import copy
import json
import pickle
import sys
import threading
from functools import partial

import pytest
import torch
from models import FAMILIES, TINY, build, image_sizes, images, run
from standins import TorchvisionTransformer
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

import violin
from violin._safetensors import load_file


@pytest.mark.parametrize("name", FAMILIES)
def test_identity_leaves_outputs_and_weights(name):
    model = build(name).eval()
    inputs = [images(size) for size in image_sizes(name)]
    before = [run(model, x) for x in inputs]
    parameters = dict(model.named_parameters())
    violin.plug(model)
    for x, expected in zip(inputs, before):
        assert (run(model, x) - expected).abs().max() <= 1e-5 * expected.abs().max()
    after = dict(model.named_parameters())
    assert all(after[key] is value for key, value in parameters.items())
    added = set(after) - set(parameters)
    assert {key.rsplit(".", 1)[-1] for key in added} == {"rate", "alpha"} and len(added) == 4
    assert set(violin.mask_parameters(model)) == {after[key] for key in added}


@pytest.mark.parametrize("name", FAMILIES)
def test_unplug_gives_the_same_model_back(name):
    model = build(name).eval()
    modules, x = dict(model.named_modules()), images(image_sizes(name)[0])
    expected, keys = run(model, x), list(model.state_dict())
    violin.plug(model, init="pretrain")
    assert not torch.allclose(run(model, x), expected)
    violin.unplug(model)
    again = dict(model.named_modules())
    assert list(again) == list(modules) and all(again[key] is value for key, value in modules.items())
    assert torch.equal(run(model, x), expected) and list(model.state_dict()) == keys
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    violin.plug(model)  # and it can be plugged again


@pytest.mark.parametrize("name", ["vit", "torchvision", "dino"])
def test_unplug_keeps_weights_that_were_trained_moved_or_replaced(name):
    model = violin.plug(build(name))
    model.double().eval()
    state = {key: torch.randn_like(value) for key, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    violin.unplug(model)
    assert not model.training and not any(module.training for module in model.modules())
    for key, value in model.state_dict().items():
        assert value.dtype == torch.float64 and torch.equal(value, state[key])
    run(model, images((32, 32)).double())


def plain(model, mask_of, x, grid, strategy):
    """Attention of a timm model by the formula, layer by layer, with masks of our own."""
    tokens = model._pos_embed(model.patch_embed(x))
    for block, mask in zip(model.blocks, mask_of):
        y = block.norm1(tokens)
        b, n, c = y.shape
        q, k, v = block.attn.qkv(y).reshape(b, n, 3, 3, c // 3).permute(2, 0, 3, 1, 4)
        m = torch.ones(3, n, n)
        p = n - grid[0] * grid[1]
        ranks = violin.curves.ranks("violin", grid).squeeze(1).float()
        distance = (ranks[:, :, None] - ranks[:, None]).abs()
        gamma = torch.sigmoid(mask.beta)
        m[:, p:, p:] = (gamma[:, :, None, None] ** distance[:, None]).mean(0)
        m = m * mask.alpha[:, None, None]
        logits = q @ k.transpose(-2, -1) * (c // 3) ** -0.5
        if strategy == "mul_v1":
            weights = (logits * m).softmax(-1)
        elif strategy == "add_v1":
            weights = (logits + m).softmax(-1)
        elif strategy == "mul_v2":
            weights = (logits * (1 + m)).softmax(-1)
        elif strategy == "mul_after_sm":
            weights = logits.softmax(-1) * m
        else:
            weights = logits.softmax(-1) + m
        y = (weights @ v).transpose(1, 2).reshape(b, n, c)
        tokens = tokens + block.attn.proj(y)
        tokens = tokens + block.mlp(block.norm2(tokens))
    return model.head(model.norm(tokens)[:, 0])


@pytest.mark.parametrize("strategy", ["mul_v1", "mul_v2", "add_v1", "mul_after_sm", "add_after_sm"])
def test_plugged_model_computes_the_formula_on_any_grid(strategy):
    model = violin.plug(build("dynamic"), init="none", strategy=strategy).eval()
    masks = [mask for _, mask in violin.masks(model)]
    for size in ((32, 32), (48, 24), (24, 48)):  # equally many patches in two shapes
        x = images(size)
        with torch.no_grad():
            expected = plain(model, masks, x, (size[0] // 8, size[1] // 8), strategy)
        torch.testing.assert_close(run(model, x), expected, rtol=1e-4, atol=1e-5)


def test_gradients_of_a_plugged_model_agree_with_the_formula():
    model = violin.plug(build("dynamic"), init="none").double().train()
    masks, x = [mask for _, mask in violin.masks(model)], images((32, 24)).double()
    model(x).square().sum().backward()
    ours = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    plain(model, masks, x, (4, 3), "mul_v1").square().sum().backward()
    for a, p in zip(ours, model.parameters()):
        torch.testing.assert_close(
            a, p.grad, rtol=1e-4, atol=1e-6 * p.grad.abs().max().item()
        )  # the formula's mask is float32


def test_only_chosen_blocks_and_heads():
    model = violin.plug(build("vit"), init="spread", blocks=[1], heads=[0, 2])
    ((name, mask),) = violin.masks(model)
    assert name == "blocks.1.attn.violin" and mask.masked_heads == (0, 2)
    assert type(model.blocks[0].attn).__module__.startswith("timm")
    violin.unplug(model)
    for options, message in [({"blocks": [2]}, "from 0 to 1"), ({"heads": [3]}, "from 0 to 2")]:
        with pytest.raises(violin.Error, match=message):
            violin.plug(model, **options)
    assert not violin.is_plugged(model)


def test_first_step_moves_the_mask_and_only_training_builds_gradients():
    model = violin.plug(build("average"))
    groups = violin.param_groups(model, lr=1e-3, mask_lr_factor=10)
    assert groups[2]["weight_decay"] == 0 and groups[2]["lr"] == pytest.approx(1e-2)
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    optimiser = torch.optim.AdamW(groups)
    F.cross_entropy(model(images((32, 32))), torch.tensor([0, 1])).backward()
    optimiser.step()
    for _, mask in violin.masks(model):
        assert mask.rate.detach().abs().max() > 0


def test_own_grid_is_asked_for_where_the_model_has_none(timm):
    from timm.models.vision_transformer import VisionTransformer

    model = VisionTransformer(
        img_size=32, patch_size=8, embed_dim=24, depth=1, num_heads=3, pos_embed="none", dynamic_img_size=True
    )
    model.patch_embed.img_size = model.patch_embed.grid_size = None
    with pytest.raises(violin.Error, match=r"patch_embed \(PatchEmbed\) has no image size; give plug\(grid="):
        violin.plug(model)
    violin.plug(model, grid=(4, 4))
    assert next(violin.masks(model))[1].grid == (4, 4)
    run(model, images((16, 40)))


def test_copies_know_their_own_grids():
    model = violin.plug(build("dynamic"), init="spread").eval()
    other = copy.deepcopy(model)
    a, b = images((48, 24)), images((24, 48))
    expected = run(model, a)
    run(other, b)
    assert other._violin.grids.grid == (3, 6) and model._violin.grids.grid == (6, 3)
    assert torch.equal(run(model, a), expected) and torch.equal(run(other, a), expected)
    violin.unplug(other)
    assert violin.is_plugged(model) and not violin.is_plugged(other)
    assert torch.equal(run(pickle.loads(pickle.dumps(model)), a), expected)


def test_a_transformer_inside_a_model_is_found():
    class Detector(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone, self.head = build("torchvision"), nn.Linear(5, 2)

        def forward(self, x):
            return self.head(self.backbone(x))

    model = Detector().eval()
    x = images((32, 32))
    expected = run(model, x)
    violin.plug(model)
    name, _ = next(violin.masks(model))
    assert name == "backbone.encoder.layers.encoder_layer_0.self_attention.violin"
    torch.testing.assert_close(run(model, x), expected)


def test_chunks_of_blocks_are_flattened():
    model = build("dino")
    model.blocks = nn.ModuleList([nn.ModuleList([model.blocks[0]]), nn.ModuleList([nn.Identity(), model.blocks[1]])])
    violin.plug(model)
    assert [name for name, _ in violin.masks(model)] == ["blocks.0.0.attn.violin", "blocks.1.1.attn.violin"]


def test_attention_dropout_is_applied_and_scales():
    model = build("torchvision")
    for layer in model.encoder.layers:
        layer.self_attention.dropout = 0.5
    violin.plug(model)
    x = images((32, 32))
    assert not torch.equal(model.train()(x), model(x))
    assert torch.equal(model.eval()(x), model(x))


def test_attention_masks_of_timm_are_kept(timm):
    model = build("vit").eval()
    x = images((32, 32))
    keep = torch.rand(2, 1, 17, 17) > 0.3
    keep[..., 0] = True
    with torch.no_grad():
        expected = [model(x, attn_mask=keep), model(x, attn_mask=keep[0, 0]), model(x, is_causal=True)]
        violin.plug(model)
        actual = [model(x, attn_mask=keep), model(x, attn_mask=keep[0, 0]), model(x, is_causal=True)]
    for a, b in zip(actual, expected):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_drop_in_for_timm_attention(timm):
    from timm.models.vision_transformer import VisionTransformer

    class MaskedAttention(violin.Attention):
        def __init__(self, *args, depth=0, **options):
            super().__init__(*args, **options, mask={"init": "identity"}, grid=(4, 4))

    options = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
    model, vanilla = (
        VisionTransformer(**options, attn_layer=MaskedAttention).eval(),
        VisionTransformer(**options).eval(),
    )
    vanilla.load_state_dict({k: v for k, v in model.state_dict().items() if ".violin." not in k})
    x = images((32, 32))
    torch.testing.assert_close(run(model, x), run(vanilla, x), rtol=1e-5, atol=1e-6)
    with pytest.raises(violin.Error, match="divisor of dim"):
        violin.Attention(10, 3)


@pytest.mark.parametrize("name", ["deit", "gap_fc_norm", "deit3", "no_qkv_bias", "reg4", "distilled"])
def test_plugged_timm_models_give_the_golden_logits(name, golden, timm):
    from timm.models.deit import VisionTransformerDistilled
    from timm.models.vision_transformer import VisionTransformer

    index = json.loads((golden / "models" / "index.json").read_text())["models"]
    entry = next(entry for entry in index if entry["name"] == name)
    kind = VisionTransformerDistilled if entry["kind"] == "vit_distilled" else VisionTransformer
    model = violin.plug(kind(**entry["config"])).eval()
    violin.load_state(model, golden / "models" / entry["weights"], strict=False)
    data, _ = load_file(golden / "models" / entry["golden"])
    torch.testing.assert_close(run(model, data["image"]), data["logits"], rtol=1e-4, atol=1e-5)


def test_defaults_of_torch_do_not_matter():
    expected = [p.detach() for p in violin.mask_parameters(violin.plug(build("torchvision"), init="pretrain", seed=1))]
    model = build("torchvision")
    try:
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"):
            violin.plug(model, init="pretrain", seed=1)
    finally:
        torch.set_default_dtype(torch.float32)
    for a, b in zip(violin.mask_parameters(model), expected):
        assert torch.equal(a, b)
    run(model, images((32, 32)))


@pytest.mark.parametrize("init", ["identity", "pretrain"])
def test_plugging_adds_no_buffers_that_processes_would_send_in_every_call(init, timm):
    model = build("vit")
    assert not list(model.buffers())  # so that one process may evaluate a DistributedDataParallel model alone
    violin.plug(model, init=init, heads=[0, 2])
    assert not list(model.buffers())
    run(model, images((32, 32)))
    assert not list(model.buffers())


@pytest.mark.parametrize("name", ["vit", "dino"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_layers_are_checked_in_their_own_precision_under_autocast(name, dtype):
    x = images((32, 32))
    with torch.autocast("cpu", dtype=dtype):
        vanilla = violin.attention_maps(build(name), x)[1]  # checks its layers too
        assert vanilla.dtype == torch.float32
        assert violin.is_plugged(violin.plug(build(name)))


def test_groups_keep_their_rates_in_optimisers_of_timm(timm):
    from timm.optim import create_optimizer_v2

    model = violin.plug(build("vit"), init="spread")
    groups = violin.param_groups(model, lr=1e-3, weight_decay=0.1, mask_lr_factor=10)
    optimiser = create_optimizer_v2(groups, opt="adamw", lr=1.0, weight_decay=0.5)
    of = {id(p): (g["lr"], g["weight_decay"]) for g in optimiser.param_groups for p in g["params"]}
    assert {of[id(parameter)] for parameter in violin.mask_parameters(model)} == {(1e-2, 0.0)}
    assert of[id(model.head.weight)] == (1e-3, 0.1) and of[id(model.head.bias)] == (1e-3, 0.0)
    assert len(of) == len(list(model.parameters()))


def test_plugging_does_not_disturb_random_numbers():
    torch.manual_seed(5)
    expected = torch.rand(3)
    model = build("vit")
    torch.manual_seed(5)
    violin.plug(model)
    assert torch.equal(torch.rand(3), expected)


def test_threads_have_their_own_grids():
    model = violin.plug(build("dynamic"), init="spread").eval()
    inputs = [images(size) for size in ((48, 24), (24, 48), (16, 32), (32, 16))]
    expected = [run(model, x) for x in inputs]
    model.eval()
    wrong = []

    def work(index):
        for n in range(40):
            try:
                if not torch.equal(run(model, inputs[index]), expected[index]):
                    wrong.append((index, n))
            except Exception as error:
                wrong.append(error)
            if n % 8 == index:
                model.blocks[0].attn.violin.drop_tables()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(index,)) for index in range(len(inputs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong


@pytest.mark.parametrize("name", ["vit", "torchvision"])
def test_hooks_of_the_user_go_on(name):
    model = build(name).eval()
    layer = model.encoder.layers.encoder_layer_0.self_attention if name == "torchvision" else model.blocks[0].attn
    calls = []
    handle = layer.register_forward_hook(lambda *_: calls.append(1))
    violin.plug(model)
    assert not calls
    run(model, images((32, 32)))
    assert len(calls) == 1
    violin.unplug(model)
    run(model, images((32, 32)))
    assert len(calls) == 2
    handle.remove()
    run(model, images((32, 32)))
    assert len(calls) == 2


def test_nothing_chosen_is_not_everything():
    with pytest.raises(violin.Error, match=r"blocks is \[\]"):
        violin.plug(build("vit"), blocks=[])
    with pytest.raises(violin.Error, match=r"heads is \[\]"):
        violin.plug(build("vit"), heads=[])


def test_freezing_a_padded_grid():
    model = violin.plug(build("padded"), init="spread").eval()
    x = images((45, 20))
    expected = run(model, x)
    violin.freeze(model, (45, 20))
    mask = model.blocks[0].attn.violin
    mask.drop_tables()
    torch.testing.assert_close(run(model, x), expected)
    assert mask.kept_tables == 0  # the frozen ones were used


def test_freezing_asks_the_patch_embedding_for_its_grid(timm):
    model = TorchvisionTransformer()  # as its conv_stem_configs make it
    model.conv_proj = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 24, 4, 4))
    violin.plug(model, init="spread").train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    violin.freeze(model, 32)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert list(model.encoder.layers[0].self_attention.violin._frozen) == [(4, 4, 1)]

    from timm.models.vision_transformer import VisionTransformer
    from timm.models.vision_transformer_hybrid import HybridEmbed

    backbone = nn.Sequential(nn.Conv2d(3, 8, 4, 4))
    backbone.num_features = 8
    embed = partial(HybridEmbed, backbone, feature_size=(8, 8), feature_ratio=4)
    model = violin.plug(VisionTransformer(**{**TINY, "patch_size": 2}, embed_layer=embed)).eval()
    assert run(violin.freeze(model, 32), images((32, 32))).shape == (2, 5)
    assert list(model.blocks[0].attn.violin._frozen) == [(4, 4, 1)]


def test_numbers_of_numpy_are_numbers():
    numpy = pytest.importorskip("numpy")
    ours, theirs = (violin.plug(build("torchvision"), init="none", seed=seed) for seed in (3, numpy.int64(3)))
    for one, other in zip(violin.mask_parameters(ours), violin.mask_parameters(theirs)):
        assert torch.equal(one, other)
    model = violin.plug(build("torchvision"), init="none", decay=numpy.float32(0.5), seed=3)
    assert json.dumps(violin.model_config(model)["violin"]["decay"]) == "0.5"
    for seed in (True, 3.0, "3"):
        with pytest.raises(violin.Error, match=f"seed is {seed!r}; expected a whole number"):
            violin.plug(build("torchvision"), seed=seed)


def test_newer_settings_of_tf32_are_understood(monkeypatch):
    from violin import plugging

    class Mixed:
        @property
        def allow_tf32(self):
            raise RuntimeError("mix of the legacy and new APIs")

    monkeypatch.setattr(torch.backends.cuda, "matmul", Mixed())
    assert plugging._products_are_coarse()


@pytest.mark.parametrize("family", ["vit", "dino"])
def test_plugged_on_the_meta_device(family):
    heads = [0, 2] if family == "vit" else [1]
    reference = violin.plug(build(family), init="spread", heads=heads).eval()
    x = images((32, 32))
    expected = run(reference, x)
    for assign in (False, True):
        with torch.device("meta"):
            model = build(family)
        violin.plug(model, init="spread", heads=heads)
        if not assign:
            model.to_empty(device="cpu")
        model.load_state_dict(reference.state_dict(), assign=assign)
        torch.testing.assert_close(run(model.eval(), x), expected)


@pytest.mark.parametrize("strategy", violin.ops.STRATEGIES)
def test_shapes_are_known_on_the_meta_device(strategy):
    with torch.device("meta"):
        model, x = violin.plug(build("dino"), init="spread", strategy=strategy), torch.empty(2, 3, 24, 32)
        assert model(x).shape == (2, 24)
        assert model.get_last_selfattention(x).shape == (2, 2, 49, 49)
        assert violin.attention_maps(model, x)[1].shape == (2, 2, 1, 49)


def test_blocks_and_heads_may_come_from_any_iterable():
    model = violin.plug(build("vit"), blocks=(i for i in (1,)), heads={2, 0})
    ((name, mask),) = violin.masks(model)
    assert name == "blocks.1.attn.violin" and mask.masked_heads == (0, 2)


def test_masks_that_a_model_was_built_with_are_not_plugged_ones():
    model = violin.plug(build("vit"), blocks=[0])
    model.blocks[1].attn = violin.Attention(24, 3, qkv_bias=True, mask={}, grid=(4, 4))
    for function in (violin.plug, violin.unplug):
        with pytest.raises(violin.Error, match=r"blocks\.1\.attn \(Attention\) was built with a mask.*violin to None"):
            function(model)
    assert len(list(violin.masks(model))) == 2
    model.blocks[1].attn.violin = None  # as the message says
    assert not violin.is_plugged(violin.unplug(model))
    violin.plug(model)


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


@pytest.mark.parametrize("name", ["in_proj_weight", "in_proj_bias"])
def test_parametrised_projections_are_not_taken_for_constants(name):
    model, x = build("torchvision").eval(), images((32, 32))
    layer = model.encoder.layers[1].self_attention
    parametrize.register_parametrization(layer, name, Doubled())
    with pytest.raises(violin.Error, match=rf"encoder_layer_1\.self_attention .*parametrised {name}; plug the model first"):
        violin.plug(model)
    assert violin.attention_maps(model, x)[1].shape == (2, 3, 1, 17)
    parametrize.remove_parametrizations(layer, name)
    layer = violin.plug(model).encoder.layers[1].self_attention
    parametrize.register_parametrization(layer, name, Doubled())
    expected = run(model, x)
    with pytest.raises(violin.Error, match=r"encoder_layer_1\.self_attention .*remove_parametrizations first"):
        violin.unplug(model)
    assert torch.equal(run(model, x), expected)
    parametrize.remove_parametrizations(layer, name)
    torch.testing.assert_close(run(violin.unplug(model), x), expected)
