"""ForkMerge around an unmodified GRPOTrainer of trl: the task weights of a branch are its reward weights.

Which rewards help a policy to what is wanted of it? The model is built from a config, so nothing is downloaded; with
one from a hub only `make_model` and `make_tokenizer` change.
"""

import gc
import tempfile

import torch
from datasets import Dataset, disable_progress_bars
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer

import forkmerge as fm

LETTERS, LENGTH = "abcdefghijklmnopqrstuvwxyz", 6


def is_sung(completions: list[str], **_) -> list[float]:
    """What is wanted, and rare at first: four vowels of six letters."""
    return [float(share >= 4 / LENGTH) for share in share_of_vowels(completions)]


def share_of_vowels(completions: list[str], **_) -> list[float]:
    return [sum(letter in "aeiou" for letter in text.split()) / LENGTH for text in completions]


def share_of_z(completions: list[str], **_) -> list[float]:
    return [text.split().count("z") / LENGTH for text in completions]


REWARDS = {"sung": is_sung, "vowels": share_of_vowels, "z": share_of_z}
BRANCHES = {"sung alone": {"sung": 1.0}, "+ vowels": {"sung": 1.0, "vowels": 1.0}, "+ z": {"sung": 1.0, "z": 1.0}}
PROMPTS = Dataset.from_dict({"prompt": list(LETTERS)})


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = {word: index for index, word in enumerate(["<pad>", "<eos>", *LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=28, eos_token_id=1, pad_token_id=0, bos_token_id=None, **sizes))


TOKENIZER = make_tokenizer()


def make_trainer(branch, steps: int, folder: str) -> GRPOTrainer:
    config = GRPOConfig(
        output_dir=folder,
        max_steps=steps,
        reward_weights=list(branch.task_weights.values()),
        per_device_train_batch_size=32,
        num_generations=8,
        max_completion_length=LENGTH,
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
    rewards = [REWARDS[task] for task in branch.task_weights]
    return GRPOTrainer(
        model=branch.model, reward_funcs=rewards, args=config, train_dataset=PROMPTS, processing_class=TOKENIZER
    )


def score(model: torch.nn.Module) -> float:
    """Sample four answers to every prompt, with the same random numbers for every candidate."""
    torch.manual_seed(1)
    prompts = TOKENIZER(list(PROMPTS["prompt"]) * 4, return_tensors="pt")
    sampled = model.generate(**prompts, do_sample=True, max_new_tokens=LENGTH, pad_token_id=0)
    texts = TOKENIZER.batch_decode(sampled[:, prompts.input_ids.shape[1] :], skip_special_tokens=True)
    return sum(is_sung(texts)) / len(texts)


def main(folder: str) -> None:
    model = make_model()
    for outcome in fm.rounds(
        model, BRANCHES, lambda branch, steps: make_trainer(branch, steps, folder), score, count=2, steps=6
    ):
        print(outcome)


if __name__ == "__main__":
    gc.freeze()  # every train() collects garbage: it need not search all that was imported
    disable_progress_bars()
    logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as name:
        main(name)
