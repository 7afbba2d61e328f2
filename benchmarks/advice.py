"""How good cheap advice is: negative transfer predicted by short trials, beside full training of every pair.

    ./run bench advice [--only PACS] [--seeds 5] [--workers 2] [--probes]

Truth is the transfer gain at λ = 1 on the test split after full training, over paired seeds. The estimate is one
probe per seed (`forkmerge.analysis.advice`), which sees training and validation data only; beside it stands what
`forkmerge diagnose` would advise if it had nothing else. On the real problems ForkMerge is trained on every pair as
well: the page of results shows what became of those that hurt.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

from harness import HERE, begin, parser, read_results, save
from page import Goal, Section, Table

import forkmerge as fm
from forkmerge.analysis.advice import ShortRun, advise, affinity, pair_units, probe, probe_settings
from forkmerge.analysis.results import TransferCurve
from forkmerge.analysis.studies import measure_transfer
from forkmerge.analysis.transfer_runs import Recipes, SeededSource, forkmerge
from forkmerge.experiments.recipe import load_recipe

SMALL = HERE.parent / "recipes" / "small"
DEMO = "digits"
GOAL_F1, GOAL_SHARE = 0.80, 0.10
FIRST_SEED = 10  # the tolerance of the estimate was chosen with seeds below


def digits(seed: int, labels: int, steps: int | None = None) -> fm.Recipe:
    from forkmerge.datasets.digits import STEPS, recipe

    return fm.Recipe(**{**recipe(seed, labels).__dict__, "steps": steps or STEPS})


def small(name: str, target: str) -> Recipes:
    """Return the recipes of a file in recipes/small, by seed."""
    return SeededSource(load_recipe(SMALL / f"{name}.toml", {"target": target}).source, target)


def settings(quick: bool) -> dict[str, Recipes]:
    """Return the problems: the demo's with few and with many labels, and real ones where their data is at hand."""
    if quick:
        return {f"{DEMO}, 60 labels": partial(digits, labels=60, steps=40)}
    found: dict[str, Recipes] = {f"{DEMO}, {n} labels": partial(digits, labels=n) for n in (20, 60, 200, 600)}
    if os.environ.get("FORKMERGE_DATA"):
        from forkmerge.datasets.census import TASKS
        from forkmerge.datasets.pacs import DOMAINS

        found |= {f"PACS, {domain}": small("pacs", domain) for domain in DOMAINS}
        found |= {f"Census, {task}": small("census", task) for task in TASKS}
    return found


def score_probes(recipes: Recipes, seeds: Sequence[int]) -> dict[str, dict[str, Any]]:
    """Return what the probes say of every auxiliary."""
    recipe = recipes(seeds[0])
    plan = probe_settings(recipe.problem, recipe.steps)
    trials: list[ShortRun] = [trial for seed in seeds for trial in probe(recipes(seed), plan, seed)]
    found = {}
    for task in recipe.problem.auxiliaries:
        estimate = affinity(trials, task)
        one_by_one = [affinity([trial], task) for trial in trials if trial.auxiliary == task]
        found[task] = {
            "effect": estimate.mean,
            "predicted": estimate.is_negative,
            "predicted by seed": [one.is_negative for one in one_by_one],
            "advised": advise(None, estimate)[0],
        }
    return found


def share_of_training(recipe: fm.Recipe) -> float:
    """Return what a probe costs relative to one full run per auxiliary and one of the target alone, in batches."""
    settings = probe_settings(recipe.problem, recipe.steps)
    pairs = sum(pair_units(recipe.problem, auxiliary) for auxiliary in recipe.problem.auxiliaries)
    batches = settings.prefix + settings.steps * (1 + len(settings.weights) * pairs)
    return batches / (recipe.steps * (1 + pairs))


def score_setting(recipes: Recipes, seeds: Sequence[int], workers: int) -> dict[str, Any]:
    """Return truth and estimates of all pairs of a target, and what the estimates cost."""
    recipe = recipes(seeds[0])
    share = share_of_training(recipe)
    probed = score_probes(recipes, seeds)
    measure = partial(measure_transfer, recipes, weights=(1.0,), seeds=seeds, split="test", workers=workers)
    curves, merged = measure(), measure(maker=forkmerge) if isinstance(recipes, SeededSource) else {}
    pairs = {}
    for task, curve in curves.items():
        pairs[task] = {**_numbers(curve), **probed[task]}
        if task in merged:
            pairs[task]["ForkMerge"] = _numbers(merged[task])
    return {"share": share, "seeds": len(seeds), "pairs": pairs}


def _numbers(curve: TransferCurve) -> dict[str, Any]:
    gain = curve.points[0]
    return {"gain": gain.mean, "low": gain.low, "high": gain.high}


def f1(predicted: Sequence[bool], true: Sequence[bool]) -> float | None:
    """Return F1 of predicting the positives; None where there is none to find and none was claimed.

    >>> f1([True, True, False], [True, False, True])
    0.5
    """
    hits = sum(p and t for p, t in zip(predicted, true, strict=True))
    claims = sum(predicted) + sum(true)
    return 2 * hits / claims if claims else None


def is_decided(pair: Mapping[str, Any]) -> bool:
    """Whether full training shows the sign of the gain."""
    return pair["low"] is not None and (pair["low"] > 0 or pair["high"] < 0)


def is_against(pair: Mapping[str, Any]) -> bool:
    """Whether the advice is to give the auxiliary less weight, or none."""
    return pair["advised"] in ("down-weight", "drop")


def summary(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return F1 over all pairs, over those that full training decides, of single probes, and of the advice."""
    pairs = [pair for setting in results.values() for pair in setting["pairs"].values()]
    decided = [pair for pair in pairs if is_decided(pair)]
    single = [(claim, pair["gain"] < 0) for pair in decided for claim in pair["predicted by seed"]]
    advised = [pair for pair in decided if "advised" in pair]
    return {
        "pairs": len(pairs),
        "decided": len(decided),
        "negative": sum(pair["gain"] < 0 for pair in decided),
        "advised": len(advised),
        "f1 decided": f1([p["predicted"] for p in decided], [p["gain"] < 0 for p in decided]),
        "f1 all": f1([p["predicted"] for p in pairs], [p["gain"] < 0 for p in pairs]),
        "f1 single": f1([claim for claim, _ in single], [true for _, true in single]),
        "f1 advised": f1(list(map(is_against, advised)), [p["gain"] < 0 for p in advised]),
        "share": fmean(setting["share"] for setting in results.values()),
    }


def negatives(results: Mapping[str, Any], problem: str) -> list[str]:
    """Return the auxiliaries that hurt a problem's target beyond doubt, each once."""
    pairs = [item for name, found in results.items() if name.startswith(problem) for item in found["pairs"].items()]
    return list(dict.fromkeys(task for task, pair in pairs if is_decided(pair) and pair["gain"] < 0))


def section(results: Mapping[str, Any]) -> Section:
    """Say what the results mean."""
    rows = []
    for name, setting in results.items():
        for task, pair in setting["pairs"].items():
            interval = "" if pair["low"] is None else f" [{pair['low']:+.3f}, {pair['high']:+.3f}]"
            gain, effect = f"{pair['gain']:+.3f}{interval}", f"{pair['effect']:+.3f}"
            claims = pair["predicted by seed"]
            truth = "–" if not is_decided(pair) else "negative" if pair["gain"] < 0 else "positive"
            said = "negative" if pair["predicted"] else "not negative"
            by_seed = f"{sum(claims)}/{len(claims)}"
            rows.append([f"{name}: {task}", gain, effect, truth, said, by_seed, pair.get("advised", "–")])
    found = summary(results)
    goals = [Goal("share of the compute", GOAL_SHARE, found["share"], digits=3)]
    if found["f1 decided"] is not None:
        goals.insert(0, Goal("F1 of predicting negative transfer", GOAL_F1, found["f1 decided"], at_least=True))
    heads = ["pair", "gain, 95% interval", "short trial", "full training", "predicted", "probes that say so", "advised"]
    return Section(
        "Advice",
        "Negative transfer predicted by short trials, beside full training of every pair of auxiliary and target.",
        [Table(heads, rows)],
        goals,
        [
            *_scored(found),
            _limits(results),
            "The share counts batches: a probe over one full run per pair and one of the target alone.",
        ],
        [
            (
                "What does advice before training cost, and is it right?",
                f"{found['share']:.1%} of the compute of training every pair; "
                + (f"F1 {found['f1 decided']:.2f}" if found["f1 decided"] is not None else "no pair is decided"),
            )
        ],
    )


def _scored(found: Mapping[str, Any]) -> list[str]:
    shown = {key: "–" if found[key] is None else f"{found[key]:.2f}" for key in ("f1 all", "f1 single", "f1 advised")}
    text = (
        f"Scored are the {found['decided']} of {found['pairs']} pairs whose sign full training shows, "
        f"{found['negative']} of them negative. With the sign of the mean gain as truth for all pairs F1 is "
        f"{shown['f1 all']}; with one probe instead of one per seed it is {shown['f1 single']}."
    )
    if not found["advised"]:
        return [text]
    return [
        text,
        "Advised is what `forkmerge diagnose` says from the probes alone. With `down-weight` and `drop` as claims, F1 "
        f"over the {found['advised']} of the scored pairs where it was asked is {shown['f1 advised']}.",
    ]


def _limits(results: Mapping[str, Any]) -> str:
    bad = negatives(results, DEMO)
    where = f", where all that hurts is one task, `{bad[0]}`" if len(bad) == 1 else ""
    text = (
        f"The tolerance of the estimate was chosen on the demo's problem with other seeds{where}: its rows show how "
        "well the estimate can do, those of other problems how well it does."
    )
    found = summary({name: content for name, content in results.items() if not name.startswith(DEMO)} or results)
    if found["f1 decided"] is None or found["pairs"] == summary(results)["pairs"]:
        return text
    counts = f"{found['decided']} decided pairs, {found['negative']} of them negative"
    return f"{text} On those F1 is {found['f1 decided']:.2f} over {counts}."


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--seeds", type=int)
    arguments.add_argument("--only", default="", help="settings whose name begins so; the others' results are kept")
    arguments.add_argument("--workers", type=int, default=1)
    arguments.add_argument("--probes", action="store_true", help="probe again, and keep what full training has shown")
    options = begin(arguments, argv)
    count = options.seeds or (1 if options.quick else 5)
    seeds = range(FIRST_SEED, FIRST_SEED + count)
    results = {} if options.quick else read_results("advice", options.out)
    for name, recipes in settings(options.quick).items():
        if name.startswith(options.only) and (name in results or not options.probes):
            if options.probes:
                known = results[name]
                for task, found in score_probes(recipes, range(FIRST_SEED, FIRST_SEED + known["seeds"])).items():
                    known["pairs"][task] |= found
            else:
                results[name] = score_setting(recipes, list(seeds), options.workers)
            save("advice", results, options.out)
            print(f"{name}: {results[name]}", flush=True)
    print(summary(results))


if __name__ == "__main__":
    main()
