"""The words of whole runs that a comparison knows, how tables call them, and what is said about them."""

from __future__ import annotations

BASELINE, IN_TURN, WIN_STAY, WIN_STAY_ALL = "stl", "forkmerge-in-turn", "forkmerge-win-stay", "forkmerge-win-stay-all"

RUNS = {
    "stl": ("STL", "single-task training, which everything is compared with"),
    "ew": ("EW", "all tasks, equal weights"),
    "proportional": ("proportional", "all tasks, each weighed by how many examples it has"),
    "posttrain": ("PostTrain", "all tasks first, then the target alone"),
    "joint-then-alone": ("JointThenAlone", "all tasks in the first half, the target alone in the second, one schedule"),
    "grid": ("WeightGrid", "the best of a grid over fixed task weights"),
    "forkmerge": ("ForkMerge", "two branches: the target alone, and with all auxiliaries"),
    "forkmerge-aux": ("ForkMerge-aux", "one branch per auxiliary, and the target alone"),
    "forkmerge-win-stay-all": (
        "ForkMerge, win-stay of all",
        "the default: two branches, first the target alone and that of all auxiliaries; whoever wins stays, and where "
        "BatchNorm sees auxiliaries' own inputs the target alone in any case",
    ),
    "forkmerge-win-stay": (
        "ForkMerge, win-stay",
        "the target alone and one other branch, first that of all auxiliaries, which stays while it wins",
    ),
    "forkmerge-in-turn": (
        "ForkMerge, in turn",
        "the target alone, and in every round one auxiliary's branch, with searches that know their noise",
    ),
    "forkmerge-in-turn-uniform": (
        "ForkMerge, in turn, uniform",
        "the branches of forkmerge-in-turn, merged with equal coefficients",
    ),
    "forkmerge-uniform": ("ForkMerge, uniform", "the branches of forkmerge, merged with equal coefficients"),
    "forkmerge-aux-uniform": (
        "ForkMerge-aux, uniform",
        "the branches of forkmerge-aux, merged with equal coefficients",
    ),
    "forkmerge-once": ("ForkMerge, once", "the branches of forkmerge, merged once, at the end"),
    "forkmerge-aux-once": ("ForkMerge-aux, once", "the branches of forkmerge-aux, merged once, at the end"),
    "recipe": ("recipe", "the recipe's own algorithm"),
}
REPEATED = {"stl": "single-task training", "posttrain": "Post-train", "joint-then-alone": "joint-then-alone"}
ABOUT = {
    **{word: about for word, (_, about) in RUNS.items()},
    "with:TASK": "the target and that auxiliary, equal weights",
    **{f"{word}-best:N": f"{name} N times, the best on validation" for word, name in REPEATED.items()},
    **{f"{word}-average:N": f"{name} N times, the weights averaged" for word, name in REPEATED.items()},
}
