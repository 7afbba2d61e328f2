"""ForkMerge of a transformer that is sharded over ranks by FSDP2: two mixtures, eight rounds.

torchrun --nproc-per-node 2 examples/fsdp.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import forkmerge as fm

CONFIG = {"vocabulary": 12, "length": 16, "width": 32, "heads": 4, "layers": 2}
BRANCHES = {"target": {"target": 1.0}, "with related": {"target": 1.0, "related": 1.0}}
ROUNDS, STEPS, BATCH = 8, 5, 16


class Transformer(nn.Module):
    def __init__(self, vocabulary, length, width, heads, layers):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True) for _ in range(layers)
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        hidden = self.tokens(tokens) + self.positions(torch.arange(length, device=tokens.device))
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        return self.head(hidden.flatten(0, 1))  # [batch × length, vocabulary]


def sequences(count, step, seed, noise=0.0):
    """Sequences that count upwards by `step`, with some tokens replaced."""
    draw = torch.Generator().manual_seed(seed)
    start = torch.randint(CONFIG["vocabulary"], (count, 1), generator=draw)
    tokens = (start + step * torch.arange(CONFIG["length"] + 1)) % CONFIG["vocabulary"]
    other = torch.randint(CONFIG["vocabulary"], tokens.shape, generator=draw)
    return torch.where(torch.rand(tokens.shape, generator=draw) < noise, other, tokens)


def loss_of(model, tokens):
    return cross_entropy(model(tokens[:, :-1]), tokens[:, 1:].flatten())


dist.init_process_group("cuda:nccl,cpu:gloo" if torch.cuda.is_available() else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
device = torch.device(f"cuda:{rank % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu")

torch.manual_seed(0)
model = Transformer(**CONFIG).to(device)
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

# Few and noisy sequences of the target; more, and clean, of a task that is related.
data = {"target": sequences(32, 1, 1, noise=0.3).to(device), "related": sequences(256, 1, 2, noise=0.1).to(device)}
held_out = sequences(64, 1, 3).to(device)

forked = fm.fork(model, optimizer, BRANCHES, in_place=True)
for index in range(ROUNDS):
    for branch in forked:
        for step in range(index * STEPS, (index + 1) * STEPS):
            loss = 0.0
            for task, weight in branch.task_weights.items():
                rows = torch.arange(step * BATCH + rank, (step + 1) * BATCH, ranks) % len(data[task])  # of this rank
                loss = loss + weight * loss_of(model, data[task][rows.to(device)])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    outcome = forked.merge(score=lambda m: -loss_of(m, held_out).item())
    if rank == 0:
        shares = {name: round(share, 2) for name, share in outcome.coefficients.items()}
        print(f"round {index + 1}: {shares} score {outcome.score:.3f}")
dist.destroy_process_group()
