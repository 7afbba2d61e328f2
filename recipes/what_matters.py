"""docs/what-matters.md: every mechanism of ForkMerge on and off, from the development records and from nothing else.

Two forms of ForkMerge that were run on the same seeds and differ in one mechanism alone are a comparison of it; so is a
form in a setting and in its variant NAME_paired, in which branches read the same batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from overview import LOSS, WIN, steps_ratio, verdict
from setting import Setting, percent, show_paired

from forkmerge.experiments.paired_statistics import Paired, compare_paired
from forkmerge.methods.option_syntax import show_options

Options = dict[str, object]


@dataclass(frozen=True)
class Mechanism:
    """What can be on or off.

    Args:
        title: Its name.
        words: What it does, for somebody who has not read the paper.
        options: The options that it is made of; two forms that differ in these alone are compared.
        key: The option without which it is off; None where it is in the word itself.
        bases: The words without and with it, where it is in the word itself.
        needed: Options that the form without it must have, where the word with it stands for them.
        beside: Words of other methods, to see whether it is ForkMerge that it helps.
        is_of_default: Whether the default has it without saying so: its forms then cannot do without it.
        value: What the key's option must be; None for anything.
    """

    title: str
    words: str
    options: tuple[str, ...] = ()
    key: str | None = None
    bases: tuple[str, str] | None = None
    needed: tuple[tuple[str, object], ...] = ()
    beside: tuple[str, ...] = ()
    is_of_default: bool = False
    value: object = None

    def is_between(self, before: tuple[str, Options], after: tuple[str, Options]) -> bool:
        """Whether it is off in one form, on in the other, and all that is different between them."""
        (base, options), (other, others) = before, after
        rest = [{k: v for k, v in each.items() if k not in self.options} for each in (options, others)]
        if self.bases is not None:
            has_needed = all(options.get(name) == value for name, value in self.needed)
            is_its_own = not any(name in others for name, _ in self.needed)
            return (base, other) == self.bases and rest[0] == rest[1] and has_needed and is_its_own
        has_anyway = self.is_of_default and base.startswith(("forkmerge-win-stay", "forkmerge-in-turn"))
        is_added = self.key not in options and self.key in others and not has_anyway
        is_added = is_added and self.value in (None, others.get(str(self.key)))
        return base == other and rest[0] == rest[1] and is_added


MECHANISMS = (
    Mechanism(
        "One branch per auxiliary",
        "Instead of two branches, the target alone and with all auxiliaries, one branch for every auxiliary. A merge "
        "can take one and leave another.",
        bases=("forkmerge", "forkmerge-aux"),
    ),
    Mechanism(
        "Searching",
        "The coefficients of a merge are found on validation data, instead of equal ones that look at nothing.",
        ("search_by", "rule"),
        bases=("forkmerge-aux-uniform", "forkmerge-aux"),
    ),
    Mechanism(
        "A smooth cost",
        "The search goes by likelihood (`search_by='nll'`) instead of the metric that is reported. Few examples decide "
        "an accuracy by a handful of them; all of them speak in a likelihood.",
        ("search_by",),
        "search_by",
    ),
    Mechanism(
        "Rules that know the noise",
        "Among candidates that validation cannot tell apart, the one nearest to uniform (`one_standard_error`), or the "
        "mean of what resamples of the validation examples would choose (`bagged`), instead of the best "
        "(`argmax`).",
        ("rule",),
        "rule",
        is_of_default=True,
    ),
    Mechanism(
        "Branches in turn",
        "In every round, the target alone and one auxiliary's branch (`per_round=1`), with shorter rounds: two "
        "branches at a time, however many auxiliaries there are.",
        ("per_round", "interval"),
        "per_round",
        is_of_default=True,
    ),
    Mechanism(
        "Winners stay",
        "Of the branches that take turns, that of all auxiliaries among them and first, one stays for as long as it "
        "gets half of the merges (`forkmerge-win-stay`), instead of going on to the next one. Where there are many "
        "validation examples (census), its searches also see a sample of them only.",
        ("per_round", "rule", "search_by"),
        bases=("forkmerge-aux", "forkmerge-win-stay"),
        needed=(("per_round", 1), ("rule", "one_standard_error")),
    ),
    Mechanism(
        "The default, and the form before it",
        "The three mechanisms that follow, together: `forkmerge-win-stay-all` instead of `forkmerge-win-stay`; where "
        "BatchNorm sees auxiliaries' own inputs (PACS, SVHN, CIFAR-10), of the three only the rule differs.",
        bases=("forkmerge-win-stay", "forkmerge-win-stay-all"),
    ),
    Mechanism(
        "The target's own branch takes turns",
        "Winners stay whoever they are (`forkmerge-win-stay-all`, the default): the target's own branch rests where "
        "two others win, instead of training in every round.",
        ("auxiliary_scale", "rule"),
        bases=("forkmerge-win-stay", "forkmerge-win-stay-all"),
        needed=(("auxiliary_scale", 2), ("rule", "bagged")),
    ),
    Mechanism(
        "Twice the weight",
        "Losses of auxiliaries weigh twice as much as the target's (`auxiliary_scale=2`, the default's) instead of as "
        "much, so that half of a branch amounts to equal weights.",
        ("auxiliary_scale",),
        bases=("forkmerge-win-stay-all", "forkmerge-win-stay-all"),
        needed=(("auxiliary_scale", 1),),
    ),
    Mechanism(
        "Twice the weight, elsewhere",
        "Where the default leaves them as they are, as BatchNorm's running statistics become those of auxiliaries' own "
        "inputs, too (PACS, SVHN, CIFAR-10), and in other forms.",
        ("auxiliary_scale",),
        "auxiliary_scale",
        value=2,
    ),
    Mechanism(
        "Averaged winners of resamples",
        "Coefficients are the mean of those that win in resamples of the validation examples (`rule='bagged'`, the "
        "default's), instead of the nearest to uniform within a standard error.",
        ("rule",),
        bases=("forkmerge-win-stay-all", "forkmerge-win-stay-all"),
        needed=(("rule", "one_standard_error"),),
    ),
    Mechanism(
        "The target's own branch in every round, for BatchNorm",
        "Where BatchNorm's running statistics become those of auxiliaries' own inputs, too (PACS, SVHN, CIFAR-10), the "
        "target's own branch never rests (`turns='win_stay'`, the default's there), instead of resting where others "
        "win.",
        ("turns",),
        bases=("forkmerge-win-stay-all", "forkmerge-win-stay-all"),
        needed=(("turns", "win_stay_all"),),
    ),
    Mechanism(
        "Two branches instead of all",
        "The default (`forkmerge-win-stay-all`), twice the weight of auxiliaries included, instead of one branch per "
        "auxiliary with the same search: 2 / (K + 1) of the steps.",
        ("auxiliary_scale", "interval", "rule", "search_by"),
        bases=("forkmerge-aux", "forkmerge-win-stay-all"),
        needed=(("rule", "bagged"), ("per_round", None)),
    ),
    Mechanism(
        "A tail on the target",
        "The last part of every branch's steps is on the target alone (`tail`), so that a search sees what a branch is "
        "worth once the target has been trained on.",
        ("tail", "tail_anneal", "interval"),
        "tail",
    ),
    Mechanism(
        "Means of iterates",
        "The mean of a branch's last iterates enters a merge where it validates better than the branch itself "
        "(`average_iterates`).",
        ("average_iterates",),
        "average_iterates",
    ),
    Mechanism(
        "Previous merges",
        "A search may take something of the merge before, as if it were a branch (`previous_merges`).",
        ("previous_merges",),
        "previous_merges",
    ),
    Mechanism(
        "Sums beyond 1",
        "Coefficients may sum to more than 1, so that updates of branches add up (`search='sums'`).",
        ("search",),
        "search",
    ),
    Mechanism(
        "Layer groups",
        "Modules get coefficients of their own (`layer_groups='modules'`).",
        ("layer_groups",),
        "layer_groups",
    ),
    Mechanism(
        "Branches at several learning rates",
        "Every branch at its own rate and at three times that (`mixtures='rates'`): the search tunes while it trains.",
        ("mixtures",),
        "mixtures",
    ),
    Mechanism(
        "A larger learning rate",
        "Of the whole run, where the recipe's was chosen for nobody or for single-task training. Merges take out the "
        "noise that a large rate brings; single-task and joint training, which have no merges, are beside them.",
        ("lr",),
        "lr",
        beside=("stl", "ew", "joint-then-alone-average"),
    ),
    Mechanism(
        "Recomputed statistics",
        "Those of normalisation layers are computed anew for a merge (`bn='recompute'`) instead of averaged.",
        ("bn", "bn_batches"),
        "bn",
    ),
)

OWN_ORDER = Mechanism(
    "An order of one's own",
    "Every branch draws its own order of data (`fit(paired=False)`) instead of reading the same batches as the others "
    "at the same steps.",
)
_PAIRED = "_paired"

_HEAD = """# What matters

Each mechanism of ForkMerge on and off, all else equal, on development data: other seeds or other examples than those of
the [results](results.md), so that options can be chosen here and judged there. Made by `./run results` from the records
in `results/development/`; `forkmerge compare recipes/development/NAME.toml` makes those. Every form that was tried,
beside other methods: [how options were chosen](results-details.md#how-options-were-chosen).

*difference*: of Δ_m, the mean relative change against single-task training in per cent, with the 95 % interval over
paired seeds and seeds won–tied–lost; + means that the mechanism helps. *steps ×*: training steps without → with it,
over those of single-task training. Settings with two seeds have intervals that say little.
"""


_CHOSEN = """## What was chosen

One default for all settings, `fm.ForkMerge()` without branches named: two branches in every round, at first the
target alone and that of all auxiliaries, then whoever got half of the merge and the branch that has rested longest;
auxiliary losses at twice the target's weight; a smooth cost where the target is reported in an accuracy or AUC; and
coefficients averaged over resamples where a search sees up to 1,000 examples. Where BatchNorm sees auxiliaries' own
inputs, they weigh as much as the target, whose own branch trains in every round. Two branches make it affordable,
twice the steps of single-task training however many auxiliaries there are; where all branches at once are better,
naming `"per_auxiliary"` buys that for K + 1 times the steps.

What is new in it pays where everything helps: in the form before it the target's own branch trained in every round,
and the rule of one standard error prefers equal shares. On sentiment each of the three changes gains 0.2 to 0.4 %,
two of them beyond noise, and together 0.6 %, beyond it. On digits, each form at its best of three learning rates, the
default is 0.8 % ahead within noise; at the two smaller rates it is behind, at the recipe's own beyond noise. On PACS,
where every domain hurts, twice the weight lost 4.6 %, beyond noise; on SVHN and on PACS with ImageNet weights it lost
and on CIFAR-10 it gained, on two seeds each and within noise. So weights stay as they are where BatchNorm's running
statistics become those of auxiliaries' own inputs. With recomputed statistics, which cost passes over training data,
twice the weight was level with single-task training on PACS.

For the same reason the target's own branch does not rest there: it alone has statistics of the inputs that merges are
measured on. With it in every round the default gains 1.2 % on PACS and, at the larger learning rate, 2.3 % with
ImageNet weights, on every seed, most on sketches, and changes little on SVHN and CIFAR-10; all of it is within noise
over two or three seeds. At twice the weight it gains 3.9 and 1.5 % on the two, beyond noise. With it twice the weight
loses less than without, 1.8 % on PACS and 2.0 % with ImageNet weights, and gains 2.6 % on SVHN and 1.1 % on CIFAR-10,
all within noise: weights stay as they are, since it is PACS where they can hurt. Elsewhere the target's own branch may
rest, which by itself is worth 0.3 % on digits and 0.4 % on sentiment, within noise, too.

Auxiliaries that take turns one after the other are each read in a part of the rounds, which cost points where all of
them help. A tail gained nothing beyond noise, and one in which rates fall lost much on the one seed of Taskonomy;
means of iterates and previous merges gained nothing; layer groups and sums want more evidence than one setting gives,
so they stay options. Whether branches read the same batches or an order of their own makes no difference beyond
noise: the same batches, as in the paper, stay the default.

**The learning rate of the run matters more than any of this.** At three times the recipe's rate ForkMerge gains on
digits and SVHN, where single-task training gains nothing or is lost: merges average the noise away that a large rate
brings. On manual pages the default gains by it, within noise over two seeds, and other forms do not; on CIFAR-10 it
is too large for all. So try a larger rate for ForkMerge than the one that was best for single-task training. Branches
at several rates try it for you, for twice the branches.

What a search wins over equal coefficients is little in most rows of *Searching*. It is there for the tasks that hurt:
the [results](results.md) have settings in which merging without a search costs the target a tenth of its score.
"""


def page(studies: Sequence[Setting]) -> str:
    """Return the page: what to remember, then a section per mechanism."""
    found = {mechanism: list(_rows(mechanism, studies)) for mechanism in MECHANISMS}
    found[OWN_ORDER] = list(_rows_of_order(studies))
    shown = {mechanism: rows for mechanism, rows in found.items() if rows}
    if not shown:
        return _HEAD + "\nThere are no records yet.\n"
    lines = [_HEAD, "## In short", "", "| mechanism | comparisons | better | worse | mean difference, % |"]
    lines += ["|---|---|---|---|---|", *(_short(mechanism, rows) for mechanism, rows in shown.items()), ""]
    lines += ["*better*, *worse*: beyond noise, which is to say that the interval does not hold 0.", "", _CHOSEN]
    for mechanism, rows in shown.items():
        lines += [f"## {mechanism.title}", "", mechanism.words, ""]
        lines += ["| setting | seeds | without | with | difference | steps × |", "|---|---|---|---|---|---|"]
        lines += [row.cells for row in rows] + [""]
    return "\n".join(lines).rstrip() + "\n"


@dataclass(frozen=True)
class _Row:
    difference: Paired
    cells: str
    is_forkmerge: bool = True


def _rows(mechanism: Mechanism, studies: Sequence[Setting]) -> Iterator[_Row]:
    for s in studies:
        forms = {
            word: (found.word.partition("[")[0], dict(found.options))
            for word, found in s.contenders.items()
            if (found.base.startswith("forkmerge") or found.base in mechanism.beside) and word in s.overall
        }
        for before, after in ((a, b) for a in forms for b in forms if mechanism.is_between(forms[a], forms[b])):
            difference = s.paired(after, before)
            if difference is None:
                continue
            shown = [_name(s, word) for word in (before, after)]
            ratio = " → ".join(f"{steps_ratio(s, word):.1f}" for word in (before, after))
            cells = [s.name, str(difference.count), *shown, show_paired(difference), ratio]
            yield _Row(difference, "| " + " | ".join(cells) + " |", s.contenders[after].base not in mechanism.beside)


def _rows_of_order(studies: Sequence[Setting]) -> Iterator[_Row]:
    """Compare forms with themselves in the variant of a setting in which branches read the same batches."""
    for paired in studies:
        own = paired.base
        if own is None or not paired.name.endswith(_PAIRED):
            continue
        alone = [result for result in own.outcomes if result.method == "stl"]  # one reference for both
        alike = replace(paired, outcomes=[*alone, *(each for each in paired.outcomes if each.method != "stl")])
        for word in (word for word, one in alike.contenders.items() if one.base.startswith("forkmerge")):
            if word not in own.overall or word not in alike.overall:
                continue
            difference = compare_paired(own.overall[word], alike.overall[word])
            if difference is not None:
                ratio = f"{steps_ratio(own, word):.1f}"
                cells = [own.name, str(difference.count), *[_name(own, word)] * 2, show_paired(difference), ratio]
                yield _Row(difference, "| " + " | ".join(cells) + " |")


def _name(s: Setting, word: str) -> str:
    found = s.contenders[word]
    return f"`{found.word.partition('[')[0]}{show_options(dict(found.options))}`"


def _short(mechanism: Mechanism, rows: Sequence[_Row]) -> str:
    rows = [row for row in rows if row.is_forkmerge] or rows
    verdicts = [verdict(row.difference) for row in rows]
    average = sum(row.difference.mean for row in rows) / len(rows)
    return f"| {mechanism.title} | {len(rows)} | {verdicts.count(WIN)} | {verdicts.count(LOSS)} | {percent(average)} |"
