"""Fine-tune only the adapters of a transformers model: a fork then copies the adapters, never the backbone.

The model is built from a config, so nothing is downloaded; with weights from a hub only `backbone` changes.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset
from transformers import BertConfig, BertModel

import forkmerge as fm

LENGTH, VOCABULARY = 12, 40


class LowRank(nn.Module):
    """A frozen linear layer plus a trainable update of low rank."""

    def __init__(self, linear: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.linear = linear
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.up = nn.Linear(rank, linear.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(inputs) + self.up(self.down(inputs))


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=128,
            max_position_embeddings=LENGTH,
        )
        self.backbone = BertModel(config, add_pooling_layer=False).requires_grad_(False)
        for layer in self.backbone.encoder.layer:
            layer.attention.self.query = LowRank(layer.attention.self.query)
            layer.attention.self.value = LowRank(layer.attention.self.value)
        self.head = nn.Linear(64, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(input_ids=tokens).last_hidden_state.mean(1))


def sentences(count: int, seed: int, flipped: bool = False) -> TensorDataset:
    """Random tokens; the label says whether low tokens are in the majority (or, flipped, the contrary)."""
    tokens = torch.randint(VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(seed))
    labels = ((tokens < VOCABULARY // 2).sum(1) > LENGTH // 2).long()
    return TensorDataset(tokens, 1 - labels if flipped else labels)


def losses(model: nn.Module, batch: list[torch.Tensor], tasks: list[str], context: fm.Context) -> dict:
    tokens, labels = batch
    return {task: cross_entropy(model(tokens), labels) for task in tasks}


def recipe(steps: int = 120) -> fm.Recipe:
    problem = fm.Problem(
        target="reviews",
        streams=[
            fm.Stream(sentences(40, seed=1), losses, tasks="reviews", batch_size=16),
            fm.Stream(sentences(500, seed=2), losses, tasks="news", batch_size=16),
            fm.Stream(sentences(500, seed=3, flipped=True), losses, tasks="irony", batch_size=16),
        ],
        validation=fm.Evaluation(sentences(200, seed=4), fm.accuracy),
        test=fm.Evaluation(sentences(500, seed=5), fm.accuracy),
    )
    algorithm = fm.ForkMerge("per_auxiliary", interval=max(steps // 4, 1))
    return fm.Recipe(problem, Classifier, fm.OptimizerOf("AdamW", lr=1e-2), steps, algorithm)


if __name__ == "__main__":
    job = recipe()
    run = job.fit()
    trained = sum(p.numel() for p in run.model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in run.model.parameters())
    print(run)
    print(f"each branch holds {trained:,} of {total:,} parameters; the rest is shared")
    print(f"test: {fm.measure(run.model, job.problem.test['reviews'])}")
