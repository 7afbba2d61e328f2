"""Language models of transformers from a local folder: the model, whole or with adapters, and its tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from forkmerge.algorithms.fit import build_model
from forkmerge.errors import ProblemError, check_packages
from forkmerge.experiments.hf_export import TransformersFolder, without_progress_bars
from forkmerge.problem.text.windows import BEGIN, byte_windows, token_windows

_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "spiece.model", "vocab.txt")
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_BYTE_TOKENS = BEGIN + 1
# Code that lies beside a model is never run, nor asked about; nothing is looked for on a hub.
_OWN_CODE_ONLY: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}

_FACTORS = {".lora_A.": ".lora_B.", ".lora_embedding_A.": ".lora_embedding_B."}

Factors = Mapping[str, tuple[Tensor, Tensor]]
"""A and B of every layer with an adapter."""


@dataclass(frozen=True)
class LanguageModel:
    """Makes a model of transformers, and cuts text into windows of its tokens; nothing is downloaded.

    Args:
        path: A folder with config.json, or such a file; weights beside it are loaded, without any the first ones are
            random. Without a tokenizer tokens are bytes.
        full: Train all weights; otherwise LoRA adapters of all linear layers, on frozen weights.
        rank: Of the adapters.
        freeze_a: Train only the second factor of every adapter, which makes merges of factors merges of updates.
    """

    path: str
    full: bool = False
    rank: int = 8
    freeze_a: bool = False

    def __post_init__(self) -> None:
        packages = {"transformers": "transformers"} if self.full else {"transformers": "transformers", "peft": "peft"}
        check_packages("forkmerge mix", "hf" if self.full else "hf,lora", packages)
        if self.full and self.freeze_a:
            raise ProblemError("--freeze-a is about adapters: leave --full out, or --freeze-a.")
        if not self._config_file.is_file():
            raise ProblemError(f"--model {self.path}: there is no {self._config_file.name}: give a local folder.")
        if not self.full and not self.has_weights:
            raise ProblemError(f"--model {self.path} has no weights to put adapters on: train all of it, with --full.")

    @property
    def folder(self) -> Path:
        """Where config, weights and tokenizer are."""
        return Path(self.path) if Path(self.path).is_dir() else Path(self.path).parent

    @property
    def _config_file(self) -> Path:
        return Path(self.path) / "config.json" if Path(self.path).is_dir() else Path(self.path)

    @property
    def has_weights(self) -> bool:
        """Whether there are any to begin with."""
        return Path(self.path).is_dir() and any(any(self.folder.glob(pattern)) for pattern in _WEIGHTS)

    @property
    def config(self) -> Any:
        """The model's configuration."""
        from transformers import AutoConfig

        try:
            settings = json.loads(self._config_file.read_text("utf-8"))
            return AutoConfig.for_model(**settings)
        except (OSError, ValueError, TypeError) as error:
            raise ProblemError(
                f"cannot read {self._config_file} as a configuration of transformers: {error}."
            ) from None

    @property
    def is_encoder(self) -> bool:
        """Whether it predicts masked tokens rather than next ones."""
        from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING

        config = self.config
        names = getattr(config, "architectures", None) or [""]
        is_causal = getattr(config, "is_decoder", False) or any("CausalLM" in n or "LMHead" in n for n in names)
        return type(config) in MODEL_FOR_MASKED_LM_MAPPING and not is_causal

    def __call__(self) -> nn.Module:
        """Return the model."""
        from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

        kind: Any = AutoModelForMaskedLM if self.is_encoder else AutoModelForCausalLM
        with without_progress_bars():
            if self.has_weights:
                model = kind.from_pretrained(self.folder, **_OWN_CODE_ONLY)
            else:
                model = kind.from_config(self.config, trust_remote_code=False)
        if self.full:
            trained: nn.Module = model
            return trained
        from peft import LoraConfig, get_peft_model

        options = LoraConfig(r=self.rank, lora_alpha=2 * self.rank, target_modules="all-linear")
        adapted: nn.Module = get_peft_model(model, options)
        if self.freeze_a:
            freeze_first_factors(adapted)
        return adapted

    @property
    def tokenizer(self) -> Any:
        """The tokenizer that lies beside the model; None where there is none, and tokens are bytes."""
        if not any((self.folder / name).is_file() for name in _TOKENIZERS):
            return None
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.folder, **_OWN_CODE_ONLY)
        if not tokenizer.is_fast:
            raise ProblemError(
                f"the tokenizer in {self.folder} does not say which text its tokens stand for: give a fast one."
            )
        return tokenizer

    def windows(self, texts: Sequence[str], length: int) -> TensorDataset:
        """Return texts as windows of the model's tokens."""
        tokenizer = self.tokenizer
        if tokenizer is None:
            self._check_bytes()
            return byte_windows(texts, length)
        tokens, sizes = [], []
        for text in texts:
            encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            tokens.append(np.array(encoded["input_ids"], np.int64))
            sizes.append(_bytes_of(text, [end for _, end in encoded["offset_mapping"]]))
        marks = (tokenizer.bos_token_id, tokenizer.cls_token_id, tokenizer.eos_token_id, 0)
        return token_windows(tokens, sizes, length, next(mark for mark in marks if mark is not None))

    @property
    def mask_token(self) -> int:
        """The token of a masked place."""
        tokenizer = self.tokenizer
        mask = _BYTE_TOKENS if tokenizer is None else tokenizer.mask_token_id
        if mask is None:
            raise ProblemError(f"the tokenizer in {self.folder} has no mask token, which an encoder learns by.")
        return int(mask)

    def window_length(self, length: int) -> int:
        """Return that many tokens, or as many as the model has positions."""
        return min(length, int(getattr(self.config, "max_position_embeddings", length)))

    def _check_bytes(self) -> None:
        needed = _BYTE_TOKENS + self.is_encoder
        if self.config.vocab_size < needed:
            raise ProblemError(
                f"{self.folder} has no tokenizer, and the model knows {self.config.vocab_size} tokens, which is less "
                f"than the {needed} of bytes: put its tokenizer beside it."
            )


class LanguageModelFolder(TransformersFolder):
    """A fine-tuned model as a folder of transformers with its tokenizer; adapters are merged into it.

    Args:
        made: What made the model.
        base_model: As of `TransformersFolder`.
    """

    def __init__(self, made: LanguageModel, base_model: str | None = None) -> None:
        self.made = made
        self.trained = cast(Any, build_model(made, seed=0))  # transformers' own methods are called
        super().__init__(self.trained if made.full else self.trained.get_base_model(), base_model)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Give the model the weights of the run; adapters become part of them."""
        self.trained.load_state_dict(dict(tensors))
        self.model = self.trained if self.made.full else self.trained.merge_and_unload()

    def save(self, folder: Path) -> None:
        """Write what transformers writes, and the tokenizer."""
        super().save(folder)
        if self.made.tokenizer is not None:
            self.made.tokenizer.save_pretrained(folder)


def factors_of(model: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the factors A and B of every layer with an adapter, by the name of A."""
    parameters = dict(model.named_parameters())
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    for name, parameter in parameters.items():
        for first, second in _FACTORS.items():
            if first in name:
                pairs[name] = (parameter, parameters[name.replace(first, second)])
    return pairs


def merge_discrepancy(adapters: Mapping[str, Factors], coefficients: Mapping[str, float]) -> float:
    """Return how far the product of merged factors is from the merge of products, relative to the latter.

    Args:
        adapters: The factors of every branch, before they were merged.
        coefficients: Λ by branch.
    """
    used = {name: weight for name, weight in coefficients.items() if weight != 0}
    if len(used) < 2:
        return 0.0
    off = total = 0.0
    for layer in next(iter(adapters.values())):
        pairs = [[factor.detach().double().flatten(1) for factor in adapters[name][layer]] for name in used]
        firsts, seconds = ([pair[i] for pair in pairs] for i in range(2))
        seconds_weighed = [weight * second for weight, second in zip(used.values(), seconds, strict=True)]
        merged_first = torch.stack([weight * first for weight, first in zip(used.values(), firsts, strict=True)]).sum(0)
        merged_second = torch.stack(seconds_weighed).sum(0)
        off += _squared_norm([merged_second, *(-second for second in seconds_weighed)], [merged_first, *firsts])
        total += _squared_norm(seconds_weighed, firsts)
    return float((off / total) ** 0.5) if total else 0.0


def _squared_norm(seconds: Sequence[Tensor], firsts: Sequence[Tensor]) -> float:
    """Return ‖Σ_b B_b A_b‖² = tr(BᵀB AAᵀ), factors stacked: products, as large as the layer, are not made."""
    b, a = torch.cat(list(seconds), dim=1), torch.cat(list(firsts), dim=0)
    return max(((b.T @ b) * (a @ a.T)).sum().item(), 0.0)


def freeze_first_factors(model: nn.Module) -> None:
    """Freeze A of every layer: merges of B are then merges of the updates, at half the trained parameters."""
    for first, _ in factors_of(model).values():
        first.requires_grad_(False)


def _bytes_of(text: str, ends: Sequence[int]) -> Any:
    """Return how many bytes of a text every token stands for, from where in the text each ends; in sum, all."""
    sizes = np.array([len(character.encode("utf-8", "surrogatepass")) for character in text], np.int64)
    positions = np.concatenate([[0], sizes.cumsum()])
    ends_so_far = np.maximum.accumulate(np.array([0, *ends]))
    ends_so_far[-1] = len(text)  # what a tokenizer leaves out at the end is the last token's
    return np.diff(positions[ends_so_far])
