"""Every recipe of the paper's tables: loads, plans what the paper says, and trains two steps on miniature data."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tests.datasets import test_domainnet, test_nyuv2
from typer.main import get_command
from typer.testing import CliRunner

import forkmerge as fm
from aliexpress_files import write_country
from few_label_files import write_binary, write_svhn
from forkmerge.algorithms.branches.round_sizes import branch_count, count_steps
from forkmerge.analysis.conflict import measure_similarity
from forkmerge.analysis.transfer_runs import SeededSource, TransferRun, do_transfer_run
from forkmerge.cli.commands import app
from forkmerge.datasets import aliexpress, dense, domainnet, nyuv2
from forkmerge.datasets._classify import ClassificationLosses, SmallConvNet
from forkmerge.experiments.compared_methods import PAPER, compared_method_from, with_setting
from forkmerge.experiments.comparison import plan_comparison, settings_of
from forkmerge.experiments.cost_of_run import estimate_run
from forkmerge.experiments.recipe import load_recipe, seeded_recipe
from forkmerge.experiments.run_results import read_run_result
from forkmerge.models import ESMM, MTAN, DenseModel, MMoE, ResNet, ViT
from paths import ROOT

FILES = {path.stem: path for path in sorted((ROOT / "recipes" / "paper").glob("*.toml"))}
ADAM, SGD = "Adam(lr=0.0001, weight_decay=1e-05)", "SGD(lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.0005)"
AUXILIARY = ("ew", "gcs", "ol_aux", "arml", "autolambda")
S4L = ("stl", "ew", "gradnorm", "gcs", "ol_aux", "arml", "autolambda", "posttrain", "grid", "forkmerge-aux")
RATES, INTERVALS = {"lr": [0.003, 0.01, 0.03]}, {"interval": [10_000, 50_000, 100_000]}
SCRIPTS = ("ew", "uw", "dwa", "rlw", "mgda", "gradnorm", "pcgrad", "imtl", "gradvac", "cagrad", "nashmtl",
           "gcs", "ol_aux", "arml", "autolambda", "posttrain", "forkmerge")  # fmt: skip
SELECTED = ("stl[select=best]", "stl[interval=158,select=best]")
COSINE = "CosineAnnealingLR(T_max=20) every 5% steps"


@dataclass(frozen=True)
class Facts:
    """What the paper says of a table."""

    steps: int
    interval: int
    branches: int
    batch_size: int
    optimizer: str
    targets: int
    methods: tuple[str, ...] | None
    tune: dict[str, Any] | None = None
    scheduler: str = "None"


def nyu(branches: int, *methods: str, targets: int = 3, **changed: Any) -> Facts:
    return Facts(**{"steps": 15_800, "interval": 790, "branches": branches, "batch_size": 8, "optimizer": ADAM,
                    "targets": targets, "methods": methods, "scheduler": HALVED, **changed})  # fmt: skip


def ssl(branches: int, interval: int, *methods: str) -> Facts:
    decay = "MultiStepLR(milestones=['80%'], gamma=0.2)"
    return Facts(200_000, interval, branches, 128, "Adam(lr=0.005)", 1, methods, scheduler=decay)


def baselines() -> Facts:
    words = [f"ew[task_weights={{class=1,{task}=1}}]" for task in ("pi", "mean_teacher", "vat", "pseudo_label")]
    return ssl(1, 40_000, "stl", *words)


def scripts(*words: str) -> tuple[str, ...]:
    """Words in the flavour of the authors' scripts."""
    return tuple(f"authors_scripts:{word}" for word in words)


HALVED = "StepLR(step_size='50%', gamma=0.5)"
DOMAINS = partial(Facts, 50_000, 12_500, batch_size=48, targets=6, scheduler=COSINE)
SHARED = f"{SGD} × {{'encoder.': 0.1}}"
SHOP = partial(Facts, 694_300, 69_430, 8, 2048, "Adam(lr=0.001, weight_decay=1e-06)", 8, tune=INTERVALS)
PRUNED = tuple(f"forkmerge-aux[prune_to={count}]" for count in (3, 4))
FACTS = {
    "nyuv2": nyu(2, "stl", *SELECTED, *scripts(*SCRIPTS), "forkmerge"),
    "nyuv2_branches": nyu(3, "stl", "ew", "forkmerge", "forkmerge-aux"),
    "nyuv2_intervals": nyu(2, "stl", *(f"forkmerge[interval={79 * epochs}]" for epochs in (1, 2, 5, 10, 20, 50))),
    "nyuv2_batch_32": nyu(1, "stl", "ew", steps=3800, interval=760, batch_size=32),
    "nyuv2_mtan": nyu(3, "stl", *SELECTED, *scripts(*AUXILIARY, "forkmerge-aux"), "forkmerge-aux"),
    "domainnet": DOMAINS(2, optimizer=SHARED, methods=PAPER, tune=RATES),
    "domainnet_branches": DOMAINS(
        6,
        optimizer=SHARED,
        methods=("stl", "forkmerge", *PRUNED, "forkmerge-aux"),
        tune=RATES,
    ),
    "domainnet_vit": DOMAINS(
        2,
        optimizer="AdamW(lr=0.001, weight_decay=0.05) × {'encoder.': 0.1}",
        methods=("stl", "ew", "autolambda", "posttrain", "forkmerge"),
    ),
    "domainnet_analysis": Facts(
        25_000, 6_250, 2, 48, SHARED, 1, None, scheduler="CosineAnnealingLR(T_max=10) every 10% steps"
    ),
    "aliexpress": SHOP(methods=(*PAPER[:-1], "forkmerge-aux")),
    "aliexpress_mmoe": SHOP(methods=("stl", *AUXILIARY, "forkmerge-aux")),
    "cifar10": ssl(3, 10_000, *S4L),
    "svhn": ssl(3, 10_000, *S4L),
    "cifar10_baselines": baselines(),
    "svhn_baselines": baselines(),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All data sets in miniature, and weights under the names of the published ones."""
    folder = tmp_path_factory.mktemp("data")
    test_nyuv2.write(folder / "nyuv2", training=12)
    test_domainnet.write(folder, "image_list")
    for seed, country in enumerate(aliexpress.COUNTS):
        write_country(folder, country, seed)
    write_binary(folder / "cifar-10-batches-bin")
    (folder / "svhn").mkdir()
    write_svhn(folder / "svhn")
    torch.save(ThinResNet(50).state_dict(), folder / "resnet50-0676ba61.pth")
    torch.save(small_encoder(18).state_dict(), folder / "resnet18-f37072fd.pth")
    torch.save(small_encoder(101).state_dict(), folder / "resnet101-63fe2227.pth")
    safetensors.torch.save_file(small_vit().state_dict(), folder / "vit_base_patch16_224_in21k.safetensors")
    return folder


class ThinResNet(ResNet):
    """Two blocks per stage, with a sixteenth of the channels."""

    def _layer(self, block: Any, width: int, blocks: int, stride: int, used: int) -> Any:
        return super()._layer(block, width // 16, 2, stride, used)


def small_encoder(depth: int) -> SmallConvNet:
    return SmallConvNet({18: 2, 101: 4}[depth])


def small_vit() -> ViT:
    return ViT(patch=112, width=8, depth=1, heads=2)


@pytest.fixture(autouse=True)
def small_networks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The recipes' networks, with fewer channels."""
    for kind in (DenseModel, MTAN):
        monkeypatch.setattr(nyuv2, kind.__name__, partial(kind, rates=(1,), width=4))
    monkeypatch.setattr(nyuv2, "ResNet", ThinResNet)
    monkeypatch.setattr(domainnet, "ResNet", small_encoder)
    monkeypatch.setattr(domainnet, "ViT", small_vit)
    monkeypatch.setattr(aliexpress, "ESMM", partial(ESMM, width=2, hidden=(4,)))
    monkeypatch.setattr(aliexpress, "MMoE", partial(MMoE, width=2, bottom=(4,), hidden=(4,)))


def changes(name: str, data: Path, *, light: bool = False) -> dict[str, Any]:
    """What is set otherwise than in the recipe: miniature data and, where steps would be slow, small batches."""
    arguments: dict[str, Any] = {"root": str(data), "check_counts": False}
    if not name.startswith("nyuv2"):
        arguments["cache"] = str(data / "cache")
    if light and name.startswith("domainnet"):
        arguments["batch_size"] = 2
    if name.startswith(("cifar10", "svhn")):
        arguments |= {"labels": 10, "validation": 20}
        if light:
            arguments |= {"network": "small", "batch_size": 2}
    return {"arguments": arguments}


def test_every_recipe_has_its_facts() -> None:
    assert list(FILES) == sorted(FACTS)


@pytest.mark.parametrize("name", FACTS)
class TestRecipe:
    def test_it_states_what_the_paper_states(self, name: str, data: Path) -> None:
        recipe, facts = load_recipe(FILES[name], changes(name, data)), FACTS[name]
        assert recipe.steps == facts.steps
        assert recipe.algorithm.settings(recipe.problem).interval_of(recipe.steps) == facts.interval
        target = recipe.problem.target
        sizes = {stream.batch_size for stream in recipe.problem.stream_map.values() if target in stream.tasks}
        assert sizes == {facts.batch_size}
        assert repr(recipe.optimizer) == facts.optimizer
        if isinstance(recipe.algorithm, fm.ForkMerge):
            own = {name: getattr(recipe.algorithm, name) for name in ("mixtures", "interval", "prune_to")}
            assert recipe.algorithm == fm.ForkMerge.paper(**own)
        assert repr(recipe.options.get("scheduler")) == facts.scheduler

    def test_a_dry_run_trains_two_steps(self, name: str, data: Path) -> None:
        facts = FACTS[name]
        plan = estimate_run(load_recipe(FILES[name], changes(name, data, light=True)))
        assert (plan.steps, plan.interval, len(plan.branches)) == (facts.steps, facts.interval, facts.branches)
        assert all(branch.seconds_per_step > 0 for branch in plan.branches)
        if name.startswith("aliexpress"):
            assert plan.branch_steps["total"] == facts.interval * (8 + 9 * 3)

    def test_it_compares_what_the_table_compares(self, name: str, data: Path) -> None:
        if FACTS[name].methods is None:
            assert "[compare]" not in FILES[name].read_text("utf-8")
            return
        comparison, facts = plan_comparison(FILES[name], settings=changes(name, data)), FACTS[name]
        assert tuple(method.word for method in comparison.methods) == facts.methods
        assert len(comparison.targets) == facts.targets
        assert comparison.tune == (facts.tune or {})

    def test_its_first_lines_say_what_it_reruns_and_how(self, name: str) -> None:
        text = FILES[name].read_text("utf-8")
        assert text.startswith(("# Table", "# Figure", "# Section"))
        word = "diagnose" if FACTS[name].methods is None else "compare"
        assert f"#     FORKMERGE_DATA=/data forkmerge {word} recipes/paper/{name}.toml" in text
        assert max(map(len, text.splitlines())) <= 120

    def test_it_says_whose_version_of_every_baseline_runs(self, name: str) -> None:
        if FACTS[name].methods is None:
            return
        text = " ".join(line.removeprefix("# ") for line in FILES[name].read_text("utf-8").splitlines())
        has_scripts = any(word.startswith("authors_scripts:") for word in FACTS[name].methods or ())
        if has_scripts:
            assert "Baselines: authors_scripts" in text
            assert not set(FACTS[name].methods or ()) & {*PAPER[2:-1], "rlw", "gradvac"}
        else:
            assert re.search(r"Baselines: originals|originals as in", text)

    def test_missing_data_is_one_sentence_that_says_where_to_get_it(
        self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FORKMERGE_DATA", str(tmp_path))
        result = CliRunner().invoke(app, ["run", str(FILES[name]), "--dry-run"])
        said = " ".join(result.stderr.split())
        assert result.exit_code == 2
        assert said.startswith("error: ")
        assert "not found. Get it from" in said
        assert "FORKMERGE_DATA" in said


@pytest.mark.parametrize("name", [name for name in FACTS if name.startswith("nyuv2")])
def test_images_of_nyuv2_are_left_as_they_are_and_divided_as_a_file_says(name: str, data: Path) -> None:
    """The authors' scripts do not augment, and read which images train and validate from a file."""
    (data / "data_split.json").write_text(json.dumps({"train": [0, 4, 5, 7], "val": [1, 2]}), "utf-8")
    settings = changes(name, data)
    settings["arguments"]["split"] = "data_split.json"
    problem = load_recipe(FILES[name], settings).problem
    (stream,) = problem.stream_map.values()
    assert stream.losses == dense.SceneLosses(augmented=False)
    validation = problem.validation["segmentation"].dataset
    assert (stream.dataset.indices, validation.indices) == ([0, 4, 5, 7], [1, 2])


def test_missing_weights_are_named(data: Path, tmp_path: Path) -> None:
    settings = changes("nyuv2", data)
    settings["arguments"]["weights"] = "elsewhere.pth"
    with pytest.raises(fm.ProblemError, match=r"no file 'elsewhere.pth', here or in .*docs/paper.md"):
        load_recipe(FILES["nyuv2"], settings)


def test_branches_of_a_sweep_are_those_of_the_table(data: Path) -> None:
    """Table 4: 2 branches, and 6 that are pruned to 3 or 4, or not at all."""
    comparison = plan_comparison(FILES["domainnet_branches"], settings=changes("domainnet", data))
    recipe, branches = comparison.recipe, {}
    for method in comparison.methods:
        algorithm = method.algorithm(recipe, refit=False)
        pruned = getattr(algorithm, "prune_to", None)
        assert pruned is None or algorithm.prune_keeps == "largest", "pruned as the paper says"
        branches[method.word] = (branch_count(algorithm, recipe.problem), pruned)
    assert list(branches.values()) == [(1, None), (2, None), (6, 3), (6, 4), (6, None)]


def command(name: str, data: Path, **arguments: Any) -> list[str]:
    all_arguments = changes(name, data, light=True)["arguments"] | arguments
    options = [f"--set=arguments.{key}={json.dumps(value)}" for key, value in all_arguments.items()]
    return ["compare", str(FILES[name]), *options, "--workers=1", "--json"]


@pytest.mark.parametrize(
    ("name", "runs", "steps"),
    [
        ("nyuv2", 21 * 3 * 3, 3 * 3 * 15_800 * (3 + 16 + 2 + 2)),
        ("nyuv2_batch_32", 2 * 3 * 3, 2 * 3 * 3 * 3_800),
        ("domainnet_branches", 5 * 6 * (3 + 3), 6 * (3 + 3) * 12_500 * (4 + 8 + (6 + 3 * 3) + (6 + 3 * 4) + 24)),
        ("domainnet", 16 * 6 * (3 + 3), 6 * (3 + 3) * 50_000 * (15 + 2)),
        ("aliexpress_mmoe", 6 * 8 * 3 + 8 * (3 + 3), None),
        ("svhn_baselines", 5 * 3, 5 * 3 * 200_000),
    ],
)
def test_a_dry_run_of_a_table_trains_two_steps_of_every_method(
    name: str, runs: int, steps: int | None, data: Path
) -> None:
    result = CliRunner().invoke(app, [*command(name, data), "--dry-run"])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert [method["method"] for method in answer["methods"]] == list(FACTS[name].methods)
    assert answer["runs"] == runs
    assert steps is None or answer["steps"] == steps


@pytest.mark.parametrize("name", ["nyuv2", "domainnet"])
def test_forkmerge_with_the_branches_of_the_scripts_is_what_a_recipe_says(name: str, data: Path) -> None:
    """Nested branches, ranked beforehand: the command of the recipe's comment, as a shell reads it."""
    text = "\n".join(line.removeprefix("#").removesuffix("\\") for line in FILES[name].read_text("utf-8").splitlines())
    (typed,) = re.findall(
        rf"forkmerge compare recipes/paper/{name}.toml ([^']*'authors_scripts:forkmerge\[[^']*')", text
    )
    words = [word for word in shlex.split(typed) if word not in ("--out", "FOLDER")]
    result = CliRunner().invoke(app, [*command(name, data), *words, "--dry-run"])
    assert result.exit_code == 0, result.output
    targets, seeds, tuned = (1, 3, 0) if name == "nyuv2" else (6, 3, 3)
    branches = 2 * 790 + 3 * 15_800 if name == "nyuv2" else 5 * 2_500 + 3 * 50_000
    assert json.loads(result.stdout)["methods"][-1]["steps"] == targets * (seeds + tuned) * branches


def test_the_scripts_forkmerge_of_table_2_has_its_two_branches(data: Path) -> None:
    word = "authors_scripts:forkmerge[select=last]"
    assert word in FILES["domainnet"].read_text("utf-8")
    recipe = load_recipe(FILES["domainnet"], changes("domainnet", data))
    expected = fm.ForkMerge.authors_scripts(mixtures="mixed", interval=12_500, select="last")
    assert compared_method_from(word).algorithm(recipe, refit=False) == expected


def test_methods_of_domainnet_read_48_images_in_a_step(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one domain, or 8 of each where a method combines tasks."""
    sizes: list[int] = []

    def losses(self: Any, model: Any, batch: Any, tasks: Any, context: Any) -> Any:
        sizes.append(len(batch[1]))
        return {task: next(model.parameters()).sum() for task in tasks}

    monkeypatch.setattr(ClassificationLosses, "__call__", losses)
    recipe = load_recipe(FILES["domainnet"], changes("domainnet", data))
    for method, expected in ((None, [48]), ("PCGrad", [8] * 6)):
        sizes.clear()
        replace(recipe, algorithm=fm.Joint(method=method), steps=1).fit(seed=8)  # whose one step draws the target
        assert sizes[len(domainnet.DOMAINS) :] == expected  # every stream is tried once beforehand


def test_a_table_is_one_command(data: Path, tmp_path: Path) -> None:
    """The four baselines of Table 6 beside single-task training, for two steps."""
    out = tmp_path / "out"
    result = CliRunner().invoke(app, [*command("cifar10_baselines", data, steps=2), "--seeds=1", f"--out={out}"])
    assert result.exit_code == 0, result.output
    records = [read_run_result(out, str(path.relative_to(out))) for path in out.glob("*/*.json")]
    assert sorted(r.method for r in records if r) == sorted(FACTS["cifar10_baselines"].methods)
    assert all(r and r.is_complete and r.split == "test" for r in records)


@pytest.mark.parametrize("name", ["aliexpress", "aliexpress_mmoe", "domainnet_branches"])
def test_what_is_pruned_is_pruned_as_the_paper_says(name: str, data: Path) -> None:
    comparison = plan_comparison(FILES[name], settings=changes(name, data))
    pruned = [method.algorithm(comparison.recipe, refit=False) for method in comparison.methods]
    kept = {each.prune_keeps for each in pruned if getattr(each, "prune_to", None) is not None}
    assert kept == {"largest"}


def quick(name: str, data: Path, *words: object) -> None:
    """Compare on miniature data, for two steps."""
    options = command(name, data, steps=2)
    options = [option for option in options[2:] if option != "--json"]
    result = CliRunner().invoke(app, ["compare", str(FILES[name]), *options, *map(str, words)])
    assert result.exit_code == 0, result.output


def figure(folder: Path, name: str) -> Any:
    pytest.importorskip("plotly")
    from forkmerge.report import page_from

    return page_from(folder).figures[name]


def test_figure_12_is_a_grid_on_one_target_in_the_folder_of_table_1(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    quick("nyuv2", data, "--methods=stl", "--targets=segmentation,depth", "--seeds=1", f"--out={out}")
    quick("nyuv2", data, "--methods=grid[values=[1]]", "--targets=segmentation", "--seeds=1", f"--out={out}")
    (panel,) = figure(out, "pareto").panels
    assert (panel.x.title, panel.y.title) == ("segmentation: mIoU", "depth: 1 / absolute_error")
    assert [(series.name, len(series.x)) for series in panel.series] == [("grid", 1), ("STL", 1)]


def test_table_6_averages_relative_changes_of_the_test_error_over_both_sets(data: Path, tmp_path: Path) -> None:
    for name in ("cifar10", "svhn"):
        quick(name, data, "--methods=ew", "--seeds=1", f"--out={tmp_path / name}")
    shown = json.loads(
        CliRunner()
        .invoke(app, ["compare", str(tmp_path / "cifar10"), "--with", str(tmp_path / "svhn"), "--json"])
        .stdout
    )
    errors = {
        (name, method): shown["targets"][name][index]["metrics"]["error"]["mean"]
        for name in ("cifar10", "svhn")
        for index, method in enumerate(("stl", "ew"))
    }
    change = [1 - errors[name, "ew"] / errors[name, "stl"] for name in ("cifar10", "svhn")]
    assert shown["overall"][1]["change"]["mean"] == pytest.approx(sum(change) / 2)


def test_figures_2_and_3_have_all_other_domains_as_one_auxiliary(data: Path) -> None:
    """Whatever the target: it is trained with them at a λ, and their gradients compare."""
    recipe = load_recipe(FILES["domainnet_analysis"], changes("domainnet", data, light=True))
    for target in ("painting", "quickdraw"):
        recipes = SeededSource(recipe.source, target)
        problem = recipes(0).problem
        assert problem.tasks == (target, "others")
        done = do_transfer_run(TransferRun(recipes, 0, "others", 0.25, steps=2))
        assert set(done.discrepancy) == {"validation"}
    cosines = measure_similarity(recipe.model(), problem.sealed(), "quickdraw", ["others"], count=2)
    assert all(-1 <= cosine <= 1 for cosine in cosines["others"].cosines)


class TestPage:
    """docs/paper.md: every table and figure of the paper, and how it is made."""

    PAGE = (ROOT / "docs" / "paper.md").read_text("utf-8")
    COMMANDS = re.findall(r"`(forkmerge [^`]+)`", PAGE)

    def test_it_has_every_table_figure_and_recipe(self) -> None:
        for kind, last in (("Table", 14), ("Figure", 12)):
            rows = re.findall(rf"^\| {kind} (\d+)", self.PAGE, re.M)
            assert [int(number) for number in rows] == list(range(1, last + 1))
        named = set(re.findall(r"recipes/paper/(\w+)\.toml", self.PAGE))
        assert named == set(FILES)

    @pytest.mark.parametrize("text", dict.fromkeys(COMMANDS))
    def test_every_command_can_be_typed(self, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """It parses; without the data it ends with one sentence that says where to get them."""
        monkeypatch.chdir(ROOT)
        monkeypatch.setenv("FORKMERGE_DATA", str(tmp_path))
        _, name, *words = shlex.split(text)
        get_command(app).commands[name].make_context(name, list(words))  # type: ignore[attr-defined]
        if words[0].endswith(".toml"):
            dry = ["--dry-run"] if name == "compare" else []
            result = CliRunner().invoke(app, [name, *words, *dry])
            assert result.exit_code == 2
            assert "not found. Get it from" in " ".join(result.stderr.split())

    @pytest.mark.parametrize("name", [name for name, facts in FACTS.items() if facts.methods is not None])
    def test_it_says_how_many_steps_a_recipe_trains(self, name: str, data: Path) -> None:
        (shown,) = set(re.findall(rf"^\|.*recipes/paper/{name}\.toml`.*\| ([\d.]+) M \|", self.PAGE, re.M))
        assert float(shown) == pytest.approx(total_steps(name, data) / 1e6, rel=0.01)

    @pytest.mark.parametrize(("number", "method", "times"), [(5, None, 15), (12, "grid", 1)])
    def test_it_says_how_many_steps_a_figure_trains(
        self, number: int, method: str | None, times: int, data: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """All methods of 15 pairs; the grid alone, whose single-task training is that of Table 1."""
        monkeypatch.chdir(ROOT)
        (row,) = re.findall(rf"^\| Figure {number},.*", self.PAGE, re.M)
        _, _, *words = shlex.split(re.findall(r"`(forkmerge compare [^`]+)`", row)[0])
        (name,) = re.findall(r"recipes/paper/(\w+)\.toml", words[0])
        options = [word for word in command(name, data)[2:] if not word.startswith("--set=arguments.domains")]
        result = CliRunner().invoke(app, ["compare", *words, *options, "--dry-run"])
        assert result.exit_code == 0, result.output
        rows = json.loads(result.stdout)["methods"]
        steps = times * sum(row["steps"] for row in rows if method in (None, row["method"]))
        assert float(re.findall(r"\| ([\d.]+) M \|", row)[0]) == pytest.approx(steps / 1e6, rel=0.01)


def total_steps(name: str, data: Path) -> int:
    """Steps of all runs of a comparison over all branches, those of tuning included."""
    comparison = plan_comparison(FILES[name], settings=changes(name, data))
    total = 0
    for target in comparison.targets:
        recipe = seeded_recipe(comparison.recipe.source, 0, target)
        for method in comparison.methods:
            settings = settings_of(comparison, method)
            made = [with_setting(method.prepare(recipe, refit=False), setting) for setting in settings]
            counts = [count_steps(each.algorithm, each.problem, each.steps) for each in made]
            total += len(comparison.seeds) * counts[0] + (comparison.tune_seeds * sum(counts) if len(counts) > 1 else 0)
    return total
