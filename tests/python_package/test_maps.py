"""Attention maps of plugged and vanilla models."""


import pytest
import torch
from models import build, images, run

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
