"""ForkMerge, and the algorithms it is compared with, behind one `fit`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn

from forkmerge.algorithms.branches.default_form import (
    adds_up_over_few,
    has_costs,
    has_values,
    is_one_label_each,
    mixes_statistics,
    smooth_metric,
)
from forkmerge.algorithms.branches.rotation import ROTATION, WIN_STAY, WIN_STAY_ALL
from forkmerge.algorithms.branches.search_share import affordable_examples
from forkmerge.algorithms.fit import Algorithm
from forkmerge.algorithms.mixtures import ALONE, Given, Mixed, PerAuxiliary
from forkmerge.algorithms.settings import GREEDY, Settings
from forkmerge.engine.merging.rules import ARGMAX, BAGGED, ONE_STANDARD_ERROR
from forkmerge.engine.merging.searches import Fixed, Search
from forkmerge.engine.training.options import Mixture
from forkmerge.methods import Method, method_from
from forkmerge.problem.definition import Problem
from forkmerge.problem.searched_evaluation import with_sample

_PAPER: dict[str, Any] = {
    "mixtures": Mixed(),
    "interval": None,
    "search": None,  # `GRID` for two branches, `GREEDY` for more
    "search_examples": None,
    "checkpoint": "last",
    "validate_every": None,
    "bn": "average",
    "bn_batches": 50,
    "optimizer_state": "keep",
    "select": "last",
    "prune_to": None,
    "prune_after": 1,
    "auxiliary_scale": 1.0,
    "reference": None,
    "refit": False,
    "floor": False,
    "keep_branches": False,
    "method": None,
    "confidence": None,
    "prune_keeps": "largest",
    "search_by": None,
    "tail": None,
    "tail_anneal": "linear",  # of a tail, which there is none
    "rule": "argmax",
    "per_round": None,
    "previous_merges": None,
    "average_iterates": None,
    "layer_groups": None,
    "turns": "rotation",  # of branches that take turns, which there are none
    "validation_examples": None,
}
"""Every option of `ForkMerge`, as the paper has it."""

AUTHORS_SCRIPTS: dict[str, Any] = {"checkpoint": "best_so_far", "search": GREEDY, "select": "best"}
"""The options in which the authors' released scripts differ from the paper, whatever the branches."""

_LOSS_SCALE = 2.0
"""Of auxiliary weights where nobody names branches: half of a branch is then worth what equal weights are."""
_WINNERS_STAY = (WIN_STAY, WIN_STAY_ALL)
_CHOSEN = ("turns", "rule", "auxiliary_scale", "validation_examples")
"""What a run that was started keeps of what ForkMerge had chosen then."""


@dataclass(frozen=True)
class ForkMerge(Settings, Algorithm):
    """Fork into branches, train each on its task mixture, merge what helps the target, repeat.

    Λ* = argmax_Λ P̂(Σ_b Λ_b θ^b_{t+Δt}), every Δt steps (Alg. 1 with two branches, Alg. 2 in general).

    Without branches named, every round trains two branches, whatever their number (with `prune_to`, all begin): at
    first the target alone and that of all auxiliaries, then the one that got half of the merge or more and the one that
    has rested longest, of a single auxiliary at first. Auxiliary losses weigh twice as much as the target's, so that
    half of a branch amounts to equal weights. Where BatchNorm sees inputs of their own they weigh as much, and the
    target's own branch, which alone has statistics of its inputs, never rests. An accuracy or AUC is searched by
    likelihood, on few validation examples coefficients are those that win in resamples of them, averaged, and of many
    examples a search sees as many as cost a tenth of training. The record names what was chosen. With branches named,
    all of them train in every round, and defaults are the paper's, but for `prune_keeps`: `ForkMerge("mixed")` is
    Alg. 1.

    Args:
        mixtures: The branches: a constructor such as `Mixed()`, `PerAuxiliary()` or `Rates()`, its name, or
            `{name: {task: weight}}`. None takes `PerAuxiliary(joint="sampled")`, in turn; where a `method` combines
            tasks, which needs all of them, `PerAuxiliary(joint=True)`.
        interval: Δt, steps between merges; the last round is shortened to end at T. None makes five rounds, or ten
            where branches take turns.
        search: How coefficients are found; None takes `Grid()` for two branches and `Greedy()` for more.
        search_examples: Search on that many validation examples, drawn anew each round from the run's seed, and
            confirm the winner on all of them.
        checkpoint: What enters a merge: the branch's "last" weights, or its best on validation, "best_in_interval"
            or "best_so_far".
        validate_every: Steps between the validations that the last two need; None makes five per interval.
        bn: BatchNorm statistics of a merge: "average" them like parameters, or "recompute" them on the target's
            training data.
        bn_batches: Batches for "recompute".
        optimizer_state: At a merge, each branch may "keep" its own, all get the "average", or "reset" it.
        select: The model returned: the "last" merge, or the "best" on validation.
        prune_to: Keep that many branches after round `prune_after`, those of largest coefficient, none of
            coefficient 0. See also `prune_keeps`.
        prune_after: See `prune_to`.
        auxiliary_scale: Factor on all auxiliary weights, for when the best λ would exceed 1. None takes 1; without
            branches or other `turns` named 2, but where weights are probabilities, a `method` makes its own of them, or
            BatchNorm's running statistics become those of auxiliaries' own inputs, too.
        reference: Reference metrics of a target with several; None takes the target-only branch of round 1.
        refit: Replay the run found, without any search, on training ∪ validation data of the target.
        floor: Also train an unmerged target-only run, and return it if it validates better.
        keep_branches: Keep every round's branches on disk, for later questions.
        method: How the tasks inside a branch are combined: a loss-weighting or gradient method, or its name.
        confidence: Keep the target-only branch unless the merge beats it in that share of resamples of the validation
            examples, e.g. 0.9; against chance on few examples. For metrics that add up over examples.
        prune_keeps: "target" keeps the target-only branch whatever its coefficient is, and counts it, so that a merge
            can always fall back on it; "largest" is the paper's: the largest coefficients, whose branches they are.
        search_by: The metric that branches are ranked, coefficients searched and the best merge selected by, where the
            target's own is too coarse for few examples: "nll", another built-in metric or one of the target's by name,
            or any metric. The merge is then never worse than its branches in *this* metric; reports, `floor` and
            verdicts stay in the target's own. None searches by the target's own; without branches named, by "nll" where
            that is `accuracy` or `auc` of one label per example.
        tail: Share of a round's steps, its last, in which every branch trains on the target alone, such as 0.5: merges
            are then chosen by what a mixture is worth after the target has been trained on for a while. None has none.
        tail_anneal: What the learning rate does in the tail: the schedule's times a "linear" fall from 1 to 0 over it,
            or, for "none", the schedule's.
        rule: Which candidate of a search is installed, see `Rule`: the best, "argmax", or one that few examples cannot
            tell from it: "one_standard_error" takes the one nearest to uniform coefficients, "bagged" the mean of those
            that win in resamples of the examples. A merge is never worse on validation than its best branch by argmax,
            and never by more than the standard error of their difference by the others; `confidence` asks about what
            the rule has chosen. Both look at every example for every candidate; for metrics that add up over examples.
            None takes "argmax"; without branches or other `turns` named, "bagged" where a search sees at most 1,000
            validation examples.
        per_round: How many branches with some of the auxiliaries, but not all, a round trains; those with none or all
            train in every round. After a merge the better half of them stays, at most, and the others rest for those
            that have rested longest, unless `turns` says otherwise: many auxiliaries cost no more than few. A branch
            that returns forks from the merge, with the optimizer of the branch of the largest coefficient. None trains
            all; without branches named, one.
        previous_merges: How many of the last merges a search may take something of, as if they were branches: 1 is what
            the branches were forked from, in round 1 the first weights. They cost no training. A merge is then never
            worse on validation than they are. Coefficients call them "previous merge", "previous merge 2" and so on.
            Takes their copies in memory. None has none.
        average_iterates: Take the mean of so many iterates of a branch, evenly spaced over the last half of the round,
            where it validates better than the branch itself: what is better enters the merge. It costs no training and
            one validation pass per branch, and takes a copy of the parameters of every branch. None has none.
        layer_groups: Groups of layers that get coefficients of their own: "modules", one group for every module at the
            top of the model, or `{group: name of a module or parameter, or a list of them}`; those that are not named
            are one more group, "rest". From the coefficients of the whole model, a second search moves those of one
            group after the other to single branches; the guarantees and `rule` are the same. Few examples are soon
            fitted so: many groups need many validation examples. None has one for all.
        turns: How branches take turns where `per_round` says so: "rotation", in which all return, or "halving", in
            which the worse half by coefficient is left out for good whenever all that are left have had a turn: losing
            branches get fewer steps, and few rounds are enough for many auxiliaries; or "win_stay", in which a branch
            stays for as long as it gets an equal share of the merges, at least, and a branch with all auxiliaries takes
            turns, too, the first one; or "win_stay_all", the same of all branches, so that the target's own branch
            rests, too, where others win, and a round trains `per_round` + 1. None takes "rotation"; without branches
            named, "win_stay_all", or with `confidence`, which falls back on the target's own branch, "win_stay", as
            where BatchNorm's running statistics become those of auxiliaries' own inputs, too. Where one other than
            "win_stay_all" is named there, few examples are searched by "one_standard_error", and by "rotation" and
            "halving" there is no branch of all auxiliaries, which would train in every round.
        validation_examples: Rank branches, search and select on so many validation examples, drawn once from the run's
            seed; what is returned, and the floor, are measured on all of them, and a refit trains on all. What is
            promised of a merge is promised on these examples. None sees all; without branches named, as many as make
            ranking and search cost a tenth of training, counted in examples, but at least 256. `search_examples` draws
            anew in every round, ranks and confirms on all, and saves less.

    Example:
        >>> import forkmerge as fm
        >>> fm.ForkMerge("per_auxiliary", interval=200, refit=True).search_for(3)
        Greedy(alphas=(0.0, 0.2, 0.4, 0.6, 0.8, 1.0))

    References:
        Jiang et al., ForkMerge: Mitigating Negative Transfer in Auxiliary-Task Learning, NeurIPS 2023.
    """

    @classmethod
    def paper(cls, **options: Any) -> ForkMerge:
        """The paper's behaviour, every option spelled out: later defaults do not change it.

        It differs from `ForkMerge("mixed")` in what pruning keeps: the largest coefficients, the target's or not.
        """
        return cls(**{**_PAPER, **options})

    @classmethod
    def authors_scripts(cls, **options: Any) -> ForkMerge:
        """What the authors' released scripts do where they differ from the paper (see docs/decisions.md).

        A branch enters a merge with its best weights since the start of training, coefficients are searched greedily
        also for two branches, and the best merge is returned. Their branches are `NestedTopK`.
        """
        return cls(**{**_PAPER, **AUTHORS_SCRIPTS, **options})

    def settings(self, problem: Problem) -> ForkMerge:
        """Return itself, with the branches, metric and rule that nobody has named as the target's metrics suggest."""
        if self.mixtures is not None:
            return self
        evaluation = problem.target_validation
        is_latest = self.turns in (None, WIN_STAY_ALL)
        needs_alone = self.confidence is not None  # which falls back on it
        turns = self.turns or (WIN_STAY if needs_alone else WIN_STAY_ALL)
        fixed = isinstance(self.search, Search) and not self.search.guarded
        joint: bool | Literal["sampled"] = self.method is not None or "sampled"  # methods combine all tasks in a step
        rule = BAGGED if is_latest else ONE_STANDARD_ERROR
        is_few = not fixed and adds_up_over_few(evaluation, self.validation_examples)
        doubled = is_latest and self.method is None and problem.weights == "loss"
        return replace(
            self,
            mixtures=PerAuxiliary(joint=joint if turns in _WINNERS_STAY else False),  # else it would train every round
            per_round=self.per_round or (1 if self.prune_to is None else None),
            turns=turns,
            search_by=self.search_by or smooth_metric(evaluation),
            rule=self.rule or (rule if is_few else ARGMAX),
            auxiliary_scale=self.auxiliary_scale or (_LOSS_SCALE if doubled else None),
        )

    def resolved(
        self, problem: Problem, model: nn.Module, seed: int, steps: int, started: Mapping[str, Any]
    ) -> ForkMerge:
        """Return itself with every option named, by what the model predicts; a run that was started keeps its own."""
        if self.mixtures is not None:
            return self
        if started.get("mixtures", {}).get("kind") == Mixed.__name__:
            return replace(self, mixtures=Mixed())  # the default of the first version
        if started and "validation_examples" not in started:  # that of the second
            return replace(self, turns=self.turns or ROTATION)._by_predictions(problem, model, seed)
        if started:
            chosen: dict[str, Any] = {name: started.get(name) for name in _CHOSEN if getattr(self, name) is None}
            return replace(self, **chosen)._by_predictions(problem, model, seed)
        seen = self.validation_examples
        if seen is None and self.search_examples is None:
            seen = affordable_examples(self.settings(problem), problem, steps)
            if seen is not None and not has_values(with_sample(problem.target_validation, seen, seed), model, seed):
                seen = None
        return replace(self, validation_examples=seen)._by_predictions(problem, model, seed)

    def _by_predictions(self, problem: Problem, model: nn.Module, seed: int) -> ForkMerge:
        chosen = self.settings(problem)
        if mixes_statistics(problem, model):  # then the target's own branch alone has statistics of its inputs
            chosen = replace(chosen, turns=self.turns or WIN_STAY, auxiliary_scale=self.auxiliary_scale or 1.0)
        if self.search_by is None and chosen.search_by is not None and not is_one_label_each(problem, model, seed):
            chosen = replace(chosen, search_by=None)
        if self.rule is None and chosen.rule != ARGMAX and not has_costs(problem, chosen.search_by, model, seed):
            chosen = replace(chosen, rule=ARGMAX)
        return chosen


@dataclass(frozen=True)
class Joint(Algorithm):
    """Train on all tasks with fixed weights, without forking: ForkMerge with one branch.

    Args:
        task_weights: `{task: weight}`; None weighs every task equally (EW).
        method: How the weighted tasks are combined, e.g. `PCGrad()` or "PCGrad"; None sums them.
        interval: Steps between validations; None makes five.
        select: The model returned: the "last", or the "best" on validation.
        refit: Train on training ∪ validation data of the target; with `select="last"` that is all that is trained.
    """

    task_weights: Mapping[str, float] | None = None
    method: Method | str | None = None
    interval: int | None = None
    select: Literal["last", "best"] = "last"
    refit: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "method", method_from(self.method))

    def settings(self, problem: Problem) -> Settings:
        """Return the equivalent ForkMerge."""
        weights = dict.fromkeys(problem.tasks, 1.0) if self.task_weights is None else self.task_weights
        joint = Mixture("joint", weights)
        return one_branch(joint, self.interval, self.method, select=self.select, refit=self.refit)


@dataclass(frozen=True)
class SingleTask(Algorithm):
    """Train on the target alone (STL).

    Args:
        interval: Steps between validations; None makes five.
        select: The model returned: the "last", or the "best" on validation.
        refit: Train on training ∪ validation data of the target; with `select="last"` that is all that is trained.
    """

    interval: int | None = None
    select: Literal["last", "best"] = "last"
    refit: bool = False

    def settings(self, problem: Problem) -> Settings:
        """Return the equivalent ForkMerge."""
        alone = Mixture(ALONE, {problem.target: 1.0})
        return one_branch(alone, self.interval, select=self.select, refit=self.refit)


def one_branch(mixture: Mixture, interval: int | None, method: Method | str | None = None, **options: Any) -> Settings:
    """Return the settings of a run without forks.

    Options that are not given are the paper's: averaging one branch, and every other policy, is the identity then, and
    later defaults of `ForkMerge` change nothing of what it is compared with.
    """
    own = {"mixtures": Given([mixture]), "interval": interval, "search": Fixed(), "method": method, **options}
    return Settings(**{**_PAPER, **own})
