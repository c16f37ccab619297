"""What cannot be plugged, frozen or asked for is refused by name, with a remedy."""


import pytest
import torch
from models import TINY, build, images
from standins import DinoAttention, Wrapped
from torch import nn

import violin


def test_errors_name_what_cannot_be_plugged(timm):
    from timm.models.swin_transformer import SwinTransformer
    from timm.models.vision_transformer import ParallelScalingBlock, VisionTransformer

    swin = SwinTransformer(img_size=32, patch_size=4, embed_dim=24, depths=(1,), num_heads=(1,), window_size=4)
    with pytest.raises(violin.Error, match=r"layers\.0\.blocks\.0\.attn \(WindowAttention\)"):
        violin.plug(swin)
    options = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
    with pytest.raises(violin.Error, match=r"blocks\.0 \(ParallelScalingBlock\)"):
        violin.plug(VisionTransformer(**options, block_fn=ParallelScalingBlock))
    with pytest.raises(violin.Error, match=r"patch_drop \(PatchDropout\)"):
        violin.plug(VisionTransformer(**options, patch_drop_rate=0.5))
    with pytest.raises(violin.Error, match=r"blocks\.0\.attn \(DiffAttention\)"):
        violin.plug(VisionTransformer(**options, attn_layer="diff"))
    with pytest.raises(violin.Error, match="Linear is no vision transformer"):
        violin.plug(nn.Linear(2, 2))

    class Odd(type(VisionTransformer(**options).blocks[0].attn)):
        def forward(self, x, attn_mask=None, is_causal=False):
            return super().forward(x, attn_mask, is_causal) + x

    class Turned(type(VisionTransformer(**options).blocks[0].attn)):
        def forward(self, x, rope=None):
            return super().forward(x)

    odd = VisionTransformer(**options)
    odd.blocks[1].attn = Odd(24, 3)
    with pytest.raises(violin.Error, match=r"blocks\.1\.attn \(Odd\) cannot be plugged: it computes something else"):
        violin.plug(odd)
    assert not violin.is_plugged(odd) and not odd.patch_embed.proj._forward_hooks
    odd.blocks[1].attn = Turned(24, 3)
    with pytest.raises(violin.Error, match=r"blocks\.1\.attn \(Turned\).*rotates"):
        violin.plug(odd)


def test_mistakes_in_the_order_of_calls():
    model = violin.plug(build("torchvision"))
    with pytest.raises(violin.Error, match="has a mask already"):
        violin.plug(model)
    with pytest.raises(violin.Error, match="inside of OptimizedModule"):
        violin.plug(torch.compile(build("torchvision")))
    with pytest.raises(violin.Error, match="blocks.*18 tokens|18 tokens"):
        model.encoder.layers[0](torch.zeros(1, 18, 24))


def test_dropped_patches_are_no_smaller_grid(timm):
    from timm.layers import PatchDropout

    model = violin.plug(build("dynamic"), init="spread").train()
    x = images((64, 64))
    model(x)
    model.patch_drop = PatchDropout(0.75)  # 16 of 64 patches
    with pytest.raises(violin.Error, match="drop no patches"):
        model(x)
    with pytest.raises(violin.Error, match="drop no patches"):
        model.blocks(torch.zeros(1, 17, 24))


def test_freezing_names_what_is_wrong():
    for name in ("vit", "dynamic", "torchvision"):
        model = violin.plug(build(name))
        with pytest.raises(violin.Error, match=r"image_size is 4, of which the model makes no patches \("):
            violin.freeze(model, 4)
        assert not any(mask.frozen for _, mask in violin.masks(model))
    with pytest.raises(violin.Error, match=r"the model has no mask to freeze; violin\.plug\(model\)"):
        violin.freeze(build("torchvision"))
    for function in (violin.masks, violin.thaw, violin.freeze, violin.mask_parameters, violin.is_plugged):
        with pytest.raises(violin.Error, match="the model is a str; expected a torch.nn.Module"):
            function("x")


def test_attention_that_is_given_more_than_tokens_is_refused(timm):
    from timm.models.vision_transformer_relpos import VisionTransformerRelPos

    model = VisionTransformerRelPos(**TINY, rel_pos_type="bias", shared_rel_pos=True)
    with pytest.raises(violin.Error, match=r"blocks\.0\.attn .*does not know: shared_rel_pos"):
        violin.plug(model)
    assert not violin.is_plugged(model)

    class Memory(DinoAttention):  # DINOv2's, whose blocks give attn_bias to lists of images alone
        def forward(self, x, attn_bias=None):
            return super().forward(x)

    model = build("dino")
    for block in model.blocks:
        block.attn.__class__ = Memory
    violin.plug(model)


def test_blocks_that_cannot_be_plugged_come_before_a_missing_grid(timm):
    model = build("vit")
    del model.patch_embed.grid_size
    model.patch_embed.img_size = None
    with pytest.raises(violin.Error, match=r"give plug\(grid="):
        violin.plug(model)
    del model.blocks[0].attn.num_heads
    with pytest.raises(violin.Error, match=r"blocks\.0 \(Block\) has 0 attention layers"):
        violin.plug(model)


def test_mistakes_in_options_name_them():
    for options, message in [
        ({"curves": None}, "curves is None; expected a set"),
        ({"blocks": 0}, "blocks is 0; expected a list of numbers, or None for all"),
        ({"init": "spread", "decay": "0.5"}, "decay is '0.5'; expected None"),
        ({"grid": (8,)}, r"grid is \(8,\); expected \(height, width\)"),
        ({"curves": "", "prefix_decay": "learned"}, "prefix_decay is 'learned'; expected 'one' where there is no curve"),
        ({"table_limit": "1 GB"}, "table_limit is '1 GB'; expected a whole number from 0 on"),
    ]:
        model = build("torchvision")
        with pytest.raises(violin.Error, match=message):
            violin.plug(model, **options)
        assert not violin.is_plugged(model)
    with pytest.raises(violin.Error, match="the model is a NoneType"):
        violin.plug(None)
    with pytest.raises(violin.Error, match=r"image_size is \(32,\); expected a number or \(height, width\)"):
        violin.freeze(violin.plug(build("torchvision")), (32,))
    for options, message in [
        ({"mask": "violin"}, "mask is a str; expected a dict of ViolinMask's options"),
        ({"mask": violin.ViolinMask(3)}, "mask is for 3 heads; expected num_heads, 4"),
        ({"mask": {"curve": "hilbert"}}, "mask has an option 'curve'; there are alpha, curve_weights, curves, "),
        ({"mask": {"grid": (4, 4)}}, "mask has an option 'grid'"),
        ({"num_heads": 0}, "num_heads is 0"),
        ({"prefix": None}, "prefix is None; expected a whole number"),
    ]:
        with pytest.raises(violin.Error, match=message):
            violin.Attention(**{"dim": 32, "num_heads": 4, **options})


def test_a_wrapped_projection_is_named_with_a_remedy():
    model = build("vit")
    model.blocks[1].attn.qkv = Wrapped(model.blocks[1].attn.qkv)
    with pytest.raises(violin.Error, match=r"blocks\.1\.attn.*Wrapped for qkv.*plug the model first"):
        violin.plug(model)


def test_layers_and_groups_name_what_they_were_given(timm):
    layer = violin.Attention(24, 3, mask={"curves": "z"}, grid=(4, 4), prefix=0)
    with pytest.raises(violin.Error, match=r"x is \[16, 24\]; expected \[batch, tokens, 24\]"):
        layer(torch.randn(16, 24))
    with pytest.raises(violin.Error, match=r"attn_mask is \[1, 5, 5\]; expected \[\.\.\., 16, 16\]"):
        layer(torch.randn(2, 16, 24), attn_mask=torch.zeros(5, 5))
    with pytest.raises(violin.Error, match="lr is '1e-4'; expected a number"):
        violin.param_groups(violin.plug(build("vit")), lr="1e-4")


def test_a_failure_of_several_lines_is_told_in_one(timm):
    model = build("vit")

    class Failing(type(model.blocks[0].attn)):
        problem = RuntimeError("first\nsecond")

        def forward(self, x, attn_mask=None, is_causal=False):
            raise self.problem

    model.blocks[1].attn = Failing(24, 3)
    for problem, told in ((Failing.problem, "first"), (AssertionError(), "AssertionError")):
        Failing.problem = problem
        with pytest.raises(violin.Error, match=rf"cannot be plugged: run on five tokens it failed \({told}\)$"):
            violin.plug(model)
