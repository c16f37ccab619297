"""Several things one after another, or at once: grids in one graph, replaced parts, modes that a call is made in."""

import copy
import gc
import pickle

import pytest
import torch
from models import build, images, run
from standins import EncoderBlock
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, stack_module_state, vmap
from torch.utils.checkpoint import checkpoint

import violin


def gradients(function, model, *inputs):
    model.zero_grad(set_to_none=True)
    out = function(*inputs)
    out.square().sum().backward()
    return [out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def close(actual, expected, rtol=1e-3):
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected):
        torch.testing.assert_close(a, b, rtol=rtol, atol=1e-4 * max(b.abs().max().item(), 1e-2))


# -- several grids in one compiled graph -------------------------------------------------------------------------------


class TwoViews(nn.Module):
    def __init__(self):
        super().__init__()
        self.vit = violin.plug(build("dynamic"), init="spread")

    def forward(self, one, other):
        return self.vit(one) - self.vit(other)


class TwoTowers(nn.Module):
    """With other grids, or with other curves on one."""

    def __init__(self, other, **options):
        super().__init__()
        self.one = violin.plug(build("vit"), init="spread")
        self.other = violin.plug(build(other), init="spread", **options)

    def forward(self, one, other):
        return self.one(one).sum(1, keepdim=True) + self.other(other)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_views_of_two_shapes_compile_into_one_graph(backend, timm):
    torch._dynamo.reset()
    model, sizes = TwoViews(), ((16, 64), (64, 16))
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    inputs = [images(size) for size in sizes]
    close(gradients(compiled, model, *inputs), gradients(model, model, *inputs))
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(compiled(*inputs), model(*inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{"other": "dino"}, {"other": "vit", "curves": "normal"}], ids=["grids", "curves"])
def test_two_towers_compile_into_one_graph(options, timm):
    torch._dynamo.reset()
    model, x = TwoTowers(**options), images((32, 32))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    close(gradients(compiled, model, x, x), gradients(model, model, x, x))


# -- multi-head attention that is not torch's own ----------------------------------------------------------------------


class Biased(nn.MultiheadAttention):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.table = nn.Parameter(torch.randn(17, 17))


class Shifted(nn.MultiheadAttention):
    def forward(self, query, key, value, **options):
        out, weights = super().forward(query, key, value, **options)
        return out + query, weights


class Renamed(nn.MultiheadAttention):
    pass


def with_attention(kind):
    model = build("torchvision").eval()
    model.encoder.layers[1].self_attention = kind(24, 3, batch_first=True)
    return model


@pytest.mark.parametrize(("kind", "reason"), [(Biased, "does not know: table"), (Shifted, "a forward of its own")])
def test_multihead_attention_of_another_kind_is_refused(kind, reason):
    model = with_attention(kind)
    for function in (violin.plug, lambda model: violin.attention_maps(model, images((32, 32)))):
        with pytest.raises(violin.Error, match=rf"encoder_layer_1\.self_attention \({kind.__name__}\).*{reason}"):
            function(model)
    assert not violin.is_plugged(model)


def test_a_forward_given_to_one_layer_is_not_dropped():
    model = with_attention(nn.MultiheadAttention)
    layer = model.encoder.layers[1].self_attention
    layer.forward = lambda *args, inner=layer.forward, **options: inner(*args, **options)
    with pytest.raises(violin.Error, match=r"encoder_layer_1\.self_attention .* a forward of its own"):
        violin.plug(model)


def test_multihead_attention_of_another_name_is_plugged():
    model, x = with_attention(Renamed), images((32, 32))
    expected = run(model, x)
    torch.testing.assert_close(run(violin.plug(model), x), expected, rtol=1e-5, atol=1e-6)


# -- a patch embedding that is replaced --------------------------------------------------------------------------------


def replaced(model):
    """The same projection in another module."""
    conv = nn.Conv2d(3, 24, 8, 8)
    conv.load_state_dict(model.patch_embed.proj.state_dict())
    model.patch_embed.proj = conv
    return model


def test_a_replaced_projection_tells_the_grid(timm):
    model, x = violin.plug(build("dynamic"), init="spread").eval(), images((16, 64))
    expected = run(model, x)
    run(model, images((32, 32)))  # equally many patches
    for other in (replaced(copy.deepcopy(model)), replaced(pickle.loads(pickle.dumps(model)))):
        assert torch.equal(run(other, x), expected)
        run(other, images((32, 32)))
        replaced(other)
        assert torch.equal(run(other, x), expected)
        assert torch.equal(run(nn.DataParallel(other), x), expected)
        violin.unplug(other)
        assert not any(module._forward_hooks for module in other.modules())


def test_a_replaced_convolution_of_torchvision_tells_the_grid():
    model, x = build("torchvision").eval(), images((32, 32))
    violin.plug(model, init="spread")
    model.conv_proj = nn.Conv2d(3, 24, (4, 16), (4, 16))  # 8x2 patches
    run(model, x)
    assert model._violin.grids.grid == (8, 2)


def test_a_new_patch_size_is_followed(timm):
    x = images((32, 32))
    for patch in ((4, 16), 4):
        after, before = violin.plug(build("vit"), init="spread").eval(), build("vit").eval()
        after.set_input_size(patch_size=patch)
        before.set_input_size(patch_size=patch)
        violin.plug(before, init="spread").load_state_dict(after.state_dict())
        assert torch.equal(run(after, x), run(before, x))


def test_features_of_a_replaced_patch_embedding_are_not_those_of_an_earlier_grid(timm):
    from timm.layers import PatchEmbed

    model, x = violin.plug(build("dynamic"), init="spread").eval(), images((16, 64))
    expected = model.forward_features(x)
    run(model, images((32, 32)))
    embed = PatchEmbed(None, 8, 3, 24, flatten=False, output_fmt="NHWC")
    embed.load_state_dict(model.patch_embed.state_dict())
    for replace in (replaced, lambda model: setattr(model, "patch_embed", embed)):
        replace(model)
        with pytest.raises(violin.Error, match=r"blocks\.0\.attn: the patch embedding was replaced after plug\(\)"):
            model.forward_features(x)
        run(model, images((32, 32)))  # as the message says
        assert torch.equal(model.forward_features(x), expected)


def test_a_grid_may_be_given_where_a_patch_embedding_cannot_tell_it(timm):
    class Patches(nn.Module):
        grid_size = (4, 4)

        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return nn.functional.conv2d(x, self.inner.weight, self.inner.bias, 8).permute(0, 2, 3, 1)

    model, x = violin.plug(build("dynamic"), init="spread").eval(), images((16, 64))
    expected = run(model, x)
    model.patch_embed = Patches(model.patch_embed.proj)
    with pytest.raises(violin.Error, match=r"give set_grid\(height, width\)"):
        run(model, x)
    model.blocks[0].attn.set_grid(2, 8)
    assert torch.equal(run(model, x), expected)


def test_a_wrapped_projection_goes_on_telling_the_grid(timm):
    model, x = violin.plug(build("dynamic"), init="spread").eval(), images((16, 64))
    expected = model.forward_features(x)
    run(model, images((32, 32)))
    model.patch_embed.proj = nn.Sequential(model.patch_embed.proj)
    assert torch.equal(model.forward_features(x), expected)


def test_compiled_code_sees_a_replaced_projection(timm):
    torch._dynamo.reset()
    model, x = nn.Sequential(violin.plug(build("dynamic"), init="spread")).eval(), images((16, 64))
    expected = run(model, x)
    run(model, images((32, 32)))
    replaced(model[0])
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(run(compiled, x), expected, rtol=1e-4, atol=1e-5)


def test_compiled_features_of_a_replaced_projection_are_refused(timm):
    torch._dynamo.reset()
    model = violin.plug(build("dynamic"), init="spread").eval()
    replaced(model)
    with pytest.raises(violin.Error, match="the patch embedding was replaced"):
        torch.compile(model.forward_features, backend="eager")(images((16, 64)))


# -- modes and transformations -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("frozen", [False, True])
def test_tables_made_within_a_mode_are_ordinary_ones(frozen):
    model, x = violin.plug(build("torchvision"), init="spread").eval(), images((32, 32))
    expected = run(model, x)
    model.eval()  # forgets tables
    with FakeTensorMode(allow_non_fake_inputs=True):
        violin.freeze(model) if frozen else run(model, x)
    assert type(run(model, x)) is torch.Tensor
    torch.testing.assert_close(run(model, x), expected)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_an_ensemble_under_vmap_gives_the_outputs_of_its_models(training):
    x = images((32, 32))
    models = [violin.plug(build("torchvision"), init="none").train(training) for _ in range(2)]
    base = copy.deepcopy(models[0])
    with torch.no_grad():
        outputs = vmap(lambda *state: functional_call(base, state, (x,)))(*stack_module_state(models))
    for actual, model in zip(outputs, models):
        torch.testing.assert_close(actual, run(model, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("decay", [None, 0.5])
def test_new_initial_values_of_a_frozen_mask_are_used(decay):
    model, x = violin.plug(build("torchvision"), init="none", decay=decay).eval(), images((32, 32))
    violin.freeze(model)
    before = run(model, x)
    for _, mask in violin.masks(model):
        mask.initialise(seed=3)
    after = run(model, x)
    assert not torch.allclose(before, after)
    violin.thaw(model)
    torch.testing.assert_close(run(model, x), after)
    violin.freeze(model)
    for _, mask in violin.masks(model):
        mask.reset_parameters()
    assert not torch.allclose(run(model, x), after)


# -- returned maps -----------------------------------------------------------------------------------------------------


class Watched(EncoderBlock):
    """Keeps its attention map."""

    def forward(self, x):
        y = self.ln_1(x)
        y, self.map = self.self_attention(y, y, y, average_attn_weights=False)
        x = x + y
        return x + self.mlp(self.ln_2(x))


def watched(dropout=0.0):
    model = build("torchvision")
    for block in model.encoder.layers:
        block.__class__, block.self_attention.dropout = Watched, dropout
    return model


def map_of(model, x):
    model(x)
    return model.encoder.layers[1].map


@pytest.mark.parametrize("strategy", ["mul_v1", "add_v1", "mul_after_sm", "add_after_sm", "log"])
def test_returned_maps_have_gradients(strategy):
    model, x = violin.plug(watched(), init="spread", strategy=strategy).double(), images((32, 32)).double()
    with torch.no_grad():
        torch.testing.assert_close(map_of(model, x), map_of(model.eval(), x))
    torch.testing.assert_close(map_of(model, x).detach(), run(lambda x: map_of(model, x), x))
    layer = model.encoder.layers[0].self_attention
    parameters = [layer.in_proj_weight, *layer.violin.parameters()]
    found = torch.autograd.grad(map_of(model, x).square().sum(), parameters)
    for parameter, gradient in zip(parameters, found):
        index = gradient.abs().argmax()
        ends = []
        for step in (1e-5, -1e-5):
            with torch.no_grad():
                parameter.view(-1)[index] += step
                ends.append(map_of(model, x).square().sum())
                parameter.view(-1)[index] -= step
        torch.testing.assert_close(gradient.flatten()[index], (ends[0] - ends[1]) / 2e-5, rtol=1e-4, atol=1e-8)


def test_returned_maps_have_the_gradients_of_the_original():
    for model, function in (
        (watched(), map_of),
        (build("dino"), lambda model, x: model.get_last_selfattention(x)),
    ):
        x, parameters = images((32, 32)), list(model.parameters())
        expected = torch.autograd.grad(function(model, x).square().sum(), parameters, allow_unused=True)
        violin.plug(model)
        actual = torch.autograd.grad(function(model, x).square().sum(), parameters, allow_unused=True)
        assert [a is None for a in actual] == [b is None for b in expected]
        close([a for a in actual if a is not None], [b for b in expected if b is not None])


def test_returned_maps_are_those_that_dropout_leaves():
    model, x = watched(dropout=0.5).train(), images((32, 32))

    def outcome():
        torch.manual_seed(1)
        return model(x).detach(), map_of(model, x).detach()

    expected = outcome()
    assert (expected[1] == 0).any()
    violin.plug(model)
    close(outcome(), expected)
    model.eval()
    assert (map_of(model, x) > 0).all()


def test_returned_maps_under_autocast_are_in_full_precision():
    model, x = violin.plug(watched(), init="spread"), images((32, 32))
    with torch.autocast("cpu", torch.bfloat16):
        weights = map_of(model, x)
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 17))
    torch.autograd.grad(weights.square().sum(), model.encoder.layers[1].self_attention.in_proj_weight)


# -- activation checkpointing of what has no gradient before the blocks ------------------------------------------------


def only_masks(model):
    model.requires_grad_(False)
    for parameter in violin.mask_parameters(model):
        parameter.requires_grad_(True)
    return model


def only_the_last_mlp(model):
    model.requires_grad_(False)
    model.blocks[-1].mlp.requires_grad_(True)
    return model


@pytest.mark.parametrize("trained", [only_masks, only_the_last_mlp])
@pytest.mark.parametrize("whole", [False, True])
def test_checkpointing_without_the_norm_forgets_shapes_of_calls_that_are_over(trained, whole, timm):
    model = trained(violin.plug(build("dynamic"), init="spread"))
    sizes = ((16, 64), (64, 16))

    def blocks(x, again=True):
        tokens = model._pos_embed(model.patch_embed(x))
        for part in [model.blocks] if whole else model.blocks:
            tokens = checkpoint(part, tokens, use_reentrant=False) if again else part(tokens)
        return tokens

    for size in sizes * 2:
        x = images(size)
        close(gradients(blocks, model, x), gradients(lambda x: blocks(x, again=False), model, x), rtol=1e-5)
    model.eval()
    blocks(images(sizes[0]), again=False)  # with gradients, and without a backward pass
    gc.collect()
    gradients(blocks, model, images(sizes[1]))
    kept = blocks(images(sizes[0]))
    with pytest.raises(violin.Error, match="activation checkpointing cannot tell"):
        gradients(blocks, model, images(sizes[1]))
    del kept
    pickle.dumps(model)


def test_calls_without_any_gradient_are_forgotten(timm):
    model = violin.plug(build("dynamic"), init="spread").requires_grad_(False)
    for size in ((16, 64), (64, 16)):
        model.blocks(model._pos_embed(model.patch_embed(images(size))))
    gc.collect()
    assert not model._violin.grids._untracked and len(model._violin.grids._calls) <= 1


# -- messages ----------------------------------------------------------------------------------------------------------


def test_a_part_of_a_model_is_told_to_be_one(timm):
    model = build("vit")
    for part in (model.blocks[0], model.blocks, model.blocks[0].attn, violin.plug(build("vit")).blocks[0]):
        with pytest.raises(violin.Error, match="no vision transformer.*; give the whole model: its patch embedding"):
            violin.plug(part)


def test_a_whole_model_with_patches_in_another_place_is_not_told_to_be_a_part(timm):
    from timm.models.naflexvit import NaFlexVit, NaFlexVitCfg
    from timm.models.pit import PoolingVisionTransformer

    options = {"patch_size": 8, "embed_dim": 24, "depth": 1, "num_heads": 3}
    naflex = NaFlexVit(NaFlexVitCfg(**options))  # patches of any image come in one long list
    pooling = PoolingVisionTransformer(32, 8, 4, depth=(1,), base_dims=(8,), heads=(3,), stem_type="overlap")
    for model, name in ((naflex, r"blocks\.0\.attn"), (pooling, r"transformers\.0\.blocks\.0\.attn")):
        with pytest.raises(violin.Error, match=rf"no vision transformer.*; {name} \(Attention\) could be plugged, but the model makes its patches"):
            violin.plug(model)


def test_attention_that_cannot_be_plugged_comes_before_a_missing_grid(timm):
    class Odd(type(build("vit").blocks[0].attn)):
        def forward(self, x, attn_mask=None, is_causal=False):
            batch, height, width, channels = x.shape
            return super().forward(x.flatten(1, 2)).view(batch, height, width, channels)

    model = build("vit")
    model.patch_embed.img_size = model.patch_embed.grid_size = None
    model.blocks[1].attn = Odd(24, 3)
    with pytest.raises(violin.Error, match=r"blocks\.1\.attn \(Odd\) cannot be plugged: run on five tokens it failed"):
        violin.plug(model)


@pytest.mark.parametrize("copied", [False, True])
def test_compiled_models_see_a_projection_that_was_replaced_before_or_between(copied, timm):
    """On the models themselves, one after the other in a process: what was traced for one may serve another."""
    x = torch.randn(2, 3, 16, 64)
    for compiled_before in (False, True):
        model = violin.plug(build("dynamic"), init="spread").eval()
        model = copy.deepcopy(model) if copied else model
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        if compiled_before:
            compiled(x)
        old = model.patch_embed.proj
        model.patch_embed.proj = nn.Conv2d(3, old.out_channels, old.kernel_size, old.stride)
        wanted = copy.deepcopy(model)(x)
        torch.testing.assert_close(compiled(x), wanted)
