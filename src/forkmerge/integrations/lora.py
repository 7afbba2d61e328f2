"""ForkMerge of LoRA adapters of PEFT: branches are adapters on one frozen backbone, which is held once.

Factors are merged, Ā = Σ_b Λ_b A_b and B̄ = Σ_b Λ_b B_b, so that the merge is an adapter of the same rank. Its update
B̄Ā is not Σ_b Λ_b B_b A_b, the merge of the updates: they differ by the covariance of the factors, which grows with the
steps since the fork. A candidate is scored as it would be installed, so what a merge promises holds all the same; how
far the two are apart is reported after every round, and with frozen A they are equal.

PEFT's own `add_weighted_adapter(…, combination_type="linear")` is something else: it multiplies both factors by √Λ_b,
so that equal adapters come out too large: twice the update for two of them at 0.5 + 0.5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from forkmerge.algorithms.own_loop.forked_branch import ForkedBranch
from forkmerge.algorithms.own_loop.merge_outcome import MergeOutcome
from forkmerge.algorithms.own_loop.own_merge import Score
from forkmerge.algorithms.own_loop.trainer_rounds import Trainer, rounds
from forkmerge.engine.merging.searches import Search
from forkmerge.engine.training.options import Mixture
from forkmerge.errors import ProblemError, check_packages
from forkmerge.experiments.language_model import Factors, factors_of, freeze_first_factors, merge_discrepancy


@dataclass(frozen=True)
class AdapterMerge:
    """What a merge of adapters found.

    Args:
        outcome: The merge: coefficients, scores, relevance.
        discrepancy: ‖B̄Ā − Σ_b Λ_b B_b A_b‖ / ‖Σ_b Λ_b B_b A_b‖, Frobenius norms over all layers: how far the update
            that was installed is from the merge of the updates.
    """

    outcome: MergeOutcome
    discrepancy: float


def adapter_rounds(
    model: nn.Module,
    branches: Mapping[str, Mapping[str, Any]] | Sequence[Mixture],
    make_trainer: Callable[[ForkedBranch, int], Trainer],
    score: Score,
    *,
    count: int,
    steps: int,
    search: Search | str | None = None,
    freeze_a: bool = False,
) -> Iterator[AdapterMerge]:
    """Train adapters by trainers, merge them, and repeat: `forkmerge.rounds` of a PEFT model.

    Args:
        model: A `PeftModel` with LoRA adapters; its frozen parameters are shared by all branches.
        branches: As of `forkmerge.rounds`.
        make_trainer: As of `forkmerge.rounds`.
        score: As of `forkmerge.rounds`.
        count: How many rounds.
        steps: Steps of every branch in a round; few keep the discrepancy small.
        search: As of `forkmerge.rounds`.
        freeze_a: Train B alone, from the A that the model has: no discrepancy, half the parameters, slower learning.
    """
    check_packages("adapter_rounds", "lora", {"peft": "peft"})
    from peft import PeftModel

    if not isinstance(model, PeftModel) or not factors_of(model):
        raise ProblemError(
            f"adapter_rounds needs a PeftModel with LoRA adapters, got {type(model).__name__}: make one with "
            "peft.get_peft_model(model, LoraConfig(…)), or call forkmerge.rounds, which takes any module."
        )
    if freeze_a:
        freeze_first_factors(model)
    trained: dict[str, Factors] = {}
    merges = rounds(model, branches, _noting(make_trainer, trained), score, count=count, steps=steps, search=search)
    return (AdapterMerge(outcome, merge_discrepancy(trained, outcome.coefficients)) for outcome in merges)


def _noting(
    make_trainer: Callable[[ForkedBranch, int], Trainer], trained: dict[str, Factors]
) -> Callable[[ForkedBranch, int], Trainer]:
    """Return the same, whose trainers also keep a copy of the factors that they have trained."""

    class Noting:
        def __init__(self, branch: ForkedBranch, steps: int) -> None:
            self.branch, self.trainer = branch, make_trainer(branch, steps)

        def train(self) -> None:
            self.trainer.train()
            pairs = factors_of(self.branch.model)
            trained[self.branch.name] = {
                name: (a.detach().clone(), b.detach().clone()) for name, (a, b) in pairs.items()
            }

    return Noting
