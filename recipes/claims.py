"""The paper's claims, each decided from records: holds, does not, or not tested, with the numbers behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

from setting import Pairs, Setting, mean, percent, show_paired

from forkmerge.experiments.summary import average_changes, changes_by_target
from forkmerge.methods import GramianMethod, MatrixMethod, method_from

HOLDS, FAILS, UNTESTED = "holds", "does not", "not tested"
PAIRS = "Pairs of tasks that equal weights harm are not harmed by ForkMerge"
_MOVED = 0.1  # how far coefficients move from round to round, in total variation, to be called dynamic


@dataclass(frozen=True)
class Finding:
    """What one setting says about a claim."""

    holds: bool
    text: str


Decide = Callable[[Setting], Finding | None]


def never_below_single_task(s: Setting) -> Finding | None:
    found = [(form, target, s.paired(form, "stl", target)) for form in s.forms for target in s.changes]
    known = [(form, target, paired) for form, target, paired in found if paired is not None and paired.high is not None]
    if not known:
        return None
    below = [(form, target, paired) for form, target, paired in known if paired.high < 0]
    worst = min(known, key=lambda each: each[2].mean)
    shown = "; ".join(f"{s.labels[form]} on {target} {show_paired(paired)}" for form, target, paired in below[:3])
    text = f"{len(below)} of {len(known)} (form, target) below beyond noise"
    return Finding(not below, f"{text}: {shown}" if below else f"{text}; lowest mean {percent(worst[2].mean)} %")


def best_mean(s: Setting) -> Finding | None:
    if s.chosen is None or len(s.others) < 2:
        return None
    ranked = sorted(s.others, key=lambda word: -mean(s.overall[word]))
    ours = mean(s.overall[s.chosen])
    place = 1 + sum(mean(s.overall[word]) > ours for word in ranked)
    rival = ranked[0]
    return Finding(
        place == 1,
        f"{s.labels[s.chosen]} {percent(ours)} %, place {place} of {len(ranked) + 1}; best other {s.labels[rival]} "
        f"{percent(mean(s.overall[rival]))} %; difference {show_paired(s.paired(s.chosen, rival))}",
    )


def no_negative_transfer(s: Setting) -> Finding | None:
    if "ew" not in s.overall or s.chosen is None:
        return None
    harmed = [target for target in s.changes if s.is_below(s.paired("ew", "stl", target))]
    still = [target for target in harmed if s.is_below(s.paired(s.chosen, "stl", target))]
    if not harmed:
        return None
    text = (
        f"of {len(s.changes)} targets EW harms {len(harmed)} beyond noise, {s.labels[s.chosen]} {len(still)} of those"
    )
    return Finding(not still, text)


def more_branches_better(s: Setting) -> Finding | None:
    if not {"forkmerge", "forkmerge-aux"} <= set(s.forms):
        return None
    paired = s.paired("forkmerge-aux", "forkmerge")
    if paired is None or s.summary.costs["forkmerge-aux"].branches <= 2:
        return None
    return Finding(paired.mean > 0, f"K+1 − two branches {show_paired(paired)}")


def gain_per_branch_falls(s: Setting) -> Finding | None:
    """Compare numbers of branches, where every one of them gains something beyond noise."""
    plain = [word for word in s.forms if not set(dict(s.contenders[word].options)) - {"mixtures", "prune_to"}]
    paired = {word: s.paired(word, "stl") for word in plain}
    if any(found is None or (found.mean if found.low is None else found.low) <= 0 for found in paired.values()):
        return None
    costs = [s.summary.costs[word] for word in plain]
    gains = {cost.branches: cost.per_branch for cost in costs if cost.per_branch is not None}
    if len(gains) < 2:
        return None
    ordered = [gains[count] for count in sorted(gains)]
    shown = ", ".join(f"B={count} {percent(gains[count])} %" for count in sorted(gains))
    return Finding(all(a >= b for a, b in pairwise(ordered)), f"Δ_m/(B−1): {shown}")


def pruning_keeps_gain(s: Setting) -> Finding | None:
    for word in s.forms:
        options = dict(s.contenders[word].options)
        kept = options.pop("prune_to", None)
        whole = next(
            (
                w
                for w in s.forms
                if s.contenders[w].base == s.contenders[word].base and dict(s.contenders[w].options) == options
            ),
            None,
        )
        if kept is None or whole is None:
            continue
        gain, pruned = mean(s.overall[whole]), mean(s.overall[word])
        text = f"{s.labels[whole]} {percent(gain)} %, pruned to {kept} {percent(pruned)} %"
        return Finding(pruned >= gain / 2, text) if gain > 0 else None
    return None


def middle_interval_best(s: Setting) -> Finding | None:
    for base in ("forkmerge", "forkmerge-aux"):
        words = {
            s.option(word, "interval"): word
            for word in s.forms
            if s.contenders[word].base == base and not set(dict(s.contenders[word].options)) - {"interval"}
        }
        words.pop(None, None)
        if len(words) < 3:
            continue
        best = max(words, key=lambda interval: mean(s.overall[words[interval]]))
        shown = ", ".join(f"Δt={each} {percent(mean(s.overall[words[each]]))} %" for each in sorted(words))
        return Finding(best not in (min(words), max(words)), shown)
    return None


def coefficients_move(s: Setting) -> Finding | None:
    moved = []
    for word in s.forms:
        for outcome in s.finals(word):
            rounds = [each["coefficients"] for each in outcome.rounds if each.get("coefficients")]
            for before, after in pairwise(rounds):
                moved.append(sum(abs(after.get(k, 0.0) - before.get(k, 0.0)) for k in {*before, *after}) / 2)
    if not moved:
        return None
    return Finding(fmean(moved) > _MOVED, f"coefficients move by {fmean(moved):.2f} from round to round, on average")


def beyond_grid(s: Setting) -> Finding | None:
    if "grid" not in s.overall or s.chosen is None:
        return None
    paired = s.paired(s.chosen, "grid")
    text = f"− the grid's best on validation {show_paired(paired)}"
    return None if paired is None else Finding(paired.mean > 0, text)


def converges_faster(s: Setting) -> Finding | None:
    """Compare the part of training after which validation first reaches what single-task training ends with.

    Only steps count at which both were validated. ForkMerge's searches see the validation data, which favours it.
    """
    if s.chosen is None:
        return None
    reached = {word: list(_reached(s, word)) for word in ("stl", s.chosen)}
    if not all(reached.values()):
        return None
    ours, theirs = fmean(reached[s.chosen]), fmean(reached["stl"])
    text = f"STL's last validation metrics are reached after {ours:.0%} of the steps, by STL after {theirs:.0%}"
    return Finding(ours < theirs, text)


def _reached(s: Setting, word: str) -> Iterator[float]:
    baselines = {(o.target, o.seed): o.rounds for o in s.finals("stl") if o.rounds}
    for outcome in s.finals(word):
        baseline = baselines.get((outcome.target, outcome.seed))
        if baseline is None or not outcome.rounds:
            continue
        goal, common = baseline[-1]["metrics"], {r["end"] for r in baseline}
        name, sign = next(iter(outcome.directions.items()))
        reached = [r for r in outcome.rounds if sign * r["metrics"][name] >= sign * goal[name]]
        ends = [r["end"] for r in reached if r["end"] in common]
        yield min(ends, default=2 * outcome.steps) / outcome.steps  # twice as long where it never did


def varies_less(s: Setting) -> Finding | None:
    if s.chosen is None:
        return None
    spreads: dict[str, float] = {}
    for word in (*s.others, s.chosen):
        found = [each for rows in s.summary.targets.values() for each in rows if each.method == word]
        stds = [each.change.std for each in found if each.change is not None and each.change.std is not None]
        if stds:
            spreads[word] = fmean(stds)
    others = [value for word, value in spreads.items() if word != s.chosen]
    if s.chosen not in spreads or not others:
        return None
    ours, middle = spreads[s.chosen], median(others)
    return Finding(ours < middle, f"std of Δ over seeds {100 * ours:.2f} %, median of the others {100 * middle:.2f} %")


def not_slower(s: Setting) -> Finding | None:
    times = {word: s.summary.costs[word].time for word in s.overall}
    gradient = [times[word] for word in s.others if _is_gradient(s, word) and times[word] is not None]
    if "forkmerge" not in times or times["forkmerge"] is None or not gradient:
        return None
    ours, middle = times["forkmerge"], median(gradient)
    return Finding(ours <= middle, f"time of two branches {ours:.2f} × STL, median of gradient methods {middle:.2f} ×")


def _is_gradient(s: Setting, word: str) -> bool:
    name = s.contenders[word].method
    return name is not None and isinstance(method_from(name), GramianMethod | MatrixMethod)


def equal_weights_win_with_capacity(s: Setting) -> Finding | None:
    if "vit" not in str(s.plan["settings"]).lower() or not {"ew", "posttrain"} <= set(s.overall):
        return None
    ew, others = mean(s.overall["ew"]), max(0.0, mean(s.overall["posttrain"]))
    return Finding(ew > others, f"EW {percent(ew)} %, PostTrain {percent(mean(s.overall['posttrain']))} %")


def batches_do_not_explain(s: Setting) -> Finding | None:
    """Compare equal weights with large batches and ForkMerge with those of the setting that this is a variant of."""
    if s.base is None or "batch" not in s.name or s.base.chosen is None or "ew" not in s.overall:
        return None
    # Both against single-task training with the batches of the base: larger ones may help that, too.
    plain = [o for o in s.base.outcomes if o.method == "stl"]
    scores = average_changes(changes_by_target([*plain, *(o for o in s.outcomes if o.method == "ew")], s.plan))
    large, ours = mean(scores["ew"]), mean(s.base.overall[s.base.chosen])
    return Finding(ours > large, f"EW with large batches {percent(large)} %, ForkMerge without {percent(ours)} %")


def pairs_recover(pairs: Pairs) -> Finding | None:
    """Compare training on every pair of a target and an auxiliary with equal weights and with ForkMerge."""
    if not pairs:
        return None
    harmed = [found for found in pairs.values() if found.is_harmful("joint")]
    if not harmed:
        return None
    still = [found for found in harmed if found.is_harmful("merged")]
    means = [
        sum(gain < 0 for gain in gains) for gains in zip(*((f.joint, f.merged) for f in pairs.values()), strict=True)
    ]
    return Finding(
        not still,
        f"of {len(pairs)} pairs equal weights harm {len(harmed)} beyond noise, ForkMerge {len(still)} of those; "
        f"mean gain below zero: {means[0]}, then {means[1]}",
    )


CLAIMS: list[tuple[str, Decide]] = [
    ("ForkMerge is never below single-task training beyond noise, on any target", never_below_single_task),
    ("It has the best mean Δ_m of all methods", best_mean),
    ("Targets that equal weights harm are not harmed by ForkMerge", no_negative_transfer),
    (PAIRS, lambda s: pairs_recover(s.pairs)),
    ("K+1 branches are better than two", more_branches_better),
    ("The gain per branch, Δ_m/(B−1), falls with B", gain_per_branch_falls),
    ("Pruning keeps most of the gain", pruning_keeps_gain),
    ("A middle Δt is best", middle_interval_best),
    ("Coefficients are dynamic", coefficients_move),
    ("It lies beyond a grid search over task weights, on the target", beyond_grid),
    ("It converges faster", converges_faster),
    ("It varies less over seeds", varies_less),
    ("Larger batches do not explain the gain", batches_do_not_explain),
    ("With a high-capacity backbone equal weights may beat STL and Post-train", equal_weights_win_with_capacity),
    ("It is not slower than most gradient methods", not_slower),
]


def claims_table(settings: Sequence[Setting]) -> list[str]:
    """Return the table of claims: a claim holds where it does in every setting that tests it."""
    lines = ["| claim | verdict | numbers |", "|---|---|---|"]
    for claim, decide in CLAIMS:
        # A variant of a setting is the same data again: it speaks where the variant is the point.
        asked = [s for s in settings if s.base is None or decide in (batches_do_not_explain, beyond_grid)]
        found = {s.name: finding for s in asked if (finding := decide(s)) is not None}
        held = sum(finding.holds for finding in found.values())
        verdict = UNTESTED if not found else HOLDS if held == len(found) else FAILS
        if len(found) > 1:
            verdict += f" ({held} of {len(found)})"
        numbers = "<br>".join(f"{name}: {finding.text}" for name, finding in found.items()) or "–"
        lines.append(f"| {claim} | {verdict} | {numbers} |".replace("\n", " "))
    return lines
