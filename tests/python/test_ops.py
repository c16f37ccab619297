"""The operator library as Python sees it: gradients, fake tensors, torch.compile, torch.export, autocast, errors."""

import os
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

LIBRARY = os.environ.get("VIOLIN_OPS_LIBRARY")
if not LIBRARY:
    pytest.skip("VIOLIN_OPS_LIBRARY names no operator library", allow_module_level=True)
torch.ops.load_library(LIBRARY)

from attention_cases import CASES, formula, log_decay, make_inputs, ranks  # noqa: E402

violin = torch.ops.violin
SMALL = [case for case in CASES if case["queries"] <= 70 and (case["keys"] or 0) <= 70]


def leaves(tensors):
    return [t if t is None else t.detach().requires_grad_() for t in tensors]


def given(tensors):
    return [t for t in tensors if t is not None]


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case["name"])
def test_case_agrees_with_the_formula(case):
    inputs = make_inputs(case)
    mine, exact = leaves(inputs), leaves([t if t is None else t.double() for t in inputs])
    out, expected = violin.attention(*mine, case["scale"]), formula(*exact, case["scale"])
    assert out.dtype == inputs[0].dtype and out.shape == expected.shape
    assert out.transpose(1, 2).is_contiguous()
    dout = torch.randn(out.shape).to(out.dtype)
    results = [out, *torch.autograd.grad(out, given(mine), dout)]
    truth = [expected, *torch.autograd.grad(expected, given(exact), dout.double())]
    tolerance = 2e-5 if inputs[0].dtype in (torch.float32, torch.float64) else 3e-2
    for actual, wanted in zip(results, truth, strict=True):
        assert actual.isfinite().all() and actual.shape == wanted.shape
        # How much precision huge logits cost is a matter of the C++ tests.
        if wanted.numel() and case["magnitude"] == 1:
            error = (actual.double() - wanted).abs().max().item()
            assert error <= tolerance * max(wanted.abs().max().item(), 1.0)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case["name"])
def test_calls_that_nobody_differentiates_give_the_same(case):
    inputs = make_inputs(case)
    recorded = violin.attention(*leaves(inputs), case["scale"])
    constant = violin.attention(*inputs, case["scale"])
    with torch.no_grad():
        silent, _ = violin.attention_with_lse(*leaves(inputs), case["scale"])
    assert recorded.requires_grad and not constant.requires_grad and not silent.requires_grad
    assert torch.equal(recorded, constant) and torch.equal(recorded, silent)


def test_forward_mode_is_refused_and_not_ignored():
    q, k, v = (torch.randn(2, 2, 5, 4) for _ in range(3))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(RuntimeError, match="jvp is not implemented"):
            violin.attention(dual, k, v)


def shrunk(case):
    """A case with few numbers, for differences one by one."""
    prefix = min(case["prefix"], 2)
    queries = min(case["queries"], 3 + prefix) if case["strategy"] or "mask" in (case["gain"],) else min(case["queries"], 3)
    return {
        **case, "batch": min(case["batch"], 2 * max(case["groups"], 1)), "heads": min(case["heads"], 2), "queries": queries,
        "keys": None if case["keys"] is None else min(case["keys"], 4), "dim": min(case["dim"], 3), "prefix": prefix,
    }  # fmt: skip


def unique(cases):
    seen = {}
    for case in cases:
        key = str(sorted((k, v) for k, v in case.items() if k not in ("name", "dtype")))
        seen.setdefault(key, case)
    return list(seen.values())


# Differences of huge logits are no derivatives, and empty tensors have none.
GRADCHECK = [
    case
    for case in unique(map(shrunk, CASES))
    if case["magnitude"] == 1 and case["batch"] and case["queries"] and case["keys"] != 0
]


@pytest.mark.parametrize("case", GRADCHECK, ids=lambda case: case["name"])
def test_attention_gradcheck(case):
    inputs = leaves(make_inputs(case, torch.float64))
    if case["bias"] == "rows":  # -inf has no neighbours
        inputs[4].requires_grad_(False)
    assert torch.autograd.gradcheck(lambda *t: violin.attention(*t, case["scale"]), inputs)


def mask_arguments(curves="violin", heads=2, per_axis=False, weighted=False, prefix=0, groups=0, log_space=False):
    torch.manual_seed(3)
    r = violin.curve_ranks(curves, [2, 3])
    if groups:
        r = torch.stack([r[:, :, torch.randperm(6)[:4]] for _ in range(groups)])
    c, a = r.shape[-3], r.shape[-2]
    decay = log_decay(c * (a if per_axis else 1), heads, -1, 2)
    decay = decay.view(c, a, heads) if per_axis else decay
    weight = torch.rand(c, heads, dtype=torch.float64) + 0.5 if weighted else None
    prefix_decay = -torch.rand(heads, dtype=torch.float64) if prefix else None
    return leaves([r.float(), decay, weight]), prefix, leaves([prefix_decay])[0], log_space, r


MASKS = [
    {},
    {"curves": "hilbert"},
    {"weighted": True, "prefix": 1},
    {"curves": "manhattan,snake", "prefix": 2, "weighted": True},
    {"curves": "manhattan", "per_axis": True, "prefix": 1},
    {"curves": "manhattan,zigzag", "per_axis": True, "weighted": True, "heads": 5},
    {"groups": 2, "prefix": 1},
]


@pytest.mark.parametrize("log_space", [False, True])
@pytest.mark.parametrize("options", MASKS, ids=str)
def test_decay_mask_gradcheck(options, log_space):
    (_, decay, weight), prefix, prefix_decay, log_space, r = mask_arguments(**options, log_space=log_space)
    tensors = given([decay, weight, prefix_decay])

    def mask(*values):
        values = list(values)
        return violin.decay_mask(
            r, values.pop(0), values.pop(0) if weight is not None else None, prefix,
            values.pop(0) if prefix_decay is not None else None, log_space,
        )  # fmt: skip

    assert torch.autograd.gradcheck(mask, tensors)


def attention_arguments(dtype=torch.float32, groups=2):
    torch.manual_seed(4)
    q, k, v = (torch.randn(4, 3, n, 8, dtype=dtype, requires_grad=True) for n in (5, 7, 7))
    gain = torch.rand(groups, 3, 5, 7, dtype=dtype, requires_grad=True)
    bias = torch.randn(1, 5, 7, dtype=dtype, requires_grad=True)
    gate = torch.rand(3, 5, 7, dtype=dtype, requires_grad=True)
    return q, k, v, gain, bias, gate


def check_operator(op, arguments):
    results = torch.library.opcheck(op, arguments, raise_exception=True)
    assert set(results) == {
        "test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"
    }  # fmt: skip
    assert all(result == "SUCCESS" for result in results.values()), results


def test_packed_gain_without_a_device():
    """On CUDA, beside 16 bits, the gain is packed for both passes: shapes and errors need no device."""
    with FakeTensorMode():
        for dtype, packed_type, size in ((torch.bfloat16, torch.int16, 4160), (torch.float16, torch.uint8, 8320)):
            q = torch.empty(4, 3, 100, 64, dtype=dtype, device="cuda")
            k = torch.empty(4, 3, 130, 64, dtype=dtype, device="cuda")
            wide = torch.empty(4, 3, 100, 64, device="cuda")
            for shape, packed_shape in (
                ((1, 100, 130), (1, 1, 3, 2)),
                ((3, 100, 130), (1, 3, 3, 2)),
                ((2, 3, 100, 130), (2, 3, 3, 2)),
            ):
                packed = violin._pack_gain(torch.empty(shape, device="cuda"), q)
                assert (packed.dtype, tuple(packed.shape)) == (packed_type, (*packed_shape, size))
                out, lse = violin._attention_forward(q, k, k, packed, None, None, None)
                need = [True, False, False, True, False, False]
                grads = violin._attention_backward(q, q, k, k, packed, None, None, out, lse, None, need)
                assert tuple(grads[3].shape) == (packed_shape[0], 3, 100, 130)
                assert grads[3].dtype == torch.float32
            with pytest.raises(ValueError, match="packed with shape .* expected what pack_gain made for these sizes"):
                violin._attention_forward(q, q, q, packed, None, None, None)
            with pytest.raises(TypeError, match="packed .* expected what pack_gain made for this type"):
                violin._attention_forward(wide, wide, wide, packed, None, None, None)
            with pytest.raises(TypeError, match="q is Float; expected float16 or bfloat16"):
                violin._pack_gain(torch.empty(3, 100, 130, device="cuda"), wide)
    q = torch.randn(1, 1, 64, 64).bfloat16()
    with pytest.raises(TypeError, match="gain is packed .* on cpu"):
        violin.attention(q, q, q, torch.zeros(1, 1, 1, 1, 4160, dtype=torch.int16))


def test_opcheck_attention():
    q, k, v, gain, bias, gate = attention_arguments()
    for arguments in [
        (q, k, v),
        (q, k, v, gain),
        (q, k, v, None, bias, None, 0.25),
        (q, k, v, gain, bias, gate),
        (q.detach(), k, v.detach(), gain.detach(), bias),
        tuple(t.detach() for t in (q, k, v, gain)),
    ]:
        check_operator(violin.attention.default, arguments)
    check_operator(violin.attention_with_lse.default, (q, k, v, gain, None, gate))


def test_opcheck_relatives():
    q, k, v, gain, bias, gate = attention_arguments()
    qkv = torch.randn(2, 5, 3, 2, 8, requires_grad=True)
    square = torch.rand(2, 5, 5, requires_grad=True)
    check_operator(violin.attention_qkv.default, (qkv,))
    check_operator(violin.attention_qkv.default, (qkv, square, None, square.detach()))
    with torch.no_grad():
        _, lse = violin.attention_with_lse(q, k, v, gain)
        check_operator(violin.attention_rows.default, (q.detach(), k.detach(), lse, torch.tensor([0, 4]), gain.detach()))


@pytest.mark.parametrize("log_space", [False, True])
@pytest.mark.parametrize("options", MASKS, ids=str)
def test_opcheck_decay_mask(options, log_space):
    (_, decay, weight), prefix, prefix_decay, log_space, r = mask_arguments(**options, log_space=log_space)
    check_operator(violin.decay_mask.default, (r, decay, weight, prefix, prefix_decay, log_space))


class Layer(torch.nn.Module):
    """A mask over a grid and attention along it, as a model uses them."""

    def __init__(self, heads=2, dim=8, grid=(3, 4), packed=True):
        super().__init__()
        torch.manual_seed(5)
        self.heads, self.packed = heads, packed
        self.qkv = torch.nn.Linear(heads * dim, 3 * heads * dim)
        self.proj = torch.nn.Linear(heads * dim, heads * dim)
        self.beta = torch.nn.Parameter(torch.linspace(0, 5, 8 * heads).view(8, heads))
        self.alpha = torch.nn.Parameter(torch.ones(heads))
        self.register_buffer("ranks", violin.curve_ranks("violin", list(grid)))

    def forward(self, x):
        batch, tokens, width = x.shape
        mask = violin.decay_mask(self.ranks, -torch.nn.functional.softplus(-self.beta), None, 1)
        gain = mask * self.alpha[:, None, None]
        qkv = self.qkv(x).view(batch, tokens, 3, self.heads, width // self.heads)
        if self.packed:
            out = violin.attention_qkv(qkv, gain)
        else:
            q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
            out = violin.attention(q, k, v, gain).transpose(1, 2)
        return self.proj(out.reshape(batch, tokens, width))


def gradients(function, module, x):
    module.zero_grad(set_to_none=True)
    out = function(x)
    out.square().sum().backward()
    return [out.detach()] + [p.grad.clone() for p in module.parameters()]


@pytest.mark.parametrize(("packed", "backend"), [(True, "aot_eager"), (False, "aot_eager"), (True, "inductor")])
def test_compile_in_one_graph_with_dynamic_shapes(packed, backend):
    torch._dynamo.reset()
    layer = Layer(packed=packed)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    for batch in (2, 5, 3):
        x = torch.randn(batch, 13, 16)
        for a, b in zip(gradients(compiled, layer, x), gradients(layer, layer, x), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), layer(x), rtol=1e-4, atol=1e-5)
        with torch.inference_mode():
            torch.testing.assert_close(compiled(x), layer(x), rtol=1e-4, atol=1e-5)


def test_compiled_code_may_ask_for_ranks():
    torch._dynamo.reset()

    def mask(decay):
        return violin.decay_mask(violin.curve_ranks("violin", [3, 4]), decay)

    decay = log_decay(8, 2, 0, 4)
    torch.testing.assert_close(torch.compile(mask, fullgraph=True, backend="aot_eager")(decay), mask(decay))


@pytest.mark.parametrize("packed", [True, False])
def test_export_with_a_dynamic_batch(packed):
    layer = Layer(packed=packed).eval()
    program = torch.export.export(layer, (torch.randn(3, 13, 16),), dynamic_shapes=({0: torch.export.Dim("batch")},))
    names = {str(node.target) for node in program.graph.nodes}
    assert any("violin.attention" in name for name in names) and any("violin.decay_mask" in name for name in names)
    x = torch.randn(6, 13, 16)
    torch.testing.assert_close(program.module()(x), layer(x))


def test_checkpointed_layers_give_the_same_gradients():
    layer, x = Layer(), torch.randn(2, 13, 16)
    again = lambda x: torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)  # noqa: E731
    for a, b in zip(gradients(again, layer, x), gradients(layer, layer, x), strict=True):
        assert torch.equal(a, b)


def test_autocast_makes_inputs_16_bits_wide_and_leaves_tables():
    q, k, v, gain, _, gate = attention_arguments()
    qkv = torch.randn(2, 5, 3, 3, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = violin.attention(q, k, v, gain, None, gate)
        both = violin.attention_with_lse(q, k, v, gain, None, gate)
        packed = violin.attention_qkv(qkv)
        mask = violin.decay_mask(ranks(6), log_decay(8, 2, 0, 4, torch.float32))
    assert out.dtype == both[0].dtype == packed.dtype == torch.bfloat16
    assert both[1].dtype == mask.dtype == torch.float32
    expected = violin.attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), gain, None, gate)
    assert torch.equal(out, expected)
    dout = torch.randn_like(out)
    for a, b in zip(
        torch.autograd.grad(out, (q, k, v, gain, gate), dout),
        torch.autograd.grad(expected, (q, k, v, gain, gate), dout),
        strict=True,
    ):
        assert a.dtype == torch.float32 and torch.equal(a, b)


def test_second_derivatives_are_refused():
    q, k, v, *_ = attention_arguments()
    (first,) = torch.autograd.grad(violin.attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="violin::_attention_backward"):
        first.sum().backward()
    decay = log_decay(8, 2, 0, 4).requires_grad_()
    (first,) = torch.autograd.grad(violin.decay_mask(ranks(6), decay).sum(), decay, create_graph=True)
    with pytest.raises(RuntimeError, match="violin::_decay_mask_backward"):
        first.sum().backward()


def test_mistakes_are_python_errors_that_name_the_argument():
    q, k, v, gain, _, _ = (t.detach() for t in attention_arguments())
    with pytest.raises(ValueError, match=r"k has shape \[4, 3, 7, 7\]"):
        violin.attention(q, k[..., :7], v)
    with pytest.raises(TypeError, match="v is Double and q is Float"):
        violin.attention(q, k, v.double())
    with pytest.raises(ValueError, match="q has stride 5"):
        violin.attention(q.transpose(2, 3).contiguous().transpose(2, 3), k, v)
    with pytest.raises(ValueError, match="gain has 3 groups"):
        violin.attention(q, k, v, gain[:1].expand(3, -1, -1, -1))
    with pytest.raises(RuntimeError, match="k is on meta and q on cpu"):
        violin.attention(q, k.to("meta"), v)
    with pytest.raises(TypeError, match="ranks is Long"):
        violin.decay_mask(ranks(6).long(), log_decay(8, 2, 0, 4))
    with pytest.raises(ValueError, match="ranks contain -1"):
        violin.decay_mask(ranks(6) - 1, log_decay(8, 2, 0, 4))
    with pytest.raises(ValueError, match="hilbrt"):
        violin.curve_ranks("hilbrt", [2, 2])
    # Tensors without data are held to the same.
    with pytest.raises(ValueError, match=r"k has shape \[4, 3, 7, 7\]"):
        violin.attention(q.to("meta"), k[..., :7].to("meta"), v.to("meta"))


@pytest.mark.parametrize("path", ["reference", "plain", "sse9"])
def test_environment_selects_the_path(path):
    code = (
        "import torch; torch.ops.load_library(%r); q = torch.ones(1, 1, 3, 4); "
        "print(torch.ops.violin.attention(q, q, q).sum().item())" % LIBRARY
    )
    environment = {**os.environ, "VIOLIN_PATH": path}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    if path == "sse9":
        assert done.returncode != 0 and "choose one of auto, reference, plain" in done.stderr
    else:
        assert done.returncode == 0 and float(done.stdout) == 12, done.stderr
