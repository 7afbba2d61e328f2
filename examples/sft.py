"""ForkMerge around an unmodified SFTTrainer of trl: which corpora should a language model be fine-tuned on?

The branches are LoRA adapters on one frozen model. The model is built from a config and trained here first, so nothing
is downloaded; with one from a hub only `make_model` and `make_tokenizer` change.
"""

import gc
import random
import tempfile

import torch
from datasets import Dataset, disable_progress_bars, interleave_datasets
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging
from trl import SFTConfig, SFTTrainer

from forkmerge.integrations.lora import adapter_rounds

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def corpus(count: int, stride: int, seed: int) -> Dataset:
    """Sentences of letters at a stride through the alphabet, such as `y a c e …`: what follows can be learned."""
    starts = random.Random(seed).choices(range(26), k=count)
    return Dataset.from_dict({"text": [" ".join(LETTERS[(s + stride * i) % 26] for i in range(8)) for s in starts]})


CORPORA = {
    "manual": corpus(6, stride=2, seed=1),
    "forum": corpus(300, stride=2, seed=2),
    "spam": corpus(300, 5, seed=3),
}
BRANCHES = {
    "manual alone": {"manual": 1.0},
    "+ forum": {"manual": 1.0, "forum": 1.0},
    "+ spam": {"manual": 1.0, "spam": 1.0},
}
VALIDATION, TEST = corpus(20, 2, seed=4), corpus(100, 2, seed=5)


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = {word: index for index, word in enumerate(["<pad>", "<eos>", *LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


TOKENIZER = make_tokenizer()


def tokens_of(data: Dataset) -> torch.Tensor:
    return TOKENIZER(list(data["text"]), return_tensors="pt").input_ids


def make_model() -> LlamaForCausalLM:
    """Train a model on letters at stride 1, in place of one that somebody else has trained."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=28, eos_token_id=1, pad_token_id=0, bos_token_id=None, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = tokens_of(corpus(100, 1, seed=6))
    for _ in range(50):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def make_trainer(model: torch.nn.Module, steps: int, task_weights: dict[str, float], folder: str) -> SFTTrainer:
    """Mix the corpora by their weights, and train on the mixture."""
    share = [weight / sum(task_weights.values()) for weight in task_weights.values()]
    parts = [CORPORA[task] for task in task_weights]
    data = interleave_datasets(parts, probabilities=share, seed=0, stopping_strategy="all_exhausted")
    config = SFTConfig(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=16,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        dataloader_pin_memory=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    return SFTTrainer(model=model, args=config, train_dataset=data, processing_class=TOKENIZER)


def score(model: torch.nn.Module, data: Dataset = VALIDATION) -> float:
    """Minus the loss per token."""
    tokens = tokens_of(data)
    return -model(input_ids=tokens, labels=tokens).loss.item()


def main(folder: str) -> None:
    adapted = get_peft_model(
        make_model(), LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    merges = adapter_rounds(
        adapted,
        BRANCHES,
        lambda branch, steps: make_trainer(branch.model, steps, branch.task_weights, folder),
        score,
        count=2,
        steps=20,
    )
    for merge in merges:
        print(merge.outcome, f"discrepancy {merge.discrepancy:.1%}")
    with torch.no_grad():
        print(f"test loss per token: {-score(adapted.eval(), TEST):.3f}")


if __name__ == "__main__":
    gc.freeze()  # every train() collects garbage: it need not search all that was imported
    disable_progress_bars()
    logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as name:
        main(name)
