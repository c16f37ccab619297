"""Layers of a plugged model build their tables together: fewer calls, the same numbers."""

import copy
import pickle
import threading

import pytest
import torch
from models import build
from processes import run_in_group
from standins import TorchvisionTransformer
from torch import nn
from torch.utils.checkpoint import checkpoint

import violin


@pytest.fixture
def calls(monkeypatch):
    """Heads of each decay_mask call, as they come."""
    found, original = [], violin.ops.decay_mask

    def counted(ranks, log_decay, *rest):
        found.append(log_decay.shape[-1])
        return original(ranks, log_decay, *rest)

    monkeypatch.setattr(violin.ops, "decay_mask", counted)
    return found


def plugged(depth=4, **options):
    return violin.plug(TorchvisionTransformer(depth=depth), **{"init": "none", **options})


def images(*size):
    return torch.randn(2, 3, *(size or (32, 32)))


def outcome(function, model, *inputs):
    """Outputs, and the gradients of all parameters."""
    model.zero_grad(set_to_none=True)
    outputs = [function(x) for x in inputs]
    sum(out.square().sum() for out in outputs).backward()
    return [*(out.detach() for out in outputs), *(p.grad for p in model.parameters() if p.grad is not None)]


def alone(function, model, *inputs):
    """The same with tables built layer by layer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("violin.grids.TOGETHER", 0)
        return outcome(function, model, *inputs)


def equal(actual, expected):
    assert len(actual) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected))


def close(actual, expected):
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * max(b.abs().max().item(), 1e-2))


OPTIONS = [
    {},
    {"init": "identity"},
    {"init": "spread", "strategy": "log", "curve_weights": True, "prefix_decay": "learned"},
    {"strategy": "add_after_sm", "heads": [0, 2], "parameterisation": "rate", "prefix_decay": "learned"},
    {"strategy": "mul_after_sm", "curves": "manhattan", "decay_per_axis": True},
    {"strategy": "mul_v2", "decay": 0.9},
    {"strategy": "add_v1", "curves": ""},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(map(str, options)) or "plain")
def test_one_call_and_the_same_numbers(options, calls):
    model, x = plugged(**options), images()
    heads, decays = len(options.get("heads", range(3))), options.get("curves") != ""
    actual = outcome(model, model, x)
    assert calls == [4 * heads] * decays
    equal(actual, alone(model, model, x))
    assert calls == [4 * heads, *[heads] * 4] * decays
    with torch.no_grad():  # evaluation keeps tables
        model.eval()(x)
        calls.clear()
        model(x)
    assert not calls and all(mask.kept_tables == 1 for _, mask in violin.masks(model))


@pytest.mark.parametrize("name", ["dynamic", "registers", "dino"])
def test_every_family_and_several_sizes(name, calls):
    model = violin.plug(build(name), init="none")
    inputs = [images(), images(48, 24), images(16, 16)] if name == "dynamic" else [images()]
    actual = outcome(model, model, *inputs)
    assert len(calls) == len(inputs)
    equal(actual, alone(model, model, *inputs))
    calls.clear()
    model.eval()(inputs[0])  # with gradients: in each call
    assert len(calls) == 1


def test_layers_that_cannot_go_together(calls, monkeypatch):
    model, x = plugged(5), images()
    expected = alone(model, model, x)
    masks = [mask for _, mask in violin.masks(model)]

    def groups(function=model):
        calls.clear()
        function(x)
        return calls

    with monkeypatch.context() as patch:
        patch.setattr("violin.grids.TOGETHER", 2 * 3 * 17 * 17 * 4)
        assert groups(lambda x: equal(outcome(model, model, x), expected)) == [6, 6, 3]
    assert groups() == [15]
    masks[2].double()
    assert groups(torch.no_grad()(model)) == [6, 3, 6]
    masks[2].float()
    masks[1].freeze((4, 4), 1)
    assert groups() == [3, 9]
    masks[1].thaw()
    masks[4].eval().requires_grad_(False)
    assert groups() == [12, 3] and groups() == [12]  # the last one keeps its table


def test_only_some_blocks(calls):
    model, x = plugged(blocks=[0, 2, 3]), images()
    actual = outcome(model, model, x)
    assert calls == [9]
    equal(actual, alone(model, model, x))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("chosen", [(0, 1, 2, 3), (1, 2)])
def test_checkpointed_layers_build_their_own(reentrant, chosen, calls):
    model, x = plugged(), images()
    expected = alone(model, model, x, x)
    calls.clear()
    for i in chosen:
        layer = model.encoder.layers[i]
        layer.forward = lambda y, inner=layer.forward: checkpoint(inner, y, use_reentrant=reentrant)
    equal(outcome(model, model, x, x), expected)  # the second forward comes before the first backward
    assert sorted(calls) == [3] * (4 * len(chosen)) + ([12, 12] if len(chosen) == 2 else [])


def test_checkpointed_layers_after_another_grid(timm):
    model = violin.plug(build("dynamic"), init="none")
    one, other = images(), images(48, 24)
    expected = outcome(model, model, one)[1:]
    model.set_grad_checkpointing()
    model.zero_grad(set_to_none=True)
    loss = model(one).square().sum()
    model.set_grad_checkpointing(False)
    model(other)
    model(one * 2)
    loss.backward()
    equal([p.grad for p in model.parameters()], expected)


def test_checkpointed_models_share_both_times(calls):
    model, x = plugged(), images()
    expected = alone(model, model, x)
    calls.clear()
    equal(outcome(lambda x: checkpoint(model, x, use_reentrant=False), model, x), expected)
    assert calls == [12, 12] and not model._violin.grids._passes


def test_hooks_around_the_model_are_no_checkpointing(calls):
    model, x = plugged(), images()
    with torch.autograd.graph.save_on_cpu():
        outcome(model, model, x)
    assert calls == [12]


def test_nothing_stays_after_a_pass(calls):
    class Interrupt(BaseException):
        pass

    def interrupt(*_):
        raise Interrupt

    model, x = plugged(), images()
    passes = model._violin.grids._passes
    model(x)
    assert not passes
    layer = model.encoder.layers[2]
    shape, layer.ln_2.normalized_shape = layer.ln_2.normalized_shape, (7,)
    with pytest.raises(RuntimeError):
        model(x)
    assert not passes
    layer.ln_2.normalized_shape = shape
    calls.clear()
    model.encoder.layers[1](torch.randn(1, 17, 24))  # one layer for itself
    assert calls == [3]

    hook = layer.register_forward_hook(interrupt)
    with pytest.raises(Interrupt):
        model(x)
    hook.remove()
    copy.deepcopy(model)
    with torch.no_grad():
        for parameter in violin.mask_parameters(model):
            parameter.mul_(1.5)
    actual = model.forward(x)  # no hook of the model runs
    assert torch.equal(actual, model(x))


def test_threads_have_passes_of_their_own():
    model, inputs = plugged(), [images() for _ in range(4)]

    def run(x):
        return torch.autograd.grad(model(x).square().sum(), violin.mask_parameters(model))

    expected = [run(x) for x in inputs]
    together, found = threading.Barrier(len(inputs)), {}

    def meet(*_):
        together.wait(60)

    for layer in model.encoder.layers:
        layer.register_forward_pre_hook(meet)
    threads = [threading.Thread(target=lambda i=i: found.update({i: run(inputs[i])})) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, gradients in enumerate(expected):
        equal(found[i], gradients)


def test_halves_of_a_pass_are_one_graph_unless_asked_for(monkeypatch):
    model, x = plugged(), images()

    def halves():
        found = []
        hook = model.encoder.layers[1].register_forward_hook(lambda m, a, y: (found.append(y), y.detach())[1])
        out = model(x)
        hook.remove()
        out.square().sum().backward()
        found[0].square().sum().backward()

    with pytest.raises(RuntimeError, match="a second time"):
        halves()
    monkeypatch.setattr("violin.grids.TOGETHER", 0)
    halves()


def test_copies_share_among_themselves_only(calls):
    model, x = plugged(), images()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        grids = other._violin.grids
        assert grids is other.encoder.layers[2].self_attention._grids
        assert [id(mask) for mask in grids.masks] == [id(mask) for _, mask in violin.masks(other)]
        assert list(model.state_dict()) == list(other.state_dict())
        with torch.no_grad():
            for parameter in violin.mask_parameters(other):
                parameter.mul_(1.25)
        calls.clear()
        actual = outcome(other, other, x)
        assert calls == [12] and all(p.grad is None for p in model.parameters())
        equal(actual, alone(other, other, x))


def test_another_mask_in_a_layer_is_used():
    model, x = plugged(), images()
    model.encoder.layers[1].self_attention.violin = violin.ViolinMask(3, init="none", grid=(4, 4))
    equal(outcome(model, model, x)[:1], alone(model, model, x)[:1])


def test_functional_calls_see_their_parameters(calls):
    model, x = plugged(), images()
    values = {name: (p.detach() * 1.1).requires_grad_() for name, p in model.named_parameters()}
    out = torch.func.functional_call(model, values, (x,))
    assert calls == [12]
    actual = torch.autograd.grad(out.square().sum(), list(values.values()))
    model.load_state_dict(values)
    equal([out, *actual], outcome(model, model, x))


class Graphs:
    """A backend that keeps what it is given."""

    def __init__(self, backend="aot_eager"):
        self.found, self.compile = [], torch._dynamo.lookup_backend(backend)

    def __call__(self, graph, inputs):
        self.found.append(graph)
        return self.compile(graph, inputs)

    def count(self, name):
        """Nodes with this name, those in checkpointed parts too."""
        parts = [part for graph in self.found for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]
        return sum(name in str(node.target) for part in parts for node in part.graph.nodes)

    def outputs(self):
        return [len(node.args[0]) for graph in self.found for node in graph.graph.nodes if node.op == "output"]


@pytest.mark.parametrize("name", ["dynamic", "torchvision", "dino"])
def test_compiled(name):
    torch._dynamo.reset()
    model, x = violin.plug(build(name), init="spread"), images()
    graphs = Graphs()
    compiled = torch.compile(model, fullgraph=True, backend=graphs)
    for _ in range(2):
        close(outcome(compiled, model, x), outcome(model, model, x))
        assert graphs.count("decay_mask") == 1 and graphs.outputs() == [1]
        assert all(mask._given is None for _, mask in violin.masks(model))
        with torch.no_grad():
            for parameter in violin.mask_parameters(model):
                parameter.mul_(1.2)


def test_compiled_inside_of_a_model():
    torch._dynamo.reset()
    model, x = nn.Sequential(plugged(), nn.Linear(5, 2)), images()
    graphs = Graphs()
    close(outcome(torch.compile(model, fullgraph=True, backend=graphs), model, x), outcome(model, model, x))
    assert graphs.count("decay_mask") == 1 and graphs.outputs() == [1]


def test_compiled_up_to_the_limit(monkeypatch):
    torch._dynamo.reset()
    model, x = plugged(5), images()
    expected = outcome(model, model, x)
    monkeypatch.setattr("violin.grids.TOGETHER", 3 * 3 * 17 * 17 * 4)
    graphs = Graphs()
    close(outcome(torch.compile(model, fullgraph=True, backend=graphs), model, x), expected)
    assert graphs.count("decay_mask") == 3  # one for three layers, and two for themselves


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_with_checkpointing(backend, timm):
    torch._dynamo.reset()
    model, x = violin.plug(build("dynamic"), init="spread"), images()
    expected = outcome(model, model, x)
    model.set_grad_checkpointing(True)
    graphs = Graphs(backend)
    close(outcome(torch.compile(model, fullgraph=True, backend=graphs), model, x), expected)
    assert graphs.count("decay_mask") == 1 and graphs.outputs() == [1]


def test_compiled_layer_by_layer():
    """One compilation serves all layers."""
    torch._dynamo.reset()
    model, x = plugged(10), images()
    expected = outcome(model, model, x)
    graphs = Graphs()
    for layer in model.encoder.layers:
        layer.compile(fullgraph=True, backend=graphs)
    close(outcome(model, model, x), expected)
    assert len(graphs.found) == 1


def test_compiled_with_graph_breaks():
    torch._dynamo.reset()
    model, x = plugged(10), images()
    expected = outcome(model, model, x)
    for layer in model.encoder.layers:
        layer.register_forward_pre_hook(lambda *_: torch._dynamo.graph_break())
    graphs = Graphs()
    compiled = torch.compile(model, backend=graphs)
    for _ in range(2):
        close(outcome(compiled, model, x), expected)
        assert graphs.count("decay_mask") == 1 and len(graphs.found) <= 6
        assert all(mask._given is None for _, mask in violin.masks(model))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects")
def test_exported(strict):
    model, x = plugged().eval(), images()
    program = torch.export.export(model, (x,), strict=strict)
    assert sum("decay_mask" in str(node.target) for node in program.graph.nodes) == 1
    assert len(program.graph_signature.user_outputs) == 1
    assert set(program.graph_signature.parameters) == {name for name, _ in model.named_parameters()}
    torch.testing.assert_close(program.module()(x), model(x), rtol=1e-4, atol=1e-5)
    assert all(mask._given is None for _, mask in violin.masks(model))


SHARDED = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
mesh = init_device_mesh("cpu", (world,))
torch.manual_seed(0)
lone = violin.plug(TorchvisionTransformer(depth=3), init="spread")
x, y = torch.randn(2, 2, 3, 32, 32)
for reshard in (True, False):
    for sharded in (3, 0):
        model = copy.deepcopy(lone)
        for layer in model.encoder.layers[:sharded]:
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh)
        with torch.no_grad():
            model(x)  # blocks that are not sharded again stay whole
        for either in (lone, model):
            either.zero_grad()
            (either(x).square().sum() + either(y).square().sum()).backward()
        for (name, a), b in zip(model.named_parameters(), lone.parameters()):
            torch.testing.assert_close(a.grad.full_tensor(), b.grad, rtol=1e-4, atol=1e-5, msg=name)
"""


def test_sharded_layers_build_their_own(tmp_path):
    run_in_group(SHARDED, 2, tmp_path)
