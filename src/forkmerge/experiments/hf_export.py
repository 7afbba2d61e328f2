"""A finished run as a folder that transformers loads, with a card that model hubs read."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from forkmerge.algorithms.export import PlainTorch, code_block, export_run
from forkmerge.engine.storage.atomic_files import sync
from forkmerge.errors import ProblemError, check_packages, printable

_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")  # and no path on somebody's disk


class TransformersFolder(PlainTorch):
    """The form of a model that `from_pretrained` loads: what `save_pretrained` writes.

    Args:
        model: A model like the one that was trained; its weights are replaced by the run's.
        base_model: What it was made from, by its name on a hub, for the card; None for what transformers knows of it.
    """

    def __init__(self, model: nn.Module, base_model: str | None = None) -> None:
        check_packages("a transformers folder", "hf", {"transformers": "transformers"})
        from transformers import PreTrainedModel

        if not isinstance(model, PreTrainedModel):
            raise ProblemError(
                f"the model is {type(model).__module__}:{type(model).__name__}, which is no PreTrainedModel of "
                "transformers: leave --format hf out, which writes it for plain torch."
            )
        self.model: Any = model
        self.base_model = check_base_model(base_model)

    def write(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write config and weights into a new folder."""
        self.load(tensors)
        with without_progress_bars():
            self.save(folder)
        for path in folder.iterdir():
            with path.open("rb+") as file:
                sync(file)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Give the model the weights of the run."""
        self.model.load_state_dict(dict(tensors))

    def save(self, folder: Path) -> None:
        """Write what transformers writes."""
        self.model.save_pretrained(folder)

    def head(self, card: Mapping[str, Any]) -> str:
        """Return the metadata that hubs read: JSON, which is YAML, so that no name can break it."""
        loaded_from = str(getattr(self.model.config, "_name_or_path", "") or "")
        base = self.base_model or (loaded_from if _is_on_hub(loaded_from) else None)
        is_merged = len(card["branches"]) > 1
        metadata: dict[str, Any] = {
            **({"base_model": base} if base else {}),
            "base_model_relation": "merge" if is_merged else "finetune",
            "library_name": "transformers",
            "tags": ["forkmerge", *(["merge"] if is_merged else [])],
        }
        results = [_result(card, split) for split in ("validation", "test") if _finite(card[split])]
        if results:
            metadata["model-index"] = [{"name": card["name"], "results": results}]
        lines = [f"{key}: {printable(json.dumps(value, ensure_ascii=False))}" for key, value in metadata.items()]
        return "\n".join(["---", *lines, "---"])

    def loading(self, card: Mapping[str, Any]) -> str:
        """Return how the model is loaded."""
        kind = type(self.model)
        module = "transformers" if kind.__module__.startswith("transformers.") else kind.__module__
        code = f'from {module} import {kind.__name__}\n\nmodel = {kind.__name__}.from_pretrained(".")  # this folder'
        return f"As any model of transformers:\n\n{code_block('python', code)}"


def check_base_model(name: str | None) -> str | None:
    """Return the name of a base model, if it could be one on a hub."""
    if name is not None and not _HUB_NAME.fullmatch(name):
        raise ProblemError(f"a base model is the name of a model on a hub, such as org/model; got {name!r}.")
    return name


def _is_on_hub(name: str) -> bool:
    return _HUB_NAME.fullmatch(name) is not None and not Path(name).exists()


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing bars: models are made for every run, and written in a moment."""
    from transformers.utils import logging as untyped

    logging: Any = untyped
    is_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if is_shown:
            logging.enable_progress_bar()


def _finite(metrics: Mapping[str, float] | None) -> dict[str, float]:
    return {name: value for name, value in (metrics or {}).items() if math.isfinite(value)}


def _result(card: Mapping[str, Any], split: str) -> dict[str, Any]:
    """Return metrics as a model index has them: of a task, on a data set."""
    metrics = [{"type": name, "name": name, "value": value} for name, value in _finite(card[split]).items()]
    task = {"type": "other", "name": card["target"]}
    data = {"type": "other", "name": card["target"], "split": card["test_split"] if split == "test" else split}
    return {"task": task, "dataset": data, "metrics": metrics}


def export_pretrained(
    folder: str | os.PathLike[str], out: str | os.PathLike[str], model: nn.Module, *, base_model: str | None = None
) -> Path:
    """Write a finished run with `save_pretrained` and a card; everything appears at once or not at all.

    Args:
        folder: The run's folder; its model is verified first.
        out: A folder that does not exist yet, or is empty.
        model: A model like the one that was trained, a `PreTrainedModel`; its weights are replaced by the run's.
        base_model: What it was made from, by its name on a hub, for the card.
    """
    return export_run(folder, out, TransformersFolder(model, base_model))
