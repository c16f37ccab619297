"""Models of which the whole or a part stands inside torch.compile or torch's wrapper for activation checkpointing."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from models import build, images, run
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import violin


def compiled(module):
    return torch.compile(module, backend="eager")


def each_block(wrapper):
    def wrap(model):
        blocks = model.encoder.layers if hasattr(model, "encoder") else model.blocks
        for name, block in list(blocks.named_children()):
            setattr(blocks, name, wrapper(block))
        return model

    return wrap


def each_attention(wrapper):
    def wrap(model):
        for block in model.encoder.layers if hasattr(model, "encoder") else model.blocks:
            child = "self_attention" if hasattr(block, "self_attention") else "attn"
            setattr(block, child, wrapper(getattr(block, child)))
        return model

    return wrap


class Container(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, images):
        return self.model(images)


WRAPPERS = {
    "compiled": compiled,
    "compiled and parallel": lambda model: compiled(nn.DataParallel(model)),
    "compiled inside": lambda model: Container(compiled(model)),
    "compiled container": lambda model: compiled(Container(model)),
    "parallel container": lambda model: nn.DataParallel(Container(model)),
    "compiled blocks": each_block(compiled),
    "compiled attention": each_attention(compiled),
    "checkpointed attention": each_attention(checkpoint_wrapper),
    "checkpointed and compiled attention": each_attention(lambda layer: checkpoint_wrapper(compiled(layer))),
    "checkpointed blocks": each_block(checkpoint_wrapper),
    "checkpointed and compiled": each_block(lambda block: compiled(checkpoint_wrapper(block))),
}


@pytest.fixture(params=WRAPPERS)
def wrap(request):
    torch._dynamo.reset()
    return WRAPPERS[request.param]


@pytest.mark.parametrize("name", ["vit", "torchvision"])
def test_weights_and_maps_of_wrapped_models(name, wrap, tmp_path, timm):
    x, model = images((32, 32)), violin.plug(build(name), init="spread").eval()
    logits, maps = run(model, x), violin.attention_maps(model, x)
    wrapped = wrap(model)
    for block, rows in violin.attention_maps(wrapped, x).items():
        torch.testing.assert_close(rows, maps[block])
    violin.save(wrapped, tmp_path / "m.safetensors")
    torch.testing.assert_close(run(violin.load(tmp_path / "m.safetensors").eval(), x), logits)
    other = wrap(violin.plug(build(name), init="spread")).eval()
    violin.load_state(other, tmp_path / "m.safetensors")
    torch.testing.assert_close(run(other, x), logits)
    state = wrapped.state_dict()  # under the names of the wrappers
    last = violin.plug(build(name), init="spread").eval()
    violin.load_state(last, {key.rpartition("model.")[2]: value for key, value in state.items()})
    torch.testing.assert_close(run(last, x), logits)


@pytest.mark.parametrize("name", ["vit", "torchvision"])
def test_wrapped_models_are_unplugged(name, wrap):
    x, model = images((32, 32)), build(name).eval()
    expected = run(model, x)
    wrapped = wrap(violin.plug(model, init="none"))
    run(wrapped, x)
    names = [name for name, _ in wrapped.named_modules() if not name.endswith(".violin")]
    violin.unplug(wrapped)
    assert not violin.is_plugged(model) and not violin.is_plugged(wrapped)
    assert [name for name, _ in wrapped.named_modules()] == names  # wrappers are still there
    torch.testing.assert_close(run(wrapped, x), expected)


@pytest.mark.parametrize("name", ["vit", "torchvision"])
def test_wrapped_models_are_not_plugged(name, wrap):
    wrapped = wrap(build(name))
    with pytest.raises(violin.Error, match=r"is inside of \w+ already; plug the model first"):
        violin.plug(wrapped)
    assert not violin.is_plugged(wrapped)


@pytest.mark.parametrize("name", ["vit", "torchvision"])
def test_models_whose_blocks_are_wrapped_together(name, timm):
    torch._dynamo.reset()
    x, model = images((32, 32)), build(name).eval()
    parent, child = (model.encoder, "layers") if name == "torchvision" else (model, "blocks")
    blocks = getattr(parent, child)
    setattr(parent, child, compiled(blocks))
    with pytest.raises(violin.Error, match=rf"{child} is inside of OptimizedModule already; plug the model first"):
        violin.plug(model)
    setattr(parent, child, blocks)
    expected = violin.attention_maps(violin.plug(model, init="spread"), x)
    setattr(parent, child, compiled(blocks))
    torch.testing.assert_close(violin.attention_maps(model, x), expected)
    assert not violin.is_plugged(violin.unplug(model))


@pytest.mark.parametrize("name", ["vit", "torchvision", "dino"])
def test_maps_of_vanilla_models_leave_wrappers_where_they_are(name, wrap):
    x, model = images((32, 32)), build(name).eval()
    expected = violin.attention_maps(model, x, (1, 1))
    wrapped = wrap(model)
    modules = dict(wrapped.named_modules())
    for block, rows in violin.attention_maps(wrapped, x, (1, 1)).items():
        torch.testing.assert_close(rows, expected[block])
    assert dict(wrapped.named_modules()) == modules


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_traced_part_may_stand_beside_the_transformer():
    x, vit = images((32, 32)), build("vit").eval()
    model = nn.Sequential(torch.jit.trace(nn.Tanh(), x), vit)
    expected = run(model, x)
    violin.plug(model)
    torch.testing.assert_close(run(model, x), expected)
    assert violin.is_plugged(vit)
    with pytest.raises(violin.Error, match="no vision transformer"):
        violin.plug(model[0])
    violin.unplug(model)
    with pytest.raises(violin.Error, match="the model is inside of DataParallel already"):
        violin.plug(nn.DataParallel(model))


@pytest.mark.parametrize("plugged", [True, False])
def test_maps_leave_compiled_code_as_it_is(plugged, timm):
    torch._dynamo.reset()
    x, model = images((32, 32)), build("vit").eval()
    if plugged:
        violin.plug(model, init="spread")
    expected = violin.attention_maps(model, x)
    made = []

    def backend(graph, inputs):
        made.append(graph)
        return graph.forward

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = torch.compile(model, backend=backend, fullgraph=True)

        def forward(self, images):
            return self.model(images)

    whole = Whole()
    logits = run(whole, x)
    torch.testing.assert_close(violin.attention_maps(whole, x)[1], expected[1])
    assert torch.equal(run(whole, x), logits) and len(made) == 1


def test_checkpointed_blocks_know_shapes_of_equal_size_apart(timm):
    views, gradients = [images((48, 24)), images((24, 48))], []
    model = violin.plug(build("dynamic"), init="spread").train()
    for wrapped in (model, each_block(checkpoint_wrapper)(model)):
        model.zero_grad()
        sum(wrapped(x).square().sum() for x in views).backward()
        gradients.append([parameter.grad.clone() for parameter in violin.mask_parameters(model)])
    for plain, checkpointed in zip(*gradients):
        torch.testing.assert_close(checkpointed, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sizes", [((32, 32), (16, 16)), ((48, 24), (24, 48))])
def test_compiled_blocks_that_are_checkpointed_know_the_grids_of_a_step_apart(sizes, timm):
    torch._dynamo.reset()
    inputs, gradients = [images(size) for size in sizes], []
    model = violin.plug(build("dynamic"), init="spread").train()
    for compile in (False, True):
        if compile:
            model.set_grad_checkpointing()
            for block in model.blocks:
                block.compile(backend="aot_eager", fullgraph=True)
        model.zero_grad()
        sum(model(x).square().sum() for x in inputs).backward()
        gradients.append([parameter.grad.clone() for parameter in violin.mask_parameters(model)])
    for plain, checkpointed in zip(*gradients):
        torch.testing.assert_close(checkpointed, plain, rtol=1e-4, atol=1e-5)
    assert model._violin.grids.grid == tuple(side // 8 for side in sizes[1])  # of the last call, for blocks by themselves


@pytest.mark.parametrize("whole", ["compiled", "exported"])
def test_parts_that_are_compiled_after_the_whole_make_their_own_tables(whole, timm):
    torch._dynamo.reset()
    model, x = violin.plug(build("dynamic"), init="spread").train(), images((32, 32))
    model(x).square().sum().backward()
    expected = [parameter.grad.clone() for parameter in violin.mask_parameters(model)]
    if whole == "compiled":
        torch.compile(model, backend="aot_eager")(x)
    else:
        torch.export.export(model, (x,), strict=False)
    model.set_grad_checkpointing()
    model.patch_embed.compile(backend="aot_eager")
    for block in model.blocks:
        block.compile(backend="aot_eager")
    model.zero_grad()
    model(x).square().sum().backward()
    for parameter, gradient in zip(violin.mask_parameters(model), expected):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-5)


def test_a_compiled_patch_embedding_tells_the_grid_after_calls_that_are_not_compiled(timm):
    torch._dynamo.reset()
    model, one, other = violin.plug(build("dynamic"), init="spread").eval(), images((48, 24)), images((24, 48))
    expected = [run(model, one), run(model, other)]
    run(model, one)
    model.patch_embed.compile(backend="eager")
    for _ in range(2):
        torch.testing.assert_close(run(model, other), expected[1])
        torch.testing.assert_close(run(model, one), expected[0])
        violin.attention_maps(model, one)  # does without compiled code


def elsewhere(module, function, before=False):
    """Another thread calls a function when this one has called a module, or is about to; once."""

    @torch.compiler.disable
    def hook(*_):
        handle.remove()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(function).result()

    handle = module.register_forward_pre_hook(hook) if before else module.register_forward_hook(hook)


def test_a_thread_without_compiled_code_keeps_its_grid_while_another_runs_some(timm):
    torch._dynamo.reset()
    model, one, other = violin.plug(build("dynamic"), init="spread").eval(), images((48, 24)), images((24, 48))
    whole = compiled(model)
    expected = run(model, one)
    run(whole, other)
    for part in (model.patch_embed, model.blocks[0]):
        elsewhere(part, lambda: run(whole, other))
        assert torch.equal(run(model, one), expected)


def test_a_model_that_is_compiled_as_a_whole_serves_threads_with_sizes_of_their_own(timm):
    torch._dynamo.reset()
    made = []

    def backend(graph, inputs):
        made.append(graph)
        return graph.forward

    model, one, other = violin.plug(build("dynamic"), init="spread").eval(), images((48, 24)), images((24, 48))
    expected = [run(model, one), run(model, other)]
    whole = torch.compile(model, backend=backend, fullgraph=True)
    for x in (one, other):
        run(whole, x)
    count, found = len(made), []
    elsewhere(model, lambda: found.append(run(whole, other)), before=True)
    found.append(run(whole, one))
    torch.testing.assert_close(found, expected[::-1])
    assert len(made) == count


@pytest.mark.parametrize("name", ["vit", "torchvision", "dino"])
@pytest.mark.parametrize("wrapper", [compiled, checkpoint_wrapper])
def test_models_with_wrapped_parts_are_saved(name, wrapper, tmp_path):
    model = violin.plug(build(name), init="spread").eval()
    violin.save(model, tmp_path / "plain")
    wrapped = copy.deepcopy(model)
    vit = wrapped.encoder if name == "torchvision" else wrapped
    blocks, last = (vit.layers, "ln") if name == "torchvision" else (vit.blocks, "norm")
    for block in blocks:
        for child in ("mlp", "ln_1" if name == "torchvision" else "norm1"):
            setattr(block, child, wrapper(getattr(block, child)))
    setattr(vit, last, wrapper(getattr(vit, last)))
    patches = "conv_proj" if name == "torchvision" else "patch_embed"
    setattr(wrapped, patches, wrapper(getattr(wrapped, patches)))
    violin.save(wrapped, tmp_path / "wrapped")
    assert (tmp_path / "wrapped").read_bytes() == (tmp_path / "plain").read_bytes()
    violin.load_state(wrapped, tmp_path / "plain")
