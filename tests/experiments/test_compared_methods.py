"""From a word to an algorithm: every method of the paper, in any spelling, with the recipe's own options."""

from __future__ import annotations

from dataclasses import replace

import pytest

import forkmerge as fm
from compare_problem import recipe
from forkmerge.algorithms.branches.round_sizes import branch_count
from forkmerge.algorithms.equal_compute import Averaged
from forkmerge.experiments.compared.method_words import ABOUT
from forkmerge.experiments.compared_methods import (
    PAPER,
    compared_method_from,
    compared_methods_from,
    equal_compute_words,
    takes,
    with_setting,
)
from forkmerge.experiments.comparison import plan_comparison
from paths import ROOT


def test_the_recipes_own_options_are_what_methods_have_in_common():
    made = replace(
        recipe(), algorithm=fm.ForkMerge("mixed", interval=2, select="best", bn="recompute", search="binary")
    )
    built = {word: compared_method_from(word).algorithm(made, refit=False) for word in ("stl", "ew", "forkmerge-aux")}
    assert built["stl"] == fm.SingleTask(2, "best")
    assert built["ew"] == fm.Joint(interval=2, select="best")
    # Three branches are too many for a binary search.
    assert built["forkmerge-aux"] == fm.ForkMerge("per_auxiliary", interval=2, select="best", bn="recompute")


def test_words_name_methods_whatever_their_case():
    found = compared_methods_from(
        "STL, nash-mtl ,forkmerge+PC_Grad,torchjd:UPGrad,torchjd:GradVac(beta=0.1),auto-λ,stl-best:3"
    )
    assert [method.label for method in found] == [
        "STL",
        "NashMTL",
        "ForkMerge + PCGrad",
        "torchjd:UPGrad",
        "torchjd:GradVac(beta=0.1)",
        "AutoLambda",
        "STL, best of 3",
    ]
    assert len(compared_methods_from("paper")) == 16
    words = [method.word for method in compared_methods_from("all,paper,stl")]
    assert len(words) == len(set(words)) > 25


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pcgrd", "unknown method 'pcgrd'. Did you mean 'pcgrad'"),
        ("forkmerg", "Did you mean 'forkmerge'"),
        ("ew+pcgrad", "unknown algorithm to combine with a method 'ew'"),
        ("forkmerge+pcgrd", "Did you mean 'pcgrad'"),
        ("torchjd:UPGrd", "UPGrd"),
        (" , ", "names no method"),
    ],
)
def test_unknown_methods_are_named_with_the_closest(text, message):
    with pytest.raises(fm.ForkMergeError) as error:
        compared_methods_from(text)
    assert message in str(error.value)


def test_options_of_methods_inside_can_be_set():
    made = replace(recipe(), algorithm=compared_method_from("forkmerge+cagrad").algorithm(recipe(), refit=False))
    assert with_setting(made, {"c": 0.1}).algorithm.method.c == 0.1
    with pytest.raises(fm.ConfigError, match="has no option 'd'"):
        with_setting(made, {"d": 0.1})


def test_words_with_options_set_them_and_are_rows_of_their_own():
    found = compared_methods_from(
        "forkmerge[interval=2],forkmerge[ interval = 3 , prune_to=1 ],EW[lr=0.003],cagrad[c=0.1]"
    )
    assert [method.word for method in found] == [
        "forkmerge[interval=2]",
        "forkmerge[interval=3,prune_to=1]",
        "ew[lr=0.003]",
        "cagrad[c=0.1]",
    ]
    assert found[1].label == "ForkMerge[interval=3,prune_to=1]"
    prepared = [method.prepare(recipe(), refit=False) for method in found]
    assert [made.algorithm.interval for made in prepared[:2]] == [2, 3]
    assert prepared[1].algorithm.prune_to == 1
    assert prepared[2].optimizer.lr == 0.003
    assert prepared[3].algorithm.method.c == 0.1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("forkmerge[intervall=2]", r"ForkMerge has no option 'intervall': unknown option .* Did you mean 'interval'"),
        ("forkmerge[interval=fast]", "interval must be a positive integer, got 'fast'"),
        ("ew[lr=-1]", r"ew\[lr=-1\]: learning rates are positive numbers"),
        ("posttrain[pretrain_steps=100]", "pretrain_steps must leave both parts"),
        ("ew[task_weights=5]", r"ew\[task_weights=5\] has an option that cannot be"),
        ("forkmerge[interval]", "write WORD"),
        ("forkmerge[interval=2", "no closing ]"),
        ("forkmerge[interval=2,interval=3]", "write WORD"),
        ("forkmerg[interval=2]", "Did you mean 'forkmerge'"),
    ],
)
def test_bad_options_are_refused_when_the_comparison_is_planned(text, message):
    with pytest.raises(fm.ForkMergeError, match=message):
        plan_comparison("compare_problem:recipe", methods=text)


@pytest.mark.parametrize(
    "word",
    [f"{run}-{how}:3" for run in ("stl", "posttrain", "joint-then-alone") for how in ("best", "average")],
)
def test_runs_that_take_the_place_of_branches_count_as_such(word):
    method = compared_method_from(word)
    assert method.count == 3
    assert branch_count(method.algorithm(recipe(), refit=False), recipe().problem) == 3
    assert branch_count(method.algorithm(recipe(), refit=True), recipe().problem) == 3


def test_the_page_of_methods_lists_every_word():
    page = (ROOT / "docs/methods.md").read_text("utf-8")
    assert "\n".join(f"| `{word}` | {about} |" for word, about in ABOUT.items()) in page


def test_averages_are_of_the_runs_that_the_word_names_with_the_recipes_policy_for_statistics():
    made = replace(recipe(), algorithm=fm.ForkMerge("mixed", interval=2, select="best", bn="recompute", bn_batches=7))
    built = {
        word: compared_method_from(f"{word}-average:3").algorithm(made, refit=True)
        for word in ("stl", "posttrain", "joint-then-alone")
    }
    policy = {"runs": 3, "bn": "recompute", "bn_batches": 7}
    options = {"interval": 2, "select": "best", "refit": True}
    assert built == {
        "stl": Averaged(fm.SingleTask(**options), **policy),
        "posttrain": Averaged(fm.PostTrain(**options), **policy),
        "joint-then-alone": Averaged(fm.JointThenAlone(**options), **policy),
    }


def test_options_of_what_is_averaged_can_be_set():
    method = compared_method_from("joint-then-alone-average:2[alone=0.3,bn=recompute]")
    algorithm = method.algorithm(recipe(), refit=False)
    assert (algorithm.algorithm.alone, algorithm.bn) == (0.3, "recompute")
    assert method.label == "JointThenAlone, average of 2[alone=0.3,bn=recompute]"


def test_one_auxiliary_alone_and_weights_by_size_are_joint_training():
    made = replace(recipe(), algorithm=fm.ForkMerge("mixed", interval=2, select="best"))
    target, first, *others = made.problem.tasks
    alone = compared_method_from(f"with:{first}")
    assert (alone.word, alone.label) == (f"with:{first}", f"with {first}")
    assert alone.algorithm(made, refit=False) == fm.Joint({target: 1.0, first: 1.0}, interval=2, select="best")
    weights = compared_method_from("Proportional").algorithm(made, refit=False).task_weights
    sizes = {task: stream.size for stream in made.problem.stream_map.values() for task in stream.tasks}
    assert weights == {task: sizes[task] / sizes[target] for task in (target, first, *others)}


def test_an_auxiliary_that_is_none_is_refused_by_name():
    with pytest.raises(fm.ConfigError, match="with:nothing: unknown auxiliary 'nothing'"):
        compared_method_from("with:nothing").algorithm(recipe(), refit=False)


def test_merged_once_is_forkmerge_whose_round_is_the_run():
    for word, branches in (("forkmerge-once", "mixed"), ("forkmerge-aux-once", "per_auxiliary")):
        (plain, inside) = (
            compared_method_from(name).algorithm(recipe(), refit=False) for name in (word, f"{word}+pcgrad")
        )
        assert plain == fm.ForkMerge(branches, interval=recipe().steps)
        assert inside == replace(plain, method=fm.methods.PCGrad())
        assert len(recipe().fit(progress=False).rounds) > 1
        once = replace(recipe(), algorithm=plain).fit(progress=False)
        assert [r.end for r in once.rounds] == [recipe().steps]


@pytest.mark.parametrize("word", ["forkmerge-uniform", "forkmerge-aux-uniform"])
def test_uniform_merges_take_every_option_of_the_branches(word):
    options = "interval=2,tail=0.5,bn=recompute,optimizer_state=average,checkpoint=best_so_far,select=best,lr=0.1"
    prepared = compared_method_from(f"{word}[{options}]").prepare(recipe(), refit=False)
    algorithm = prepared.algorithm
    assert (algorithm.search, algorithm.tail, algorithm.bn) == (fm.Fixed(), 0.5, "recompute")
    run = prepared.fit(progress=False)
    assert all(len(set(r.coefficients.values())) == 1 for r in run.rounds)


@pytest.mark.parametrize("options", [{"previous_merges": 1}, {"layer_groups": "modules"}])
def test_uniform_merges_leave_out_what_is_searched(options):
    made = replace(recipe(), algorithm=fm.ForkMerge(interval=2, tail=0.5, **{"mixtures": "mixed", **options}))
    uniform = compared_method_from("forkmerge-uniform").algorithm(made, refit=False)
    assert uniform == fm.ForkMerge(
        "mixed", interval=2, tail=0.5, search=fm.Fixed(), previous_merges=None, layer_groups=None
    )
    chosen = [replace(compared_method_from("forkmerge"), options=tuple(options.items()))]
    word = equal_compute_words(chosen, {m.word: 2 for m in chosen}, {m.word: "" for m in chosen})[0]
    assert compared_method_from(word).algorithm(recipe(), refit=False).search == fm.Fixed()


def test_at_equal_compute_uniform_and_single_merges_keep_the_options_of_branches():
    chosen = compared_methods_from("forkmerge[interval=2,tail=0.5,search_by=nll,prune_to=1],forkmerge-aux+pcgrad")
    words = equal_compute_words(chosen, {m.word: 2 for m in chosen}, {m.word: "" for m in chosen})
    assert words == [
        "forkmerge-uniform[interval=2,tail=0.5]",
        "forkmerge-once[prune_to=1,search_by=nll,tail=0.5]",
        *("stl-best:2", "posttrain-best:2", "stl-average:2", "posttrain-average:2", "joint-then-alone-average:2"),
    ]
    assert [compared_method_from(word).word for word in words] == words


def test_what_a_word_fixes_is_not_tuned():
    fixed, free = compared_methods_from("ew[lr=0.003],ew")
    assert (takes(fixed, recipe(), "lr"), takes(free, recipe(), "lr")) == (False, True)


def test_the_authors_scripts_run_every_method_their_way_and_return_the_best_model():
    words = [method.word for method in compared_methods_from("authors_scripts")]
    assert words == ["stl[select=best]", *(f"authors_scripts:{word}" for word in PAPER[1:])]
    assert compared_methods_from("originals") == compared_methods_from("paper")
    built = {m.label: m.algorithm(recipe(), refit=False) for m in compared_methods_from("authors_scripts")}
    assert {algorithm.select for algorithm in built.values()} == {"best"}
    assert built["STL[select=best]"] == fm.SingleTask(recipe().algorithm.interval, "best")
    assert built["GCS, authors' scripts"].method == fm.methods.GCS(weighted=False)
    merged = built["ForkMerge, authors' scripts"]
    assert (merged.checkpoint, merged.search) == ("best_so_far", fm.Greedy())


def test_a_flavour_stands_before_any_word_and_options_follow_it():
    (method,) = compared_methods_from("authors_scripts:forkmerge-aux+ol-aux[every=3]")
    algorithm = method.algorithm(recipe(), refit=False)
    assert algorithm.method == replace(fm.methods.OL_AUX.authors_scripts(), every=3)
    assert compared_method_from("originals:gcs") == compared_method_from("gcs")


@pytest.mark.parametrize("word", ["recipe", "stl-best:3", "torchjd:UPGrad"])
def test_what_the_scripts_do_not_have_is_refused(word):
    with pytest.raises(fm.ConfigError, match=r"is not in the authors' scripts"):
        compared_method_from(f"authors_scripts:{word}")


def test_the_authors_scripts_are_compared_with_single_task_training_that_returns_its_best_model_too():
    planned = plan_comparison("compare_problem:recipe", methods="authors_scripts")
    references = {word: own[""] for word, own in planned.references.items()}
    joint = [f"authors_scripts:{word}" for word in PAPER[1:-1]]
    assert {references[word] for word in joint} == {"stl[select=best]"}
    assert references["authors_scripts:forkmerge"] == "stl[interval=1,select=best]", "branches may stop in any step"
    assert [method.word for method in planned.methods].count("stl[select=best]") == 1
