"""Models of which the whole or a part stands inside torch.compile or torch's wrapper for activation checkpointing."""

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
