"""Attention maps of plugged and vanilla models."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from models import TINY, build, images, run
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import violin


def test_dino_map_includes_the_mask_and_is_made_only_on_request():
    model = build("dino").eval()
    x = images((24, 32))
    with torch.no_grad():
        expected = model.get_last_selfattention(x)
        violin.plug(model)
        torch.testing.assert_close(model.get_last_selfattention(x), expected, rtol=1e-5, atol=1e-6)
        assert model.blocks[0].attn(torch.zeros(1, 1 + 6 * 8, 24))[1] is None


@pytest.mark.parametrize("name", ["vit", "registers", "torchvision", "dino"])
@pytest.mark.parametrize("plugged", [True, False])
def test_attention_maps(name, plugged):
    model = build(name).eval()
    if plugged:
        violin.plug(model, init="spread", strategy="mul_after_sm" if name == "vit" else "mul_v1")
    modules = dict(model.named_modules())
    x = images((32, 32))
    expected = run(model, x)
    maps = violin.attention_maps(model, x, [(1, 2), "class", 3], blocks=[1])
    side, prefix = (8, 1) if name == "dino" else (4, 5 if name == "registers" else 1)
    heads = 2 if name == "dino" else 3
    assert list(maps) == [1] and maps[1].shape == (2, heads, 3, prefix + side * side)
    if not (plugged and name == "vit"):
        torch.testing.assert_close(maps[1].sum(-1), torch.ones(2, heads, 3))
    one = violin.attention_maps(model, x, (1, 2), heads=[1])
    assert sorted(one) == [0, 1]
    torch.testing.assert_close(one[1][:, 0, 0], maps[1][:, 1, 0])
    if name == "dino" and not plugged:
        with torch.no_grad():
            torch.testing.assert_close(maps[1][:, :, 1], model.get_last_selfattention(x)[:, :, 0])
    again = dict(model.named_modules())
    assert all(again[key] is value for key, value in modules.items()) and torch.equal(run(model, x), expected)
    for bad, message in [
        ((9, 0), "outside of the grid"),
        ([(1,)], r"the query patch \(1,\) is no \(row, column\)"),
        (500, "the query is 500"),
        (0.5, "the query is 0.5"),
        ([0.5], "the query is 0.5"),
        (None, "the query is None"),
        ("cls", "'cls'"),
    ]:
        with pytest.raises(violin.Error, match=message):
            violin.attention_maps(model, x, bad)
    with pytest.raises(violin.Error, match="blocks are"):
        violin.attention_maps(model, x, 0, blocks=[7])


def test_chosen_heads_of_maps_keep_their_order():
    model = violin.plug(build("vit"), init="spread").eval()
    x = images((32, 32))
    everything = violin.attention_maps(model, x)[0]
    torch.testing.assert_close(violin.attention_maps(model, x, heads=[2, 0])[0], everything[:, [2, 0]])
    for options, message in [
        ({"heads": [-1]}, r"heads are \[-1\]"),
        ({"heads": []}, r"heads are \[\]"),
        ({"heads": [3]}, r"heads are \[3\]; blocks.0.attn has heads 0 to 2"),
        ({"queries": []}, "queries are empty"),
        ({"heads": 1}, "heads is 1; expected a list of numbers, or None for all"),
        ({"blocks": 1}, "blocks is 1; expected a list of numbers, or None for all"),
    ]:
        with pytest.raises(violin.Error, match=message):
            violin.attention_maps(model, x, **options)


class Resized(nn.Module):
    def __init__(self, vit):
        super().__init__()
        self.vit = vit

    def forward(self, images):
        return self.vit(images)


def meanwhile(module, function):
    """While this thread calls a module, another calls a function; once."""

    def hook(*_):
        handle.remove()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(function).result()

    handle = module.register_forward_hook(hook)


@pytest.mark.parametrize("part", ["patch_embed.proj", "blocks.0"])
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("plugged", [False, True])
def test_maps_are_those_of_the_calling_thread(part, wrapped, plugged, timm):
    vit = build("dynamic").eval()
    if plugged:
        violin.plug(vit, init="spread")
    model = Resized(vit) if wrapped else vit
    x, others = images((32, 32)), images((48, 24), 3)
    expected, logits = violin.attention_maps(model, x, (3, 3)), run(model, others)
    seen = []
    meanwhile(vit.get_submodule(part), lambda: seen.append(run(model, others)))
    maps = violin.attention_maps(model, x, (3, 3))
    torch.testing.assert_close(seen[0], logits)
    for block in maps:
        torch.testing.assert_close(maps[block], expected[block])


def test_a_returned_map_is_that_of_the_calling_thread():
    model, x = violin.plug(build("dino"), init="spread").eval(), images((32, 32))
    with torch.no_grad():
        expected = model.get_last_selfattention(x)
        meanwhile(model.blocks[-1].norm1, lambda: run(model, images((16, 16))))
        torch.testing.assert_close(model.get_last_selfattention(x), expected)
    assert model.blocks[-1].attn(torch.zeros(1, 65, 24))[1] is not None  # nobody asked otherwise since
    run(model, x)
    assert model.blocks[-1].attn(torch.zeros(1, 65, 24))[1] is None


@pytest.mark.parametrize("lasting", ["map", "forward"])
def test_layers_that_are_run_again_in_another_thread_return_what_they_returned(lasting):
    model, x = violin.plug(build("dino"), init="spread").train(), images((32, 32))
    calls = {"map": model.get_last_selfattention, "forward": model}
    weight = model.blocks[-1].attn.qkv.weight
    expected = torch.autograd.grad(calls[lasting](x).square().sum(), weight)[0]
    for block in model.blocks:
        block.attn = checkpoint_wrapper(block.attn)
    with ThreadPoolExecutor(1) as pool:
        for other in calls.values():
            loss = calls[lasting](x).square().sum()
            other(x)
            pool.submit(other, x).result()
            actual = pool.submit(torch.autograd.grad, loss, weight).result()[0]
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_maps_that_other_threads_want_leave_compiled_code_as_it_is():
    torch._dynamo.reset()
    made = []

    def backend(graph, inputs):
        made.append(graph)
        return graph.forward

    model, x = violin.plug(build("dino"), init="spread").eval(), images((32, 32))
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    expected = run(compiled, x)
    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            pool.submit(run, model.get_last_selfattention, x).result()
            assert torch.equal(run(compiled, x), expected) and len(made) == 1


class Waiting(nn.DataParallel):
    def forward(self, *_):
        raise AssertionError("a wrapper for several processes was called")


@pytest.mark.parametrize("plugged", [True, False])
def test_maps_do_not_wait_for_others_inside_of_a_model(plugged):
    model, x = build("torchvision").eval(), images((32, 32))
    if plugged:
        violin.plug(model, init="spread")
    expected = violin.attention_maps(model, x)[1]
    for whole in (Resized(Waiting(model)), Resized(torch.compile(Waiting(model), backend="eager"))):
        assert torch.equal(violin.attention_maps(whole, x)[1], expected)
        with pytest.raises(AssertionError, match="was called"):
            run(whole, x)


def test_blocks_that_a_call_does_not_run_here_are_named(timm):
    class Early(Resized):
        def forward(self, images):
            return self.vit.forward_intermediates(images, indices=[0], stop_early=True)[0]

    class Aside(Resized):
        def forward(self, images):
            with ThreadPoolExecutor(1) as pool:
                return pool.submit(self.vit, images).result()

    model, x = violin.plug(build("vit"), init="spread").eval(), images((32, 32))
    with pytest.raises(violin.Error, match=r"^vit\.blocks\.1\.attn was not run: Early leaves it out .* leave it out of blocks="):
        violin.attention_maps(Early(model), x)
    assert list(violin.attention_maps(Early(model), x, blocks=[0])) == [0]
    with pytest.raises(violin.Error, match=r"^vit\.blocks\.0\.attn was not run: Aside .* in another thread"):
        violin.attention_maps(Aside(model), x)


def test_registers_are_no_class_token(timm):
    from timm.models.vision_transformer import VisionTransformer

    model = VisionTransformer(**TINY, class_token=False, reg_tokens=4, global_pool="avg").eval()
    for plugged in (model, violin.plug(copy.deepcopy(model))):
        with pytest.raises(violin.Error, match=r"no class token; give queries=\(row, column\)"):
            violin.attention_maps(plugged, images((32, 32)))
        assert violin.attention_maps(plugged, images((32, 32)), (1, 2))[0].shape == (2, 3, 1, 20)


def test_maps_of_one_process_do_not_wait_for_others():
    model, x = violin.plug(build("vit"), init="spread").eval(), images((32, 32))
    expected = violin.attention_maps(model, x)[1]
    for wrapper in (Waiting(model), torch.compile(Waiting(model), backend="eager"), Waiting(torch.compile(model))):
        assert torch.equal(violin.attention_maps(wrapper, x)[1], expected)


@pytest.mark.parametrize("plugged", [True, False])
def test_maps_within_code_that_is_compiled(plugged):
    x, model = images((32, 32)), build("dino").eval()
    if plugged:
        violin.plug(model, init="spread")
    expected, maps = run(model, x), violin.attention_maps(model, x, [(1, 2), "class"])
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, images):
            logits = self.model(images)
            return logits, violin.attention_maps(self.model, images, [(1, 2), "class"]), logits.relu()

    both = Both()
    for code in (both, lambda images: both(images)):
        torch._dynamo.reset()
        graphs.clear()
        torch.testing.assert_close(run(torch.compile(code, backend=backend), x), (expected, maps, expected.relu()))
        assert len(graphs) > 1  # the model is compiled, and so is what comes behind
