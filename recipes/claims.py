"""The paper's claims, each decided from records: holds, does not, or not tested, with the numbers behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

from setting import Pairs, Setting, mean, percent, show_paired

from forkmerge.methods import GramianMethod, MatrixMethod, method_from

HOLDS, FAILS, UNTESTED = "holds", "does not", "not tested"
PAIRS = "Pairs of tasks that are negative under equal weights are not under ForkMerge"
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
    worse = {word: [target for target in s.changes if mean(s.changes[target][word]) < 0] for word in ("ew", s.chosen)}
    if not worse["ew"]:
        return None
    count = len(s.changes)
    text = f"negative targets: EW {len(worse['ew'])} of {count}, {s.labels[s.chosen]} {len(worse[s.chosen])} of {count}"
    return Finding(not worse[s.chosen], text)


def more_branches_better(s: Setting) -> Finding | None:
    if not {"forkmerge", "forkmerge-aux"} <= set(s.forms):
        return None
    paired = s.paired("forkmerge-aux", "forkmerge")
    if paired is None or s.summary.costs["forkmerge-aux"].branches <= 2:
        return None
    return Finding(paired.mean > 0, f"K+1 − two branches {show_paired(paired)}")


def gain_per_branch_falls(s: Setting) -> Finding | None:
    costs = {
        word: s.summary.costs[word] for word in s.forms if not set(dict(s.contenders[word].options)) - {"mixtures"}
    }
    gains = {cost.branches: cost.per_branch for cost in costs.values() if cost.per_branch is not None}
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
    return None if paired is None else Finding(paired.mean > 0, f"− best of the grid {show_paired(paired)}")


def converges_faster(s: Setting) -> Finding | None:
    """Compare the part of training after which validation first reaches what single-task training ends with."""
    if s.chosen is None:
        return None
    reached = {word: list(_reached(s, word)) for word in ("stl", s.chosen)}
    if not all(reached.values()):
        return None
    ours, theirs = fmean(reached[s.chosen]), fmean(reached["stl"])
    text = f"STL's last validation metrics are reached after {ours:.0%} of the steps, by STL after {theirs:.0%}"
    return Finding(ours < theirs, text)


def _reached(s: Setting, word: str) -> Iterator[float]:
    goals = {(o.target, o.seed): o.rounds[-1]["metrics"] for o in s.finals("stl") if o.rounds}
    for outcome in s.finals(word):
        goal = goals.get((outcome.target, outcome.seed))
        if goal is None or not outcome.rounds:
            continue
        name, sign = next(iter(outcome.directions.items()))
        ends = [r["end"] for r in outcome.rounds if sign * r["metrics"][name] >= sign * goal[name]]
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
    if "batch" not in s.name or s.rival is None or s.chosen is None:
        return None
    paired = s.paired(s.chosen, "stl")
    return None if paired is None else Finding(paired.mean > 0, f"with larger batches, − STL {show_paired(paired)}")


def pairs_recover(pairs: Pairs) -> Finding | None:
    """Compare training on every pair of a target and an auxiliary with equal weights and with ForkMerge."""
    if not pairs:
        return None
    harmed = {pair: found for pair, found in pairs.items() if found.joint < 0}
    still = [pair for pair, found in pairs.items() if found.merged < 0]
    beyond = [sum(found.is_harmful(which) for found in pairs.values()) for which in ("joint", "merged")]
    text = f"negative pairs: equal weights {len(harmed)} of {len(pairs)}, ForkMerge {len(still)} of {len(pairs)}"
    return Finding(beyond[1] == 0, f"{text}; beyond noise {beyond[0]} and {beyond[1]}")


CLAIMS: list[tuple[str, Decide]] = [
    ("ForkMerge is never below single-task training beyond noise, on any target", never_below_single_task),
    ("It has the best mean Δ_m of all methods", best_mean),
    ("Targets that lose under equal weights do not under ForkMerge", no_negative_transfer),
    (PAIRS, lambda s: pairs_recover(s.pairs)),
    ("K+1 branches are better than two", more_branches_better),
    ("The gain per branch, Δ_m/(B−1), falls with B", gain_per_branch_falls),
    ("Pruning keeps most of the gain", pruning_keeps_gain),
    ("A middle Δt is best", middle_interval_best),
    ("Coefficients are dynamic", coefficients_move),
    ("It lies beyond the grid search over task weights", beyond_grid),
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
        found = {s.name: finding for s in settings if (finding := decide(s)) is not None}
        held = sum(finding.holds for finding in found.values())
        verdict = UNTESTED if not found else HOLDS if held == len(found) else FAILS
        if len(found) > 1:
            verdict += f" ({held} of {len(found)})"
        numbers = "<br>".join(f"{name}: {finding.text}" for name, finding in found.items()) or "–"
        lines.append(f"| {claim} | {verdict} | {numbers} |".replace("\n", " "))
    return lines
