"""Classes with the structure of torchvision's VisionTransformer and of the original DINO code, for tests without them."""

import math
from functools import partial

import torch
from torch import nn


class EncoderBlock(nn.Module):
    def __init__(self, heads, dim, mlp_dim, dropout):
        super().__init__()
        self.ln_1 = nn.LayerNorm(dim, eps=1e-6)
        self.self_attention = nn.MultiheadAttention(dim, heads, dropout=dropout, batch_first=True)
        self.ln_2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = nn.Sequential(
            nn.Linear(dim, mlp_dim), nn.GELU(), nn.Dropout(0.0), nn.Linear(mlp_dim, dim), nn.Dropout(0.0)
        )

    def forward(self, x):
        y = self.ln_1(x)
        y, _ = self.self_attention(y, y, y, need_weights=False)
        x = x + y
        return x + self.mlp(self.ln_2(x))


class Encoder(nn.Module):
    def __init__(self, tokens, depth, heads, dim, mlp_dim, dropout):
        super().__init__()
        self.pos_embedding = nn.Parameter(torch.randn(1, tokens, dim) * 0.02)
        self.layers = nn.Sequential()
        for i in range(depth):
            self.layers.add_module(f"encoder_layer_{i}", EncoderBlock(heads, dim, mlp_dim, dropout))
        self.ln = nn.LayerNorm(dim, eps=1e-6)

    def forward(self, x):
        return self.ln(self.layers(x + self.pos_embedding))


class TorchvisionTransformer(nn.Module):
    def __init__(self, image_size=32, patch_size=8, depth=2, heads=3, dim=24, mlp_dim=48, classes=5, dropout=0.0):
        super().__init__()
        self.image_size, self.patch_size, self.hidden_dim = image_size, patch_size, dim
        self.conv_proj = nn.Conv2d(3, dim, patch_size, patch_size)
        self.class_token = nn.Parameter(torch.randn(1, 1, dim) * 0.02)
        self.encoder = Encoder((image_size // patch_size) ** 2 + 1, depth, heads, dim, mlp_dim, dropout)
        self.heads = nn.Sequential()
        self.heads.add_module("head", nn.Linear(dim, classes))

    def forward(self, images):
        x = self.conv_proj(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], 1)
        return self.heads(self.encoder(x)[:, 0])


class DinoPatches(nn.Module):
    def __init__(self, img_size, patch_size, dim):
        super().__init__()
        self.img_size, self.patch_size = img_size, patch_size
        self.num_patches = (img_size // patch_size) ** 2
        self.proj = nn.Conv2d(3, dim, patch_size, patch_size)

    def forward(self, images):
        return self.proj(images).flatten(2).transpose(1, 2)


class DinoAttention(nn.Module):
    """Returns its output and the attention map."""

    def __init__(self, dim, num_heads, drop=0.0):
        super().__init__()
        self.num_heads, self.scale = num_heads, (dim // num_heads) ** -0.5
        self.qkv = nn.Linear(dim, 3 * dim)
        self.attn_drop = nn.Dropout(drop)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(drop)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, c // self.num_heads).permute(2, 0, 3, 1, 4)
        weights = self.attn_drop((q @ k.transpose(-2, -1) * self.scale).softmax(-1))
        out = (weights @ v).transpose(1, 2).reshape(b, n, c)
        return self.proj_drop(self.proj(out)), weights


class DinoMlp(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim)

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


class DinoBlock(nn.Module):
    def __init__(self, dim, num_heads, norm):
        super().__init__()
        self.norm1, self.attn, self.norm2 = norm(dim), DinoAttention(dim, num_heads), norm(dim)
        self.mlp = DinoMlp(dim, 4 * dim)

    def forward(self, x, return_attention=False):
        y, weights = self.attn(self.norm1(x))
        if return_attention:
            return weights
        x = x + y
        return x + self.mlp(self.norm2(x))


class DinoTransformer(nn.Module):
    def __init__(self, img_size=32, patch_size=4, embed_dim=24, depth=2, num_heads=2):
        super().__init__()
        norm = partial(nn.LayerNorm, eps=1e-6)
        self.embed_dim = embed_dim
        self.patch_embed = DinoPatches(img_size, patch_size, embed_dim)
        self.cls_token = nn.Parameter(torch.randn(1, 1, embed_dim) * 0.02)
        self.pos_embed = nn.Parameter(torch.randn(1, self.patch_embed.num_patches + 1, embed_dim) * 0.02)
        self.blocks = nn.ModuleList([DinoBlock(embed_dim, num_heads, norm) for _ in range(depth)])
        self.norm = norm(embed_dim)
        self.head = nn.Identity()

    def positions(self, tokens, height, width):
        native = self.pos_embed.shape[1] - 1
        if tokens - 1 == native and height == width:
            return self.pos_embed
        side, patch = math.isqrt(native), self.patch_embed.patch_size
        table = self.pos_embed[:, 1:].reshape(1, side, side, -1).permute(0, 3, 1, 2)
        factor = [(size // patch + 0.1) / side for size in (height, width)]
        table = nn.functional.interpolate(table, scale_factor=factor, mode="bicubic")
        return torch.cat([self.pos_embed[:, :1], table.permute(0, 2, 3, 1).flatten(1, 2)], 1)

    def prepare_tokens(self, images):
        x = self.patch_embed(images)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], 1)
        return x + self.positions(x.shape[1], *images.shape[-2:])

    def forward(self, images):
        x = self.prepare_tokens(images)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)[:, 0]

    def get_last_selfattention(self, images):
        x = self.prepare_tokens(images)
        for block in self.blocks[:-1]:
            x = block(x)
        return self.blocks[-1](x, return_attention=True)


class Wrapped(nn.Module):
    """A layer that calls another, as adapters do."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)
