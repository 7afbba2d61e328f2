"""Tables of a mixture of corpora: what is trained on, what it reached, what each corpus was worth, and over time."""

from __future__ import annotations

from forkmerge.algorithms.table_data import Table, show_bytes, show_number, show_seconds, show_share, word_table
from forkmerge.experiments.mix import Estimate, MixtureResult
from forkmerge.experiments.paired_statistics import Paired, spread
from forkmerge.experiments.text_mixture import CorporaFacts


def corpora_table(facts: CorporaFacts) -> Table:
    """Return what is trained on, and what gives away text to validate or test on."""
    rows = [(each.name, str(each.documents), show_bytes(each.size), str(each.contaminated)) for each in facts.corpora]
    done = "left out" if facts.contamination == "drop" else "kept, as --contamination report asks for"
    notes = [f"{each.contamination}: {done}" for each in facts.corpora if each.contaminated]
    notes += [
        f"{each.name} has no ids: translations are not looked for in it" for each in facts.corpora if each.lacks_ids
    ]
    title = f"corpora; of {facts.target}, {facts.validation} documents to validate on, {facts.test} to test on"
    return word_table(title, ("corpus", "documents", "text", "near-duplicates or translations of these"), rows, notes)


def mixture_tables(result: MixtureResult) -> list[Table]:
    """Return what a mixture reached, what each corpus was worth, and the mixture over time."""
    return [_scores(result), _relevance(result), _rounds(result)]


def _scores(result: MixtureResult) -> Table:
    metric = result.metric.replace("_", " ")
    rows = []
    for label in result.labels:
        values = spread(list(result.scores[label].values()))
        deviation = "" if values.std is None else f" ± {values.std:.2g}"
        is_best = result.best_single is not None and label == f"with {result.best_single}"
        shown = f"{label}, the best single corpus" if is_best else label
        steps, seconds = result.steps[label], result.seconds[label]
        gain = _gain(result.gains.get(label))
        rows.append((shown, f"{show_number(values.mean)}{deviation}", gain, str(steps), show_seconds(seconds)))
    seeds = len(next(iter(result.scores.values())))
    notes = [
        *(["the best single corpus is chosen on validation text"] if result.best_single is not None else []),
        "gains are of the mixture, positive where it is better",
        "one seed: repeat with --seeds 5 before you believe a small gain" if seeds == 1 else f"{seeds} seeds",
    ]
    head = ("training", metric, "gain of the mixture", "steps", "time")
    return word_table(f"{metric} on {result.split} text, lower is better", head, rows, notes)


def _gain(paired: Paired | None) -> str:
    if paired is None:
        return ""
    interval = "" if paired.low is None or paired.high is None else f" [{paired.low:+.3f}, {paired.high:+.3f}]"
    return f"{paired.mean:+.3f}{interval}"


def _relevance(result: MixtureResult) -> Table:
    over = "seeds" if len(next(iter(result.scores.values()))) > 1 else "the rounds of one seed"
    rows = [(name, _interval(estimate)) for name, estimate in result.relevance.items()]
    notes = [f"relevance (λ): weight in the merges, the target's own being 1; 95 % over {over}"]
    return word_table("what each corpus was worth", ("corpus", "relevance"), rows, notes)


def _interval(estimate: Estimate) -> str:
    if estimate.low is None or estimate.high is None:
        return show_share(estimate.mean)
    return f"{show_share(estimate.mean)} [{show_share(estimate.low)}, {show_share(estimate.high)}]"


def _rounds(result: MixtureResult) -> Table:
    names = list(result.mixture[0]) if result.mixture else []
    rows = [(str(index), *(f"{each[name]:.0%}" for name in names)) for index, each in enumerate(result.mixture, 1)]
    return word_table("the mixture over time: steps that read each corpus", ("round", *names), rows)
