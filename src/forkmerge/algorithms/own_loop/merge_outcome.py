"""What a merge in one's own loop found."""

from __future__ import annotations

from dataclasses import dataclass, field

from forkmerge.algorithms.table_data import show_number, show_share, show_shares
from forkmerge.problem.display import Display, Displayed


@dataclass(frozen=True, repr=False)
class MergeOutcome(Displayed):
    """What a merge found.

    Args:
        coefficients: Λ by branch; empty if every branch was faulty and the last good weights were kept.
        score: Score of the merged model.
        branch_scores: Score of every branch on its own.
        candidates: Every combination tried, with its score, in order.
        relevance: λ_k = Σ_b Λ_b s_b ν^b_k by task, s_b the branch's `lr_scale`.
        faults: Branches that were left out because something in them is not finite.
    """

    coefficients: dict[str, float]
    score: float
    branch_scores: dict[str, float]
    candidates: list[tuple[dict[str, float], float]] = field(repr=False)
    relevance: dict[str, float]
    faults: dict[str, str] = field(default_factory=dict)

    def display(self) -> Display:
        """Return what a prompt shows of the merge; all candidates are in `candidates`."""
        rows = [
            (
                name,
                "faulty" if name in self.faults else show_share(self.coefficients.get(name, 0.0)),
                show_number(score),
            )
            for name, score in {**dict.fromkeys(self.faults), **self.branch_scores}.items()
        ]
        facts = {"relevance": show_shares(self.relevance)} if self.relevance else {}
        legend = "coefficient (Λ): the branch's share of the merge; relevance (λ): the task weights that they amount to"
        title = f"Merge of {len(rows)} branches: score {show_number(self.score)}, {len(self.candidates)} candidates"
        faults = [f"{name}: {reason}" for name, reason in self.faults.items()]
        return Display(title, facts, ("branch", "coefficient", "own score"), rows, (*faults, legend))
