"""The language model over bytes: causal, of the size it says, and able to learn."""

from __future__ import annotations

import torch

from forkmerge.models import ByteLanguageModel


def test_it_has_a_quarter_of_a_million_weights() -> None:
    assert sum(weight.numel() for weight in ByteLanguageModel().parameters()) == 246_336


def test_no_byte_sees_the_ones_after_it() -> None:
    torch.manual_seed(0)
    model, tokens = ByteLanguageModel(16, 2, 2), torch.randint(0, 257, [2, 12])
    changed = tokens.clone()
    changed[:, 7:] = 3
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_the_order_of_bytes_matters() -> None:
    torch.manual_seed(0)
    model = ByteLanguageModel(16, 2, 2)
    one, other = torch.tensor([[1, 2, 3, 9]]), torch.tensor([[3, 1, 2, 9]])
    assert not torch.allclose(model(one)[:, -1], model(other)[:, -1], atol=1e-4)


def test_it_learns_to_count() -> None:
    torch.manual_seed(0)
    model, tokens = ByteLanguageModel(16, 1, 2), torch.arange(32).repeat(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(60):
        loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.5
