"""A finished run as a folder to give away: weights that plain torch loads, and a card that says how they came about."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from forkmerge.algorithms.resolved_config import open_run
from forkmerge.algorithms.run_record import Run, rounds_table, shown_score
from forkmerge.algorithms.saved_run import read_run
from forkmerge.algorithms.table_data import for_markdown, show_metrics, show_number, show_share, word_table
from forkmerge.engine.storage.atomic_files import explained, fingerprint, replacing, write_file, write_tensors
from forkmerge.engine.storage.json_codec import encode, plain
from forkmerge.errors import StoreError, printable

CITATION = """@inproceedings{jiang2023forkmerge,
  title = {ForkMerge: Mitigating Negative Transfer in Auxiliary-Task Learning},
  author = {Jiang, Junguang and Chen, Baixu and Pan, Junwei and Wang, Ximei and Liu, Dapeng and Jiang, Jie and
            Long, Mingsheng},
  booktitle = {Advances in Neural Information Processing Systems},
  volume = {36},
  year = {2023}
}"""


class PlainTorch:
    """The form of an exported model: one file of tensors, which plain torch loads."""

    def write(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write the files of the model into a new folder."""
        write_tensors(folder / "model.safetensors", tensors)

    def head(self, card: Mapping[str, Any]) -> str:
        """Return what stands above the card, for programs that read it."""
        return ""

    def loading(self, card: Mapping[str, Any]) -> str:
        """Return how the card says the model is loaded, as Markdown."""
        module, _, name = _one_line(card["model"]["kind"]).partition(":")
        code = (
            "from safetensors.torch import load_file\n\n"
            f"model = ...  # the module that was trained: {name} of {module}\n"
            'model.load_state_dict(load_file("model.safetensors"))\n'
            "model.eval()"
        )
        return f"Plain torch and safetensors are enough:\n\n{code_block('python', code)}"


def export_run(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    form: PlainTorch | None = None,
    command: str | None = None,
) -> Path:
    """Write the model, README.md and card.json of a finished run; they appear all at once or not at all.

    Args:
        folder: The run's folder; its model is verified first.
        out: A folder that does not exist yet, or is empty.
        form: How the model is written; None writes model.safetensors.
        command: What made the run, for the card; None for what its record says.
    """
    form = form or PlainTorch()
    run, out = read_run(folder), Path(out)
    with explained(f"write {out}"):
        if out.is_file() or (out.is_dir() and any(out.iterdir())):
            raise StoreError(f"{out} exists and is not an empty folder: choose another one to export to.")
        with open_run(folder) as store:
            config, tensors = store.config, store.model_tensors()
        out.parent.mkdir(parents=True, exist_ok=True)
        with replacing(out) as unfinished:
            unfinished.mkdir()
            form.write(unfinished, tensors)
            card = make_card(run, config, Path(folder).resolve().name)
            card["command"] = command or card["command"]
            card["files"] = {path.name: fingerprint(path) for path in sorted(unfinished.iterdir())}
            write_file(unfinished / "card.json", encode(plain(card), 2))
            write_file(unfinished / "README.md", card_text(card, run, form).encode())
            if out.is_dir():
                out.rmdir()
    return out


def make_card(run: Run, config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return everything a card says, as plain data."""
    source = config.get("source", {})
    started = f"{run.algorithm}(…).fit(…) in a Python program"
    return {
        "name": name,
        "algorithm": run.algorithm,
        "target": run.target,
        "steps": run.steps,
        "seed": run.seed,
        "final": run.final,
        "score": run.score,
        "validation": run.metrics,
        "test": run.test,
        "test_split": run.test_split,
        "rounds": [
            {"round": r.index, "phase": r.phase, "step": r.end, "coefficients": r.coefficients, "score": r.score}
            for r in run.rounds
        ],
        "relevance": run.relevance,
        "branches": {name: b.task_weights for r in run.rounds for name, b in r.branches.items()},
        "lr_scales": {name: b.lr_scale for r in run.rounds for name, b in r.branches.items() if b.lr_scale != 1},
        "notes": run.notes,
        "command": source.get("command") or started,
        "recipe": source.get("settings", {}),
        "settings": run.settings,
        "environment": run.environment,
        "model": config["model"],
        "citation": CITATION,
    }


def card_text(card: Mapping[str, Any], run: Run, form: PlainTorch) -> str:
    """Return the card of a run as Markdown."""
    name, algorithm, final = (for_markdown(card[key]) for key in ("name", "algorithm", "final"))
    results = [f"- Validation: {for_markdown(show_metrics(card['validation']))}"] if card["validation"] else []
    if card["test"]:
        split = "Test" if card["test_split"] == "test" else "Validation examples that the search did not see"
        results.append(f"- {split}, measured once after training: {for_markdown(show_metrics(card['test']))}")
    environment = [(key, str(value)) for key, value in card["environment"].items()]
    parts = [
        form.head(card),
        f"# {name}",
        f"{algorithm} with target task {_span(card['target'])}: {card['steps']} steps, seed {card['seed']}. "
        f"The weights are those of the {final}.",
        "\n".join(results),
        *_merging(card, run),
        f"## Loading\n\n{form.loading(card)}",
        "## How it was made",
        code_block("sh", card["command"]),
        "Every setting, defaults included, is in card.json.",
        "### Environment",
        word_table("", ("what", "version or kind"), environment).markdown(),
        "\n".join(["### Notes", "", *(f"- {for_markdown(note)}" for note in card["notes"])]) if card["notes"] else "",
        "## Citation\n\nThe method is described in:",
        code_block("bibtex", card["citation"]),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _merging(card: Mapping[str, Any], run: Run) -> list[str]:
    """Coefficients and relevance; a run of one branch merged nothing."""
    branches = card["branches"]
    if len(branches) < 2:
        return []
    tasks = list(dict.fromkeys(task for weights in branches.values() for task in weights))
    weights = [(name, *(show_number(w.get(task, 0.0)) for task in tasks)) for name, w in branches.items()]
    refitted = " The refit repeated them on training and validation data." if card["final"] == "refit" else ""
    relevance = [(task, show_share(value)) for task, value in card["relevance"].items()]
    return [
        "## Branches\n\nEach branch was trained with its own task weights:",
        word_table("", ("branch", *tasks), weights).markdown(),
        "## Coefficients\n\nAt the end of every round the branches were merged with these coefficients; "
        f"{for_markdown(shown_score(run.searched)[0])} is that of the merge on validation data.{refitted}",
        rounds_table(run.searched, most_branches=len(branches)).markdown(),
        "## Task relevance\n\nWhat each task weighed on average over the rounds, in units of the target's own weight:",
        word_table("", ("task", "relevance"), relevance).markdown(),
    ]


def code_block(language: str, text: str) -> str:
    """Return code as Markdown, whatever it holds."""
    fence = _fence(text, 3)
    return f"{fence}{language}\n{printable(text)}\n{fence}"


def _span(text: str) -> str:
    fence, line = _fence(text, 1), _one_line(text)
    return f"{fence}{line}{fence}" if "`" not in text else f"{fence} {line} {fence}"


def _one_line(text: str) -> str:
    return " ".join(printable(text).split())


def _fence(text: str, least: int) -> str:
    """Return more backticks than the text has side by side, so that it cannot end what they enclose."""
    return "`" * max(least, 1 + max(map(len, re.findall("`+", text)), default=0))
