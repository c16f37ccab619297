"""Gains in the 16-bit form that GPU kernels read: made of a mask's parameters, for all layers together, frozen."""

import io
import os
import pickle

import pytest
import torch
from models import build

import violin


@pytest.mark.parametrize("compiled", [False, True])
def test_packed_gains_without_a_gpu(compiled, monkeypatch):
    """The way of 16 bits on a GPU, on tensors without data: one graph, and every parameter of the masks has a gradient."""
    monkeypatch.setattr(violin.ViolinMask, "_packable", lambda mask, dtype: dtype == torch.bfloat16)
    model = violin.plug(build("vit"), init="spread").train().to("meta").bfloat16()
    for _, mask in violin.masks(model):
        mask.float()
    function = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    x = torch.empty(2, 3, 32, 32, device="meta", dtype=torch.bfloat16)
    function(x).float().square().sum().backward()
    assert all(p.grad.shape == p.shape for p in violin.mask_parameters(model))
    tables = mask.build_packed(model.patch_embed.grid_size, 1, torch.bfloat16)
    assert tables.packed and tables.handle.shape == (3, 17, 17) and tables.handle.requires_grad
    torch._dynamo.reset()


@pytest.mark.parametrize("limit", [None, 0])
def test_packed_gains_of_all_layers_in_one_call(limit, monkeypatch):
    """In compiled code without gradients, where nothing has to be joined on the way back; memory is limited."""
    monkeypatch.setattr(violin.ViolinMask, "_packable", lambda mask, dtype: dtype == torch.bfloat16)
    if limit is not None:
        monkeypatch.setattr("violin.grids.TOGETHER", limit)
    model = violin.plug(build("vit"), init="spread").eval().to("meta").bfloat16()
    for _, mask in violin.masks(model):
        mask.float()
    calls = []

    def backend(graph, _):
        calls.extend(node for node in graph.graph.nodes if "_decay_gain" in str(node.target))
        return graph.forward

    x = torch.empty(2, 3, 32, 32, device="meta", dtype=torch.bfloat16)
    with torch.no_grad():
        torch.compile(model, fullgraph=True, backend=backend)(x)
    layers = len(model.blocks)
    assert layers > 1 and len(calls) == (1 if limit is None else layers)
    assert all(mask._given_packed is None for _, mask in violin.masks(model))
    torch._dynamo.reset()
    calls.clear()
    torch.compile(model, fullgraph=True, backend=backend)(x)
    assert len(calls) == layers
    together = mask.build_packed_together([mask], model.patch_embed.grid_size, 1, torch.bfloat16)
    alone = mask.build_packed(model.patch_embed.grid_size, 1, torch.bfloat16)
    assert [t.gain.shape for t in together] == [alone.gain.shape] * 2 and all(t.gain.is_contiguous() for t in together)
    torch._dynamo.reset()


def test_compiled_inference_in_16_bits_on_a_gpu():
    if not torch.cuda.is_available() or os.environ.get("VIOLIN_PATH") == "reference":
        pytest.skip("no CUDA device, or its kernels are not to be used")
    model = violin.plug(build("vit"), init="spread").eval().cuda()
    x = torch.randn(2, 3, 32, 32).cuda()
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        expected = model(x).float()
        got = torch.compile(model, fullgraph=True)(x).float()
    assert (got - expected).norm() <= 3e-2 * expected.norm()
    torch._dynamo.reset()


@pytest.mark.parametrize("compiled", [False, True])
def test_masks_learn_in_16_bits_on_a_gpu(compiled, monkeypatch):
    """Gains are packed as they are made there: the same outputs and gradients as with tables, but for rounding."""
    if not torch.cuda.is_available() or os.environ.get("VIOLIN_PATH") == "reference":
        pytest.skip("no CUDA device, or its kernels are not to be used")
    x = torch.randn(2, 3, 32, 32).cuda()
    results = []
    for packs in (True, False):
        monkeypatch.setattr(violin.ops, "packs_gains", lambda packs=packs: packs)
        torch.manual_seed(0)
        model = violin.plug(build("vit"), init="spread").train().cuda()
        mask = model.blocks[0].attn.violin
        assert mask.packs(torch.bfloat16, model.patch_embed.grid_size, 1) == packs
        assert not mask.packs(torch.float32, model.patch_embed.grid_size, 1)
        function = torch.compile(model, fullgraph=True) if compiled else model
        with torch.autocast("cuda", torch.bfloat16):
            out = function(x).float()
        out.square().sum().backward()
        results.append([out.detach(), *(p.grad for p in violin.mask_parameters(model))])
        torch._dynamo.reset()
    for a, b in zip(*results, strict=True):
        assert (a - b).norm() <= 3e-2 * b.norm()  # 0 for the decays of the last block: the class token alone is read


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_freezing_for_16_bits(device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    model = violin.plug(build("vit"), init="spread").eval().to(device)
    x = torch.randn(2, 3, 32, 32).to(device)
    with torch.no_grad(), torch.autocast(device, torch.bfloat16):
        expected = model(x)
        expected_maps = violin.attention_maps(model, x, [0, 3])
        violin.freeze(model, (32, 32), dtype=torch.bfloat16)
        mask = model.blocks[0].attn.violin
        assert mask.tables(model.patch_embed.grid_size, 1).packed == (device == "cuda")
        assert torch.equal(model(x), expected)
        torch.testing.assert_close(violin.attention_maps(model, x, [0, 3]), expected_maps)
    copied = pickle.loads(pickle.dumps(model))
    with torch.no_grad(), torch.autocast(device, torch.bfloat16):
        assert torch.equal(copied(x), expected)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    elsewhere = torch.load(buffer, map_location="cpu", weights_only=False)
    with torch.no_grad():
        assert elsewhere(x.cpu()).isfinite().all()  # not packed there
    violin.thaw(model)
    assert not mask.tables(model.patch_embed.grid_size, 1).packed
    with pytest.raises(violin.Error, match="dtype is torch.float64; expected torch.float16"):
        violin.freeze(model, (32, 32), dtype=torch.float64)
