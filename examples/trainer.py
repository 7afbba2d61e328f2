"""ForkMerge around an unmodified Trainer of transformers: its rounds find out which data helps.

The model is built from a config, so nothing is downloaded; with weights from a hub only `make_model` changes.
"""

import gc
import tempfile

import torch
from torch.utils.data import ConcatDataset, Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
from transformers.utils import logging

import forkmerge as fm

LENGTH, VOCABULARY = 12, 40


class Sentences(Dataset):
    """Random tokens; the label says whether low tokens are in the majority (or, flipped, the contrary)."""

    def __init__(self, count: int, seed: int, flipped: bool = False) -> None:
        self.tokens = torch.randint(VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(seed))
        labels = ((self.tokens < VOCABULARY // 2).sum(1) > LENGTH // 2).long()
        self.labels = 1 - labels if flipped else labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


def make_model() -> BertForSequenceClassification:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
    )
    return BertForSequenceClassification(config)


DATA = {"reviews": Sentences(40, seed=1), "news": Sentences(400, seed=2), "irony": Sentences(400, seed=3, flipped=True)}
BRANCHES = {"reviews alone": {"reviews": 1}, "+ news": {"reviews": 1, "news": 1}, "+ irony": {"reviews": 1, "irony": 1}}
VALIDATION = fm.Evaluation(Sentences(200, seed=4), fm.accuracy)
TEST = fm.Evaluation(Sentences(500, seed=5), fm.accuracy)


def main(folder: str) -> None:
    def make_trainer(branch, steps: int) -> Trainer:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=16,
            learning_rate=3e-3,
            lr_scheduler_type="constant",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
        )
        data = ConcatDataset([DATA[task] for task in branch.task_weights])
        return Trainer(model=branch.model, args=arguments, train_dataset=data)

    def score(model: torch.nn.Module) -> float:
        return fm.measure(model, VALIDATION)["accuracy"]

    model = make_model()
    for outcome in fm.rounds(model, BRANCHES, make_trainer, score, count=4, steps=25):
        print(outcome)
    print(f"test: {fm.measure(model, TEST)}")


if __name__ == "__main__":
    gc.freeze()  # every train() collects garbage: it need not search all that was imported
    logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as name:
        main(name)
