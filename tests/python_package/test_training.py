"""What training does to a model: torch.compile, export, autocast, checkpointing, several processes."""


import pytest
import torch
from models import build
from processes import run_in_group
from torch.utils.checkpoint import checkpoint

import violin


def gradients(function, model, *inputs):
    model.zero_grad(set_to_none=True)
    loss = sum(function(x).square().sum() for x in inputs)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def close(actual, expected, rtol=1e-3):
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected):
        torch.testing.assert_close(a, b, rtol=rtol, atol=1e-4 * max(b.abs().max().item(), 1e-2))


@pytest.mark.parametrize(
    ("name", "backend"), [("dynamic", "inductor"), ("torchvision", "aot_eager"), ("dino", "aot_eager")]
)
def test_compile_in_one_graph(name, backend):
    torch._dynamo.reset()
    model = violin.plug(build(name), init="spread")
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    x = torch.randn(2, 3, 32, 32)
    close(gradients(compiled, model, x), gradients(model, model, x))
    if name == "dynamic":  # another grid, then again the first
        for size in ((48, 24), (32, 32)):
            y = torch.randn(2, 3, *size)
            close(gradients(compiled, model, y), gradients(model, model, y))


def test_compiled_evaluation_sees_new_parameters_unless_frozen():
    torch._dynamo.reset()
    model = violin.plug(build("vit"), init="spread").eval()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 3, 32, 32)

    @torch.no_grad()
    def check():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
        return model(x)

    before = check()
    with torch.no_grad():
        for parameter in violin.mask_parameters(model):
            parameter.mul_(1.5)
    after = check()
    assert not torch.allclose(before, after)
    violin.freeze(compiled)
    torch.testing.assert_close(check(), after, rtol=1e-4, atol=1e-5)
    names = [str(node.target) for node in torch.export.export(model, (x,)).graph.nodes]
    assert not any("decay_mask" in name for name in names) and any("attention_qkv" in name for name in names)
    violin.thaw(compiled)
    assert all(parameter.requires_grad for parameter in violin.mask_parameters(model))


@pytest.mark.parametrize("name", ["registers", "torchvision"])
def test_export_with_a_dynamic_batch(name, tmp_path):
    model = violin.plug(build(name), init="spread").eval()
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(model, (torch.randn(3, 3, 32, 32),), dynamic_shapes=({0: batch},))
    torch.export.save(program, tmp_path / "m.pt2")
    x = torch.randn(5, 3, 32, 32)
    torch.testing.assert_close(torch.export.load(tmp_path / "m.pt2").module()(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strategy", ["mul_v1", "add_after_sm"])
def test_autocast_computes_in_16_bits_and_keeps_the_mask_in_full(strategy):
    model = violin.plug(build("vit"), init="spread", strategy=strategy)
    x = torch.randn(2, 3, 32, 32)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x)
        maps = violin.attention_maps(model, x, 0)
    assert out.dtype == torch.bfloat16 and maps[0].dtype == torch.float32
    torch.testing.assert_close(out.float(), model(x), rtol=0.1, atol=0.1)
    out.float().square().sum().backward()
    for parameter in violin.mask_parameters(model)[:2]:
        assert parameter.grad.dtype == torch.float32 and parameter.grad.abs().max() > 0
    for parameter in violin.mask_parameters(model):
        assert parameter.grad.isfinite().all()


def test_16_bit_models_work():
    model = violin.plug(build("vit").bfloat16(), init="spread")
    assert model.blocks[0].attn.violin.beta.dtype == torch.float32
    model(torch.randn(2, 3, 32, 32).bfloat16()).float().sum().backward()


def test_checkpointing_gives_the_same_gradients_for_several_crops(timm):
    model = violin.plug(build("dynamic"), init="spread")
    crops = [torch.randn(2, 3, 32, 32), torch.randn(2, 3, 48, 24), torch.randn(2, 3, 16, 16)]
    expected = gradients(model, model, *crops)
    model.set_grad_checkpointing()
    close(gradients(model, model, *crops), expected, rtol=1e-5)


def test_checkpointing_knows_shapes_of_equal_size_apart(timm):
    model = violin.plug(build("dynamic"), init="spread")
    one, other = torch.randn(1, 3, 48, 24), torch.randn(1, 3, 24, 48)
    steps = [(one,), (other,), (one, other), (other, one)]
    expected = [gradients(model, model, *step) for step in steps]
    model.set_grad_checkpointing()
    for step, values in zip(steps, expected):
        close(gradients(model, model, *step), values, rtol=1e-5)
    with torch.no_grad():
        model(other)
    loss = model(one).square().sum()
    with torch.no_grad():
        model(other)  # an evaluation between forward and backward
    model.zero_grad(set_to_none=True)
    loss.backward()
    close([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)], expected[0], rtol=1e-5)


def test_checkpointing_knows_shapes_apart_where_a_model_returns_two_outputs(timm):
    from timm.models.deit import VisionTransformerDistilled

    model = VisionTransformerDistilled(
        img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3, num_classes=5, dynamic_img_size=True
    )
    violin.plug(model, init="spread").train()
    model.set_distilled_training(True)
    crops = torch.randn(1, 3, 48, 24), torch.randn(1, 3, 24, 48)

    def both(x):
        return torch.cat(model(x))

    expected = gradients(both, model, *crops)
    model.set_grad_checkpointing()
    close(gradients(both, model, *crops), expected, rtol=1e-5)


def frozen_up_to_the_blocks(model, frozen):
    for part in (model.patch_embed, model.cls_token, model.pos_embed):
        part.requires_grad_(not frozen)
    return model


@pytest.mark.parametrize("frozen", [False, True])
def test_checkpointing_of_features_knows_shapes_of_equal_size_apart(frozen, timm):
    model = frozen_up_to_the_blocks(violin.plug(build("dynamic"), init="spread"), frozen)
    one, other = torch.randn(1, 3, 48, 24), torch.randn(1, 3, 24, 48)
    steps = [(one,), (other,), (one, other), (other, one), (one,)]
    expected = [gradients(model.forward_features, model, *step) for step in steps]
    model.set_grad_checkpointing()
    for step, values in zip(steps, expected):
        close(gradients(model.forward_features, model, *step), values, rtol=1e-5)
    assert not model._violin.grids._pending and not model._violin.grids._untracked


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_checkpointing_of_everything_knows_shapes_of_equal_size_apart(reentrant, nested, timm):
    model = violin.plug(build("dynamic"), init="spread")
    one, other = torch.randn(1, 3, 48, 24, requires_grad=True), torch.randn(1, 3, 24, 48, requires_grad=True)
    for function in (model, model.forward_features):
        model.set_grad_checkpointing(False)
        expected = gradients(function, model, one, other)
        model.set_grad_checkpointing(nested)
        again = gradients(lambda x: checkpoint(function, x, use_reentrant=reentrant), model, one, other)
        close(again, expected, rtol=1e-5)


@pytest.mark.parametrize("frozen", [False, True])
def test_checkpointing_without_the_norm_refuses_to_guess_between_shapes_of_equal_size(frozen, timm):
    model = frozen_up_to_the_blocks(violin.plug(build("dynamic"), init="spread"), frozen)
    one, other = torch.randn(1, 3, 48, 24), torch.randn(1, 3, 24, 48)

    def blocks(x, again=True):
        tokens = model._pos_embed(model.patch_embed(x))
        for block in model.blocks:
            tokens = checkpoint(block, tokens, use_reentrant=False) if again else block(tokens)
        return tokens

    expected = gradients(lambda x: blocks(x, again=False), model, one)
    close(gradients(blocks, model, one), expected, rtol=1e-5)
    with pytest.raises(violin.Error, match=r"blocks\.1\.attn: activation checkpointing cannot tell"):
        gradients(blocks, model, one, other)
    if not frozen:  # the graphs are gone
        close(gradients(blocks, model, one), expected, rtol=1e-5)


def test_dynamic_export_says_what_to_do(timm):
    model = violin.plug(build("dynamic"), init="spread").eval()
    sides = {2: 8 * torch.export.Dim("h", min=2, max=8), 3: 8 * torch.export.Dim("w", min=2, max=8)}
    with pytest.raises(Exception, match="export once per image size"):
        torch.export.export(model, (torch.randn(2, 3, 32, 32),), dynamic_shapes=(sides,))


def test_checkpointed_layers_of_other_models():
    model = violin.plug(build("dino"), init="spread")
    x = torch.randn(2, 3, 32, 32)
    expected = gradients(model, model, x)

    def again(x):
        tokens = model.prepare_tokens(x)
        for block in model.blocks:
            tokens = checkpoint(block, tokens, use_reentrant=False)
        return model.norm(tokens)[:, 0]

    close(gradients(again, model, x), expected, rtol=1e-5)


WORKER = """
torch.manual_seed(0)
model = violin.plug(TorchvisionTransformer(), init="spread")
x = torch.randn(4, 3, 32, 32)
target = torch.tensor([0, 1, 2, 3])
lone = copy.deepcopy(model)
torch.nn.functional.cross_entropy(lone(x), target).backward()
parallel = torch.nn.parallel.DistributedDataParallel(model)
share = slice(rank * 4 // world, (rank + 1) * 4 // world)
torch.nn.functional.cross_entropy(parallel(x[share]), target[share]).backward()
for (name, a), b in zip(model.named_parameters(), lone.parameters()):
    torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-5, msg=name)
assert len(violin.mask_parameters(parallel)) == 4
"""


@pytest.mark.parametrize("world", [1, 2])
def test_several_processes_give_the_gradients_of_one(world, tmp_path):
    run_in_group(WORKER, world, tmp_path)
