"""The demo's words follow its numbers."""

from __future__ import annotations

import copy

from forkmerge.cli import demo
from forkmerge.cli.demo_text import conclude, print_report
from forkmerge.experiments.run_results import RunResult

SINGLE = {0: 0.80, 1: 0.82}


def _method(accuracies: list[float], rounds: list[dict[str, float]] | None = None) -> dict[str, object]:
    single = {seed: SINGLE[seed] for seed in range(len(accuracies))}
    runs = [
        {seed: RunResult("x", "x", "digits", seed, "final", {}, "", metrics={"accuracy": value}) for seed, value in own}
        for own in (enumerate(accuracies), single.items())
    ]
    summary = demo._summary(*runs)
    summary["mean_coefficients"] = rounds or []
    summary["coefficients"] = [rounds] * len(accuracies) if rounds else []
    return summary


def _methods(fork: list[float], *, helped: float = 0.05) -> dict[str, dict[str, object]]:
    runs = len(fork)
    single = list(SINGLE.values())[:runs]
    chosen = [{"alone": 0.3, "a": 0.6, "b": 0.1, "c": 0.0}, {"alone": 0.35, "a": 0.4, "b": 0.25, "c": 0.0}]
    return {
        "single": _method(single),
        "with a": _method([value + helped for value in single]),
        "with b": _method(single),
        "with c": _method([value - 0.2 for value in single]),
        "fork": _method(fork, chosen),
    }


def test_the_conclusion_names_what_was_kept_and_what_was_refused():
    said = " ".join(conclude(_methods([0.86, 0.885]), "single", ["fork"], ["a", "b", "c"]))
    assert "kept a (0.50), used a little of b (0.17), refused c (0.00)" in said
    assert "a +5.0, b +0.0, c -20.0 points" in said
    assert "fork: better than single-task, 87.2% against 81.0% (+6.2 points), on 2 of 2 seeds" in said
    assert "more than chance explains" in said
    assert "highest mean" not in said


def test_the_conclusion_can_say_that_nothing_was_kept():
    methods = _methods([0.86, 0.885])
    methods["fork"]["mean_coefficients"] = [{"alone": 1.0, "a": 0.0, "b": 0.0, "c": 0.0}]
    said = " ".join(conclude(methods, "single", ["fork"], ["a", "b", "c"]))
    assert "the merges refused a (0.00), b (0.00) and c (0.00): mean" in said


def test_the_conclusion_admits_harm_chance_and_a_better_method():
    worse = " ".join(conclude(_methods([0.70, 0.725]), "single", ["fork"], ["a", "b", "c"]))
    assert "fork: worse than single-task, 71.2% against 81.0% (-9.8 points), on 2 of 2 seeds" in worse
    assert "The highest mean, 86.0%, is that of 'with a'" in worse
    unsure = " ".join(conclude(_methods([0.90, 0.80]), "single", ["fork"], ["a", "b", "c"]))
    assert "on 1 of 2 seeds, which may be chance" in unsure
    equal = " ".join(conclude(_methods([0.80, 0.82]), "single", ["fork"], ["a", "b", "c"]))
    assert "fork: as good as single-task" in equal
    lonely = " ".join(conclude(_methods([0.9]), "single", ["fork"], ["a", "b", "c"]))
    assert "on one seed, which proves nothing" in lonely


def test_a_report_of_one_seed_has_no_spread(capsys):
    methods = _methods([0.9])
    results = {
        "labels": 60,
        "test_examples": 1737,
        "seeds": [0],
        "methods": copy.deepcopy(methods),
        "conclusion": conclude(methods, "single", ["fork"], ["a", "b", "c"]),
        "files": {"figure": "f", "results": "r", "comparison": "a c"},
        "workers": 1,
        "seconds": 61.0,
    }
    print_report(results, demo.AUXILIARIES)
    printed = capsys.readouterr().out
    assert "±" not in next(line for line in printed.splitlines() if line.startswith("fork"))
    assert "61 s in one process" in printed
    assert "forkmerge report 'a c'" in printed
