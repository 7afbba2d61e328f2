"""ForkMerge around an unmodified SentenceTransformerTrainer, with a dict of data sets and a dict of losses.

Which pairs of sentences should an embedding be trained on? A branch gets the data sets of its tasks, and their losses
times the tasks' weights. The model is built from a config, so nothing is downloaded; with one from a hub only
`make_model` changes.
"""

import gc
import random
import tempfile

import torch
from datasets import Dataset, disable_progress_bars
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator
from sentence_transformers.sentence_transformer.losses import CosineSimilarityLoss, MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast
from transformers.utils import logging

import forkmerge as fm

TOPICS = [[f"word{topic}{letter}" for letter in "abcdef"] for topic in range(12)]  # words of one topic mean the same
WORDS = ["[PAD]", *(word for topic in TOPICS for word in topic)]


def sentence(chance: random.Random, topic: int) -> str:
    return " ".join(chance.choices(TOPICS[topic], k=3))


def pairs(count: int, seed: int) -> Dataset:
    """Two sentences that mean the same."""
    chance = random.Random(seed)
    topics = chance.choices(range(len(TOPICS)), k=count)
    return Dataset.from_dict({side: [sentence(chance, topic) for topic in topics] for side in ("anchor", "positive")})


def rated(count: int, seed: int, spoiled: bool = False) -> Dataset:
    """Two sentences and how alike they are (spoiled: the contrary)."""
    chance = random.Random(seed)
    first = chance.choices(range(len(TOPICS)), k=count)
    second = [topic if chance.random() < 0.5 else chance.randrange(len(TOPICS)) for topic in first]
    columns = {"one": [sentence(chance, t) for t in first], "two": [sentence(chance, t) for t in second]}
    labels = [float((a == b) != spoiled) for a, b in zip(first, second, strict=True)]
    return Dataset.from_dict({**columns, "label": labels})


DATA = {"search": pairs(16, seed=1), "questions": rated(400, seed=2), "clicks": rated(400, seed=3, spoiled=True)}
LOSSES = {"search": MultipleNegativesRankingLoss, "questions": CosineSimilarityLoss, "clicks": CosineSimilarityLoss}
BRANCHES = {
    "search alone": {"search": 1.0},
    "+ questions": {"search": 1.0, "questions": 1.0},
    "+ clicks": {"search": 1.0, "clicks": 1.0},
}


def evaluator(seed: int) -> EmbeddingSimilarityEvaluator:
    """Return the rank correlation of similarities with ratings."""
    data = rated(200, seed)
    return EmbeddingSimilarityEvaluator(list(data["one"]), list(data["two"]), list(data["label"]), write_csv=False)


class Weighted(torch.nn.Module):
    """A loss of sentence-transformers, times a weight."""

    def __init__(self, loss: torch.nn.Module, weight: float) -> None:
        super().__init__()
        self.loss, self.weight = loss, weight

    def forward(self, *args) -> torch.Tensor:
        return self.weight * self.loss(*args)


def make_model(folder: str) -> SentenceTransformer:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    BertModel(BertConfig(vocab_size=len(WORDS), max_position_embeddings=16, **sizes)).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[PAD]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]").save_pretrained(folder)
    encoder = Transformer(folder)
    return SentenceTransformer(modules=[encoder, Pooling(encoder.get_embedding_dimension())], device="cpu")


def main(folder: str) -> None:
    def make_trainer(branch, steps: int) -> SentenceTransformerTrainer:
        arguments = SentenceTransformerTrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=16,
            learning_rate=5e-3,
            lr_scheduler_type="constant",
            multi_dataset_batch_sampler="round_robin",
            use_cpu=True,
            dataloader_pin_memory=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        tasks = branch.task_weights
        losses = {task: Weighted(LOSSES[task](branch.model), weight) for task, weight in tasks.items()}
        data = {task: DATA[task] for task in tasks}
        return SentenceTransformerTrainer(branch.model, arguments, train_dataset=data, loss=losses)

    def score(model: torch.nn.Module) -> float:
        return validation(model)["spearman_cosine"]

    validation, test = evaluator(seed=4), evaluator(seed=5)
    model = make_model(folder)
    for outcome in fm.rounds(model, BRANCHES, make_trainer, score, count=2, steps=20):
        print(outcome)
    print(f"test: rank correlation {test(model)['spearman_cosine']:.3f}")


if __name__ == "__main__":
    gc.freeze()  # every train() collects garbage: it need not search all that was imported
    disable_progress_bars()
    logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as name:
        main(name)
