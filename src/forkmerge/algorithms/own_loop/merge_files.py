"""`merge_files`: finished models on disk, merged piece by piece, so that they may be larger than memory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import Tensor

from forkmerge.algorithms.own_loop.merge_checks import check_scores
from forkmerge.algorithms.own_loop.merge_outcome import MergeOutcome
from forkmerge.engine.merging.arithmetic import Coefficients, check_coefficients, merge_tensors, vertices
from forkmerge.engine.merging.find_merge import MergeProblem, find_merge
from forkmerge.engine.merging.searches import Greedy, Grid, Search, search_from
from forkmerge.engine.storage.atomic_files import TEMPORARY, check_space, explained, replacing, write_file
from forkmerge.engine.storage.weight_files import INDEX, WHOLE, StoredTensor, WeightFiles, write_index, write_shard
from forkmerge.errors import ProblemError, StoreError

_COPIED = (".json", ".txt", ".model", ".jinja")  # a model's config and its tokenizer, but no weights and no code
_LARGEST_COPY = 2**28

ScorePath = Callable[[Path], float]
ScoreState = Callable[[dict[str, Tensor]], float]


def merge_files(
    checkpoints: Mapping[str, str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    coefficients: Mapping[str, float] | None = None,
    score: ScorePath | None = None,
    score_state: ScoreState | None = None,
    search: Search | str | None = None,
) -> MergeOutcome:
    """Merge finished models on disk, to the bits of `merge_states`, without holding any of them in memory.

    A checkpoint is a safetensors file, or a folder with `model.safetensors` or with shards and their
    `model.safetensors.index.json`, as transformers writes it. `out` appears when it is complete, or not at all.

    Args:
        checkpoints: Models of the same architecture by name; of equal scores the first is preferred.
        out: A new file, if its name ends in ".safetensors"; otherwise a new folder, which has the shards of the first
            checkpoint and, if that is a folder, its config and tokenizer.
        coefficients: Λ by name; None searches them by a score.
        score: Validates a model at a path, higher is better: a checkpoint's own, or that of a temporary merge beside
            `out`, of the same form. So a model need not fit into memory here.
        score_state: The same, of tensors by name; needs memory for one model.
        search: How coefficients are searched; None takes a grid for two checkpoints, greedy search for more.

    Example:
        `fm.merge_files({"base": "base", "tuned": "tuned"}, "merged", coefficients={"base": 0.5, "tuned": 0.5})`
    """
    files, out = _read(checkpoints), Path(out)
    names = list(files)
    if (coefficients is None) == (score is None and score_state is None) or (score and score_state):
        raise ProblemError(
            "merge_files takes one of coefficients, score and score_state: fixed, or searched by a score."
        )
    with explained(f"write {out}"):
        if out.is_file() or out.is_symlink() or (out.is_dir() and any(out.iterdir())):
            raise StoreError(f"{out} exists and is not an empty folder: choose another name.")
        out.parent.mkdir(parents=True, exist_ok=True)
    check_space(out, (1 + (score is not None)) * files[names[0]].nbytes)
    if coefficients is not None:
        if set(coefficients) != set(names):
            raise ProblemError(f"coefficients are for {sorted(coefficients)}, but the checkpoints are {sorted(names)}.")
        vector = check_coefficients([coefficients[name] for name in names])
        _write(out, list(files.values()), vector)
        return MergeOutcome(dict(zip(names, vector, strict=True)), float("nan"), {}, [], {})
    used = search_from(search) or (Grid() if len(names) <= 2 else Greedy())
    used.check(len(names))
    if used.beyond_one:
        raise ProblemError(f"{type(used).__name__} needs what the branches were forked from: use Greedy() for files.")
    with TemporaryDirectory(prefix=TEMPORARY, dir=out.parent) as folder:
        merge = find_merge(_FilesMerge(files, Path(folder) / out.name, score, score_state), used)
    check_scores(merge, {})
    if not merge.coefficients:
        raise ProblemError("the score of no checkpoint is finite, so no merge can be chosen by it.")
    _write(out, list(files.values()), merge.vector)
    return MergeOutcome(merge.coefficients, merge.score, merge.branch_scores, merge.candidates, {}, merge.faults)


class _FilesMerge(MergeProblem):
    """A merge of files that is scored by the user's own function."""

    def __init__(
        self, files: dict[str, WeightFiles], path: Path, score: ScorePath | None, score_state: ScoreState | None
    ) -> None:
        super().__init__(list(files))
        self.files, self.path = list(files.values()), path
        self.score_path, self.score_state = score, score_state

    def score_branch(self, index: int) -> float:
        """Return the score of a checkpoint, where it lies."""
        if self.score_path is not None:
            return _number(self.score_path(self.files[index].path))
        return self.score(vertices(len(self.files))[index])

    def score(self, coefficients: Coefficients) -> float:
        """Return the score of a combination, which is on disk or in memory only as long."""
        if self.score_state is not None:
            return _number(self.score_state(_merged_state(self.files, coefficients)))
        assert self.score_path is not None
        _write(self.path, self.files, coefficients)
        try:
            return _number(self.score_path(self.path))
        finally:
            shutil.rmtree(self.path) if self.path.is_dir() else self.path.unlink()


def _number(value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]  # whatever a user's function returns
    except (TypeError, ValueError, RuntimeError):
        raise ProblemError(f"score must return one number, higher is better; got {value!r:.80}.") from None


def _read(checkpoints: Mapping[str, str | os.PathLike[str]]) -> dict[str, WeightFiles]:
    """Read what there is in every checkpoint; what does not fit together is named."""
    if not isinstance(checkpoints, Mapping) or not checkpoints:
        raise ProblemError(f"merge_files takes {{name: path}} of checkpoints, got {checkpoints!r:.80}.")
    files = {name: WeightFiles(path) for name, path in checkpoints.items()}
    (first, one), *others = files.items()
    for other, another in others:
        for key in (*one.tensors, *another.tensors):
            kinds = [_described(checkpoint.tensors.get(key)) for checkpoint in (one, another)]
            if kinds[0] != kinds[1]:
                raise ProblemError(
                    f"checkpoints {first!r} and {other!r} cannot be merged: the tensor {key!r} is {kinds[0]} in one "
                    f"and {kinds[1]} in the other."
                )
    return files


def _described(tensor: StoredTensor | None) -> str:
    return "missing" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _merged_pieces(files: list[WeightFiles], coefficients: Coefficients, name: str) -> Iterator[Tensor]:
    """Merge a tensor piece by piece; a checkpoint of coefficient 0 is not read."""
    used = [(file.tensors[name], weight) for file, weight in zip(files, coefficients, strict=True) if weight != 0]
    weights = [weight for _, weight in used]
    for start, stop in used[0][0].pieces:
        yield merge_tensors([tensor.read(start, stop) for tensor, _ in used], weights)


def _merged_state(files: list[WeightFiles], coefficients: Coefficients) -> dict[str, Tensor]:
    state = {}
    for name, tensor in files[0].tensors.items():
        state[name] = tensor.empty()
        start = 0
        for piece in _merged_pieces(files, coefficients, name):
            state[name].view(-1)[start : start + len(piece)] = piece
            start += len(piece)
    return state


def _write(out: Path, files: list[WeightFiles], coefficients: Coefficients) -> None:
    first = files[0]

    def pieces(name: str) -> Iterator[Tensor]:
        return _merged_pieces(files, coefficients, name)

    with explained(f"write {out}"), replacing(out) as unfinished:
        if out.suffix == ".safetensors":
            write_shard(unfinished, first.tensors, pieces)
            return
        unfinished.mkdir()
        shards = first.shards if first.path.is_dir() else {WHOLE: list(first.tensors)}
        for file, names in shards.items():
            write_shard(unfinished / file, {name: first.tensors[name] for name in names}, pieces)
        if WHOLE not in shards:
            write_index(unfinished / INDEX, shards, first.nbytes)
        if first.path.is_dir():
            _copy_config(first.path, unfinished)
        if out.is_dir():
            out.rmdir()


def _copy_config(source: Path, target: Path) -> None:
    """Copy what a model is loaded with besides its weights; links are left out."""
    for entry in os.scandir(source):
        is_copied = entry.name.endswith(_COPIED) and not entry.name.endswith(".index.json")
        if is_copied and entry.is_file(follow_symlinks=False) and entry.stat().st_size <= _LARGEST_COPY:
            write_file(target / entry.name, Path(entry.path).read_bytes())
