"""From a word to an algorithm: every method of the paper, in any spelling, with the recipe's own options."""

from __future__ import annotations

from dataclasses import replace

import pytest

import forkmerge as fm
from compare_problem import recipe
from forkmerge.contenders import contender_from, contenders_from, with_setting


def test_the_recipes_own_options_are_what_methods_have_in_common():
    made = replace(recipe(), algorithm=fm.ForkMerge(interval=2, select="best", bn="recompute", search="binary"))
    built = {word: contender_from(word).algorithm(made, refit=False) for word in ("stl", "ew", "forkmerge-aux")}
    assert built["stl"] == fm.SingleTask(2, "best")
    assert built["ew"] == fm.Joint(interval=2, select="best")
    # Three branches are too many for a binary search.
    assert built["forkmerge-aux"] == fm.ForkMerge("per_auxiliary", interval=2, select="best", bn="recompute")


def test_words_name_methods_whatever_their_case():
    found = contenders_from(
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
    assert len(contenders_from("paper")) == 16
    words = [method.word for method in contenders_from("all,paper,stl")]
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
        contenders_from(text)
    assert message in str(error.value)


def test_options_of_methods_inside_can_be_set():
    made = replace(recipe(), algorithm=contender_from("forkmerge+cagrad").algorithm(recipe(), refit=False))
    assert with_setting(made, {"c": 0.1}).algorithm.method.c == 0.1
    with pytest.raises(fm.ConfigError, match="has no option 'd'"):
        with_setting(made, {"d": 0.1})
