"""The recipe of a text mixture: a language model, a target corpus, and other corpora that may help it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

from torch.utils.data import TensorDataset

from forkmerge.algorithms.forkmerge import ForkMerge
from forkmerge.engine.storage.json_files import read_versioned, write_versioned
from forkmerge.engine.storage.records import Record
from forkmerge.engine.training.optimizers import OptimizerOf
from forkmerge.errors import ProblemError, check_count, check_name
from forkmerge.experiments.language_model import LanguageModel
from forkmerge.experiments.recipe import Recipe
from forkmerge.problem.definition import Evaluation, Problem, Stream
from forkmerge.problem.text.contamination import Contamination, find_contamination
from forkmerge.problem.text.documents import Document, divide, read_documents
from forkmerge.problem.text.masked_windows import MaskedTokens, bits_per_token, with_masks
from forkmerge.problem.text.windows import bits_per_byte, measure_bits, next_token_loss

CORPORA = "corpora.json"
"""What the folder of a mixture keeps about its corpora."""

_FORMAT = 1
_HELD_OUT = 0.2  # of the target's text to test on, and as much to validate on
_LR = {True: 5e-5, False: 2e-4}  # of all weights, and of adapters, which start from 0


def recipe(
    corpus: str,
    auxiliaries: Sequence[str],
    model: str,
    *,
    validation: str | None = None,
    test: str | None = None,
    full: bool = False,
    rank: int = 8,
    freeze_a: bool = False,
    length: int = 128,
    batch_size: int = 8,
    steps: int = 400,
    interval: int | None = None,
    lr: float | None = None,
    id_key: str | None = None,
    contamination: Literal["drop", "report"] = "drop",
) -> Recipe:
    """Return what `forkmerge mix` trains: one branch per corpus; a task weight is the share of steps that read it.

    Args:
        corpus: The target, the corpus to become good at: a text file, JSON lines, or a folder.
        auxiliaries: Other corpora, named after their files; `name=path` gives another name.
        model: A folder with a causal language model or an encoder of transformers; or a configuration.
        validation: A corpus to validate on; None takes a fifth of the target.
        test: A corpus to test on; None takes a fifth of the target.
        full: Train all weights, not only adapters (LoRA).
        rank: Of the adapters.
        freeze_a: Train B of the adapters alone: merges of factors are then merges of updates.
        length: Tokens of a window.
        batch_size: Windows per step.
        steps: Training steps.
        interval: Steps between merges; None makes eight merges.
        lr: Learning rate of AdamW; None for 2e-4 with adapters and 5e-5 without.
        id_key: The key of an id that translations share, in JSON lines; "file" for the file's name. Other corpora than
            the target may have none.
        contamination: Whether documents that give away held-out ones are left out, or only reported.
    """
    made = LanguageModel(model, full, rank, freeze_a)
    texts = read_corpora(corpus, auxiliaries, validation, test, id_key, contamination)
    windows = partial(made.windows, length=made.window_length(check_count("length", length)))
    build = _masked_problem if made.is_encoder else _causal_problem
    return Recipe(
        build(made, texts, windows, batch_size),
        made,
        OptimizerOf("AdamW", lr=lr or _LR[full], weight_decay=0.01),
        steps=steps,
        algorithm=ForkMerge(
            "per_auxiliary", interval=interval or max(check_count("steps", steps) // 8, 1), select="best"
        ),
    )


@dataclass(frozen=True)
class Corpora:
    """Texts that are fit to train and test on.

    Args:
        target: The target's name.
        training: Texts by corpus, the target's first.
        validation: Texts of the target.
        test: Texts of the target.
        contamination: What each corpus gives away; of the target, where its held-out text is that of other files.
    """

    target: str
    training: Mapping[str, Sequence[str]]
    validation: Sequence[str]
    test: Sequence[str]
    contamination: Sequence[Contamination]

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes to train on, by corpus."""
        return {
            name: sum(len(text.encode("utf-8", "surrogatepass")) for text in t) for name, t in self.training.items()
        }


@dataclass(frozen=True)
class CorpusFacts(Record):
    """What a mixture took of one corpus.

    Args:
        name: Its name.
        documents: How many are trained on.
        size: Their bytes.
        contaminated: How many gave away text to validate or test on.
        contamination: What these are, in words; empty where there are none.
        lacks_ids: Whether it has no ids, though the target has: its translations are then not found.
    """

    name: str
    documents: int
    size: int
    contaminated: int = 0
    contamination: str = ""
    lacks_ids: bool = False


@dataclass(frozen=True)
class CorporaFacts(Record):
    """What a mixture was made of; kept in its folder, so that its page can say it.

    Args:
        target: The target's name.
        validation: How many documents it was validated on.
        test: How many it was tested on.
        contamination: What was done with documents that give these away: "drop" or "report".
        corpora: Every corpus, the target first.
    """

    target: str
    validation: int
    test: int
    contamination: str
    corpora: list[CorpusFacts]


def corpora_facts(texts: Corpora, contamination: str) -> CorporaFacts:
    """Return what a mixture is made of, in numbers and words."""
    sizes = texts.sizes
    are_ids_known = any(each.has_ids for each in texts.contamination)
    corpora = [
        CorpusFacts(
            each.corpus,
            len(texts.training[each.corpus]),
            sizes[each.corpus],
            len(each.all),
            str(each) if each.all else "",
            are_ids_known and not each.has_ids,
        )
        for each in texts.contamination
    ]
    return CorporaFacts(texts.target, len(texts.validation), len(texts.test), contamination, corpora)


def write_corpora_facts(folder: Path, facts: CorporaFacts) -> None:
    """Keep in a folder what its mixture was made of."""
    write_versioned(folder / CORPORA, _FORMAT, {"corpora": facts})


def read_corpora_facts(folder: Path) -> CorporaFacts | None:
    """Return what the mixture of a folder was made of; None where that was not kept."""
    path = folder / CORPORA
    if not path.is_file():
        return None
    data = read_versioned(path, _FORMAT, ["corpora"], "what a mixture was made of", "it")
    return CorporaFacts.from_json(data["corpora"], name=path)


def read_corpora(
    target: str,
    auxiliaries: Sequence[str],
    validation: str | None = None,
    test: str | None = None,
    id_key: str | None = None,
    contamination: Literal["drop", "report"] = "drop",
) -> Corpora:
    """Return the texts of all corpora, the target's divided, the others without what gives its test away.

    Args:
        target: The `corpus` of `recipe`.
        auxiliaries: As of `recipe`.
        validation: As of `recipe`.
        test: As of `recipe`.
        id_key: As of `recipe`.
        contamination: As of `recipe`.
    """
    if contamination not in ("drop", "report"):
        raise ProblemError(f"contamination must be 'drop' or 'report', got {contamination!r}.")
    named = dict(corpus_from(word) for word in (target, *auxiliaries))
    if len(named) < 2 or len(named) < len(auxiliaries) + 1:
        raise ProblemError(
            "give a target and at least one other corpus, with names of their own: write name=path where two files "
            f"have the same name; got {', '.join((target, *auxiliaries))}."
        )
    paths = tuple((name, str(path)) for name, path in named.items())
    further = tuple(None if path is None else str(path) for path in (validation, test))
    changed = tuple(_changed(path) for path in (*(path for _, path in paths), *further) if path is not None)
    return _read_corpora(paths, further, id_key, contamination, changed)


@lru_cache(maxsize=1)  # every run of a comparison asks for the same
def _read_corpora(
    paths: tuple[tuple[str, str], ...],
    further: tuple[str | None, ...],
    id_key: str | None,
    contamination: str,
    changed: tuple[int, ...],
) -> Corpora:
    target = paths[0][0]
    corpora = {name: read_documents(Path(path), id_key, needs_ids=name == target) for name, path in paths}
    held = [None if path is None else read_documents(Path(path), id_key) for path in further]
    missing = [number for number, documents in enumerate(held) if documents is None]
    *drawn, training = divide(corpora[target], [_HELD_OUT] * len(missing))
    for number, documents in zip(missing, drawn, strict=True):
        held[number] = documents
    validation, test = (documents or [] for documents in held)
    if not (training and validation and test):
        raise ProblemError(
            f"the target has too few documents to hold some out, {len(corpora[target])} of which near-duplicates count "
            "as one: give --validation and --test, or more text."
        )
    corpora[target] = training
    reports = [find_contamination(name, corpora[name], [*validation, *test], training) for name in corpora]
    if contamination == "drop":
        corpora = {each.corpus: _without(corpora[each.corpus], each) for each in reports}
    texts = {name: [document.text for document in documents] for name, documents in corpora.items()}
    return Corpora(target, texts, [d.text for d in validation], [d.text for d in test], reports)


def _without(documents: Sequence[Document], contamination: Contamination) -> list[Document]:
    kept = [document for index, document in enumerate(documents) if index not in set(contamination.all)]
    if not kept:
        raise ProblemError(
            f"every document of {contamination.corpus} is a near-duplicate or a translation of one to validate or test "
            "on: nothing is left to train on."
        )
    return kept


def corpus_from(word: str) -> tuple[str, str]:
    """Return the name and the path of a corpus."""
    name, equals, path = word.partition("=")
    if not equals or Path(word).exists():
        name, path = Path(word).name.partition(".")[0] or Path(word).name, word
    if not Path(path).exists():
        raise ProblemError(f"there is no file or folder {path!r}.")
    if any(character in name for character in ",[]+"):
        raise ProblemError(f"a corpus cannot be named {name!r}: write name=path.")
    return check_name("corpus", name), path


def _changed(path: str) -> int:
    files = Path(path).rglob("*") if Path(path).is_dir() else [Path(path)]
    return max((file.stat().st_mtime_ns for file in files), default=0)


def _causal_problem(model: LanguageModel, texts: Corpora, windows: Any, batch_size: int) -> Problem:
    streams = _streams(texts, windows, next_token_loss, batch_size)
    evaluate = partial(Evaluation, metrics=bits_per_byte, predict=measure_bits, batch_size=4 * batch_size)
    validation, test = (evaluate(windows(part)) for part in (texts.validation, texts.test))
    return Problem(texts.target, streams, validation, test, weights="sampling")


def _masked_problem(model: LanguageModel, texts: Corpora, windows: Any, batch_size: int) -> Problem:
    tokens = MaskedTokens(model.mask_token)
    streams = _streams(texts, windows, tokens.loss, batch_size)

    def evaluate(part: Sequence[str]) -> Evaluation:
        plain: TensorDataset = windows(part)
        measure, size = tokens.measure, 4 * batch_size
        return Evaluation(with_masks(plain), bits_per_token, predict=measure, batch_size=size, as_training=plain)

    return Problem(texts.target, streams, evaluate(texts.validation), evaluate(texts.test), weights="sampling")


def _streams(texts: Corpora, windows: Any, losses: Any, batch_size: int) -> dict[str, Stream]:
    return {name: Stream(windows(part), losses, name, batch_size) for name, part in texts.training.items()}
