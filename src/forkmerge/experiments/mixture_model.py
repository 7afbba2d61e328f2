"""The model that a mixture ends with, and what its card says of how it was made."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forkmerge.algorithms.export import card_text, export_run
from forkmerge.algorithms.saved_run import read_run
from forkmerge.engine.storage.atomic_files import write_atomically
from forkmerge.experiments.language_model import LanguageModel, LanguageModelFolder
from forkmerge.experiments.run_results import RunResult, read_plan

RECIPE = "forkmerge.experiments.text_mixture:recipe"
MODEL = "export/model"  # below a folder of its own: records of runs are looked for one level down
EQUAL = "ew"


def write_model(folder: Path, result: RunResult, base_model: str | None = None) -> Path:
    """Write the model of a mixture's run into the mixture's folder; of one that is there, only the card may change.

    Args:
        folder: That of the mixture.
        result: The run.
        base_model: What the model was made from, by its name on a hub; None says nothing new.
    """
    out, plan = folder / MODEL, read_plan(folder)
    assert plan is not None
    if not out.exists():
        return export_run(folder / result.folder, out, form_of_mix(plan, base_model), command_of_mix(plan))
    readme = out / "README.md"
    if base_model is not None and f"\nbase_model: {json.dumps(base_model)}\n" not in readme.read_text("utf-8"):
        card = json.loads((out / "card.json").read_text("utf-8"))
        text = card_text(card, read_run(folder / result.folder), form_of_mix(plan, base_model))
        write_atomically(readme, text.encode())
    return out


def form_of_mix(plan: Mapping[str, Any], base_model: str | None = None) -> LanguageModelFolder:
    """Return how models of a mixture are written, which needs its model but none of its text.

    Args:
        plan: What `plan.json` of its folder holds.
        base_model: What the model was made from, by its name on a hub.
    """
    arguments = plan["settings"]["arguments"]
    options = {name: arguments[name] for name in ("full", "rank", "freeze_a") if name in arguments}
    return LanguageModelFolder(LanguageModel(arguments["model"], **options), base_model)


def command_of_mix(plan: Mapping[str, Any]) -> str:
    """Return the command of a mixture, for a card: without folders, which are nobody else's.

    Args:
        plan: What `plan.json` of its folder holds.
    """
    options = dict(plan["settings"]["arguments"])
    words = ["forkmerge", "mix", _file_of(options.pop("corpus")), "--with"]
    words += [*map(_file_of, options.pop("auxiliaries")), "--model", Path(options.pop("model")).name]
    options |= {name: Path(options[name]).name for name in ("validation", "test") if name in options}
    options["id"] = options.pop("id_key", None)
    methods = [method["word"] for method in plan["methods"]]
    options |= {"refit": plan["equal_labels"], "no_baselines": EQUAL not in methods, "seeds": len(plan["seeds"])}
    for name, value in options.items():
        if value is not None and value is not False:
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return shlex.join(words)


def _file_of(word: str) -> str:
    name, _, path = word.partition("=")
    file = Path(path).name
    return file if name == file.partition(".")[0] else f"{name}={file}"
