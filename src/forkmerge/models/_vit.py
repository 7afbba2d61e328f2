"""Vision transformers, with the names of published weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from forkmerge.errors import ProblemError


class _PatchEmbed(nn.Module):
    def __init__(self, patch: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, width, patch, patch)

    def forward(self, x: Tensor) -> Tensor:
        patches: Tensor = self.proj(x)
        return patches.flatten(2).transpose(1, 2)


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self._heads = heads

    def forward(self, x: Tensor) -> Tensor:
        n, tokens, width = x.shape
        query, key, value = self.qkv(x).view(n, tokens, 3, self._heads, -1).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(query, key, value)
        result: Tensor = self.proj(mixed.transpose(1, 2).reshape(n, tokens, width))
        return result


class _MLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fc2(nn.functional.gelu(self.fc1(x)))
        return result


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, eps: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=eps)
        self.attn = _Attention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=eps)
        self.mlp = _MLP(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


class ViT(nn.Module):
    """A vision transformer without its classifier: images to the class token's features; by default ViT-Base/16.

    Args:
        image: Side of the square input images.
        patch: Side of a patch.
        width: Features of a token.
        depth: Blocks.
        heads: Attention heads.
        eps: Of the layer norms.

    Attributes:
        channels: Features that come out.

    References:
        Dosovitskiy et al., An Image is Worth 16x16 Words, ICLR 2021.
    """

    def __init__(
        self,
        image: int = 224,
        patch: int = 16,
        width: int = 768,
        depth: int = 12,
        heads: int = 12,
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        if image % patch or width % heads:
            raise ProblemError(
                f"image must be a multiple of patch and width of heads, got {image} / {patch} and {width} / {heads}."
            )
        self.patch_embed = _PatchEmbed(patch, width)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, (image // patch) ** 2 + 1, width))
        self.blocks = nn.ModuleList(_Block(width, heads, eps) for _ in range(depth))
        self.norm = nn.LayerNorm(width, eps=eps)
        self.channels = width

    def forward(self, x: Tensor) -> Tensor:
        """Return features [n, channels]."""
        patches = self.patch_embed(x)
        x = torch.cat([self.cls_token.expand(len(patches), -1, -1), patches], 1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.norm(x[:, 0])
        return result
