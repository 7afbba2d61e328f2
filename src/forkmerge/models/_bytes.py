"""A small language model over bytes, of the kind of Llama: rotary positions, RMSNorm, gated feed-forward layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

TOKENS = 257  # all bytes, and the beginning of a document


class ByteLanguageModel(nn.Module):
    """Predicts every next byte; the embedding is the output layer, too.

    Args:
        width: Size of the representation; a multiple of twice the heads.
        depth: Layers.
        heads: Heads of the attention.
    """

    def __init__(self, width: int = 96, depth: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, width)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        self.layers = nn.ModuleList(DecoderLayer(width, heads) for _ in range(depth))
        self.norm = nn.RMSNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [n, length, tokens] of the next bytes, from bytes [n, length]."""
        hidden = self.embedding(tokens) * self.embedding.embedding_dim**0.5
        for layer in self.layers:
            hidden = layer(hidden)
        logits: Tensor = functional.linear(self.norm(hidden), self.embedding.weight)
        return logits


class DecoderLayer(nn.Module):
    """Causal attention and a gated feed-forward layer, each on a residual path.

    Args:
        width: Size of the representation.
        heads: Heads of the attention.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, inner = heads, width * 8 // 3
        self.before_attention, self.before_gate = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the representation after the layer, [n, length, width]."""
        count, length, width = hidden.shape
        joined = self.attention(self.before_attention(hidden)).view(count, length, 3, self.heads, -1)
        query, key, value = joined.permute(2, 0, 3, 1, 4)  # [n, heads, length, width / heads]
        turns = _turns(length, query.shape[-1], hidden)
        mixed = functional.scaled_dot_product_attention(_turn(query, *turns), _turn(key, *turns), value, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(count, length, width))
        opened, passed = self.gate(self.before_gate(hidden)).chunk(2, -1)
        result: Tensor = hidden + self.down(functional.silu(opened) * passed)
        return result


def _turns(length: int, size: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the angles of every position, [length, size / 2]."""
    rates = 10000.0 ** (-torch.arange(0, size, 2, device=like.device) / size)
    angles = torch.outer(torch.arange(length, device=like.device), rates)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def _turn(vectors: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    first, second = vectors.chunk(2, -1)
    return torch.cat([first * cosines - second * sines, first * sines + second * cosines], -1)
