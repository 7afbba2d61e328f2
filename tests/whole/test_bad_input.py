"""What cannot work is refused with one clear message, before a single training step and without leaving a folder."""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import forkmerge as fm
from problems import (
    SGD,
    TASKS,
    conv_net,
    counting_steps,
    domains_problem,
    evaluation,
    examples,
    fit,
    minus_loss,
    noisy_net,
    plain_net,
    same_bits,
    seeded,
    shared_losses,
    shared_problem,
)

DATA = TensorDataset(*examples(16, 1))
Refuse = Callable[..., None]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Refuse]:
    """Expect `fit` to raise with a message; afterwards, assert that nothing was trained and no folder was made."""

    def refuse(message: str, *arguments: Any, error: type[Exception] = fm.ProblemError, **options: Any) -> None:
        with pytest.raises(error, match=message) as caught:
            fit(*arguments, **{"folder": tmp_path / "run", **options})
        assert "\n" not in str(caught.value)

    with counting_steps(monkeypatch) as trained:
        yield refuse
    assert trained == []
    assert not (tmp_path / "run").exists()


def problem_with(losses: Any = shared_losses, dataset: Any = DATA, **options: Any) -> fm.Problem:
    settings = {"tasks": TASKS, "batch_size": 8, **options}
    return fm.Problem("tgt", {"all": fm.Stream(dataset, losses, **settings)}, evaluation())


class TestProblems:
    def test_an_unknown_target_offers_the_closest(self) -> None:
        with pytest.raises(fm.ProblemError, match=r"unknown task 'tgd'\. Did you mean 'tgt'\? Known: tgt, aux, odd\."):
            fm.Problem("tgd", problem_with().streams, evaluation())
        with pytest.raises(fm.ProblemError, match=r"target: unknown task 'odds'\. Did you mean 'odd'"):
            problem_with().with_target("odds")

    def test_no_validation_data_says_what_to_pass(self) -> None:
        streams = problem_with().streams
        for validation in (None, {}, {"aux": evaluation()}):
            with pytest.raises(fm.ProblemError, match=r"'tgt' has no validation data: pass validation=\{'tgt': Eval"):
                fm.Problem("tgt", streams, validation)
        with pytest.raises(fm.ProblemError, match="the target 'odd' has no validation data"):
            problem_with().with_target("odd")

    def test_empty_data_sets_are_named(self) -> None:
        nothing = TensorDataset(torch.zeros(0, 6), torch.zeros(0, 3))
        with pytest.raises(fm.ProblemError, match="the data set of stream 'all' is empty"):
            problem_with(dataset=nothing)
        with pytest.raises(fm.ProblemError, match="the validation data of the target 'tgt' is empty"):
            fm.Problem("tgt", problem_with().streams, fm.Evaluation(nothing, fm.accuracy))

    @pytest.mark.parametrize("name", ["../tgt", "a/b", "..", ".", "a\\b", "C:x", "a\0b", "", " tgt", "tab\t", None])
    def test_a_task_name_that_would_leave_its_folder_is_refused(self, name: Any) -> None:
        stream = fm.Stream(DATA, shared_losses, [name], 8)
        with pytest.raises(fm.ProblemError, match="task name"):
            fm.Problem("tgt", {"s": stream, "t": problem_with().stream_map["all"]}, evaluation())

    def test_a_very_long_task_name_is_refused(self) -> None:
        with pytest.raises(fm.ProblemError, match=r"task name 'é+'… is longer than 100 bytes"):
            fm.Problem("tgt", [fm.Stream(DATA, shared_losses, ["tgt", "é" * 60], 8)], evaluation())

    def test_an_iterable_data_set_gets_a_clear_answer(self) -> None:
        class Endless(IterableDataset[Any]):
            def __iter__(self) -> Any:
                return iter(range(9))

        with pytest.raises(fm.ProblemError, match=r"stream of tgt has an iterable data set.*Pass a map-style data set"):
            fm.Stream(Endless(), shared_losses, "tgt", 8)

    def test_a_data_set_without_a_length_is_refused(self) -> None:
        class Unmeasured(Dataset[Any]):
            def __getitem__(self, index: int) -> int:
                return index

        with pytest.raises(fm.ProblemError, match="a data set of type Unmeasured has no length: add __len__"):
            problem_with(dataset=Unmeasured())

    @pytest.mark.parametrize("size", [0, -1, 2.5, "8", True])
    def test_a_batch_size_must_be_a_positive_integer(self, size: Any) -> None:
        with pytest.raises(fm.ProblemError, match="batch size of the stream of tgt must be a positive integer, got"):
            fm.Stream(DATA, shared_losses, "tgt", size)

    @pytest.mark.parametrize("size", [0, -1, 2.5, None, True])
    def test_so_must_that_of_an_evaluation(self, size: Any) -> None:
        with pytest.raises(fm.ProblemError, match="the batch size of an evaluation must be a positive integer, got"):
            fm.Evaluation(DATA, fm.accuracy, batch_size=size)

    def test_a_stream_must_serve_a_task(self) -> None:
        with pytest.raises(fm.ProblemError, match="a stream must serve at least one task"):
            fm.Stream(DATA, shared_losses, [], 8)

    def test_two_streams_for_the_same_tasks_need_names(self) -> None:
        stream = fm.Stream(DATA, shared_losses, "tgt", 8)
        with pytest.raises(fm.ProblemError, match=r"serve the same tasks: pass streams as \{name: stream\}"):
            fm.Problem("tgt", [stream, stream], evaluation())

    def test_weights_have_two_meanings_only(self) -> None:
        with pytest.raises(fm.ProblemError, match="weights must be 'loss' or 'sampling', got 'losses'"):
            shared_problem(weights="losses")


class TestBranches:
    @pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf, "1", None])
    def test_negative_or_non_finite_weights(self, refused: Refuse, weight: Any) -> None:
        branches = {"alone": {"tgt": 1.0}, "bad": {"tgt": 1.0, "odd": weight}}
        refused("branch 'bad': the weight of task 'odd' must be a finite number ≥ 0, got", fm.ForkMerge(branches))

    def test_joint_weights_too(self, refused: Refuse) -> None:
        refused("the weight of task 'tgt' must be a finite number ≥ 0, got -1", fm.Joint({"tgt": -1.0}))
        refused("branch 'joint' gives every task weight 0", fm.Joint({"tgt": 0.0}))
        refused("unknown task 'od'. Did you mean 'odd'", fm.Joint({"od": 1.0}))

    def test_a_branch_of_an_unknown_task(self, refused: Refuse) -> None:
        refused(r"branch 'b': unknown task 'auxx'\. Did you mean 'aux'", fm.ForkMerge({"b": {"auxx": 1.0}}))

    def test_no_branch_at_all(self, refused: Refuse) -> None:
        refused("there is no branch to train", fm.ForkMerge({}))

    def test_branches_with_different_parameters(self) -> None:
        one, other = seeded(plain_net).state_dict(), seeded(conv_net).state_dict()
        with pytest.raises(fm.ProblemError, match=r"branches 'a' and 'b' have different parameters: 'body\.0\.weight'"):
            fm.merge_states({"a": one, "b": other}, {"a": 0.5, "b": 0.5})
        with pytest.raises(fm.ProblemError, match=r"are for \['a', 'c'\], but the states are \['a', 'b'\]"):
            fm.merge_states({"a": one, "b": one}, {"a": 0.5, "c": 0.5})

    def test_a_search_that_does_not_fit_the_number_of_branches(self, refused: Refuse) -> None:
        refused("binary search merges two branches, got 3", fm.ForkMerge("per_auxiliary", search="binary"))
        refused("expected 3 coefficients", fm.ForkMerge("per_auxiliary", search=fm.Fixed((0.5, 0.5))))

    def test_fixed_coefficients_that_pruning_would_not_leave_alone(self, refused: Refuse) -> None:
        algorithm = fm.ForkMerge("per_auxiliary", search=fm.Fixed((0.5, 0.25, 0.25)), prune_to=2)
        refused("prune_to=2 may leave fewer branches than the search can merge: expected 2 coefficients", algorithm)


class TestLosses:
    def test_a_loss_that_does_not_depend_on_the_model(self, refused: Refuse) -> None:
        def detached(*arguments: Any) -> Any:
            return {task: loss.detach() for task, loss in shared_losses(*arguments).items()}

        refused(r"loss of task 'tgt' does not depend on the model.*Look for \.detach\(\)", None, problem_with(detached))

    def test_also_if_only_one_branch_of_many_asks_for_it(self, refused: Refuse) -> None:
        def partly(*arguments: Any) -> Any:
            return {t: loss.detach() if t == "odd" else loss for t, loss in shared_losses(*arguments).items()}

        refused(
            "the loss of task 'odd' does not depend on the model", fm.ForkMerge("per_auxiliary"), problem_with(partly)
        )

    def test_a_loss_that_is_not_finite_before_training(self, refused: Refuse) -> None:
        def nan(*arguments: Any) -> Any:
            return {task: loss * torch.nan for task, loss in shared_losses(*arguments).items()}

        refused("the loss of task 'tgt' is nan on the first batch, before any training", None, problem_with(nan))

    def test_a_loss_per_example(self, refused: Refuse) -> None:
        def per_example(*arguments: Any) -> Any:
            return {task: loss.expand(8) for task, loss in shared_losses(*arguments).items()}

        refused(r"must be a scalar, got \(8,\): take its mean", None, problem_with(per_example))

    def test_a_loss_that_is_a_plain_number(self, refused: Refuse) -> None:
        refused(
            "must be a scalar tensor, got float", None, problem_with(lambda m, b, tasks, c: dict.fromkeys(tasks, 1.0))
        )

    def test_losses_that_are_no_mapping(self, refused: Refuse) -> None:
        def total(*arguments: Any) -> Any:
            return sum(shared_losses(*arguments).values())

        refused(r"losses of stream 'all' must return \{task: loss\}, got Tensor", None, problem_with(total))

    def test_a_loss_nobody_asked_for(self, refused: Refuse) -> None:
        def everything(model: Any, batch: Any, tasks: Any, context: Any) -> Any:
            return shared_losses(model, batch, TASKS, context)

        refused(
            "losses of stream 'all' were not asked for this: unknown task 'aux'",
            fm.SingleTask(),
            problem_with(everything),
        )

    def test_batch_size_one_with_batchnorm(self, refused: Refuse) -> None:
        problem = problem_with(batch_size=1)
        refused("stream 'all' has batches of 1 and the model a BatchNorm layer.*at least 2", None, problem, noisy_net)

    def test_another_error_of_the_loss_is_the_users_own(self, refused: Refuse) -> None:
        def broken(*arguments: Any) -> Any:
            raise KeyError("labels")

        refused("labels", None, problem_with(broken), error=KeyError)


class TestMetrics:
    def test_a_metric_that_fails_fails_before_training(self, refused: Refuse) -> None:
        def broken(predictions: Any, targets: Any) -> float:
            raise ZeroDivisionError("no positives")

        refused("no positives", None, shared_problem(metrics={"m": broken}), error=ZeroDivisionError)

    def test_a_metric_that_gives_no_number(self, refused: Refuse) -> None:
        problem = shared_problem(metrics={"m": lambda p, t: p})
        refused("metric 'm' must give one number", None, problem)

    def test_a_reference_of_zero_or_for_other_metrics(self, refused: Refuse) -> None:
        problem = shared_problem(metrics={"a": minus_loss, "b": fm.accuracy})
        refused("reference value of metric 'b' is 0", fm.ForkMerge(reference={"a": 1.0, "b": 0}), problem)
        refused("the reference lacks a value: unknown metric 'b'", fm.ForkMerge(reference={"a": 1.0}), problem)


class TestRefit:
    def test_validation_examples_the_stream_cannot_read(self, refused: Refuse) -> None:
        inputs, labels = examples(24, 2)
        validation = fm.Evaluation(TensorDataset(inputs, labels[:, 0]), fm.accuracy)
        problem = shared_problem(validation=validation)
        refused(r"refit=True trains on the validation examples too.*as_training=", fm.ForkMerge(refit=True), problem)


def local_problem() -> fm.Problem:
    return problem_with(lambda *arguments: shared_losses(*arguments))


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"steps": 0}, "steps must be a positive integer, got 0"),
            ({"steps": 2.0}, r"steps must be a positive integer, got 2\.0"),
            ({"workers": 0}, "workers must be a positive integer, got 0"),
            ({"threads": 0}, "threads must be a positive integer, got 0"),
            ({"checkpoint_every": 0}, "checkpoint_every must be a positive integer, got 0"),
            ({"checkpoint_every": -5}, "checkpoint_every must be a positive integer, got -5"),
            ({"accumulate": 0}, "accumulate must be a positive integer, got 0"),
            ({"precision": "half"}, "precision must be float32, bfloat16 or float16, got 'half'"),
            ({"scheduler": fm.SchedulerOf("ReduceLROnPlateau")}, "ReduceLROnPlateau follows a metric"),
            (
                {"scheduler": lambda optimizer: 3},
                "scheduler must give a torch.optim.lr_scheduler.LRScheduler, got 3",
            ),
            ({"optimizer": lambda model: 3}, r"optimizer factory must return a torch\.optim\.Optimizer, got 3"),
            ({"optimizer": fm.OptimizerOf("LBFGS")}, "LBFGS needs a closure"),
            ({"net": 3}, "model must be a torch.nn.Module or a function that makes one, got 3"),
            ({"net": nn.LazyLinear(3)}, "is lazy and has no shape yet"),
            ({"workers": 2, "problem": local_problem()}, "worker processes need a problem.*module-level functions"),
        ],
    )
    def test_impossible_options_of_fit(self, refused: Refuse, options: dict[str, Any], message: str) -> None:
        refused(message, **options)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"interval": 0}, "interval must be a positive integer, got 0"),
            ({"checkpoint": "best"}, "checkpoint must be one of last, best_in_interval, best_so_far, got 'best'"),
            ({"bn": "sum"}, "bn must be one of average, recompute, got 'sum'"),
            ({"optimizer_state": "drop"}, "optimizer_state must be one of keep, average, reset, got 'drop'"),
            ({"select": "first"}, "select must be one of last, best, got 'first'"),
            ({"prune_to": 0}, "prune_to must be a positive integer, got 0"),
            ({"search_examples": -3}, "search_examples must be a positive integer, got -3"),
            ({"validate_every": True}, "validate_every must be a positive integer, got True"),
            ({"bn_batches": 1.5}, r"bn_batches must be a positive integer, got 1\.5"),
            ({"auxiliary_scale": 0}, "auxiliary_scale must be positive and finite, got 0"),
            ({"auxiliary_scale": math.nan}, "auxiliary_scale must be positive and finite, got nan"),
            ({"auxiliary_scale": "3"}, "auxiliary_scale must be positive and finite, got '3'"),
            ({"search": "gird"}, r"unknown search 'gird'\. Did you mean 'grid'"),
            ({"search": 3}, "search must be a search, its name or"),
        ],
    )
    def test_impossible_options_of_the_algorithm(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(fm.ProblemError, match=message):
            fm.ForkMerge(**options)

    @pytest.mark.parametrize("algorithm", [fm.Joint, fm.SingleTask])
    def test_options_of_the_other_algorithms_are_checked_too(self, algorithm: Any, refused: Refuse) -> None:
        refused("select must be one of last, best, got 'first'", algorithm(select="first"))
        refused("interval must be a positive integer, got -1", algorithm(interval=-1))

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: fm.OptimizerOf("Adm", lr=1), r"unknown optimizer 'Adm'\. Did you mean 'Adam'"),
            (lambda: fm.SchedulerOf("CosineLR"), "unknown scheduler 'CosineLR'"),
        ],
    )
    def test_a_factory_of_an_unknown_name_offers_the_closest(self, make: Any, message: str) -> None:
        with pytest.raises(fm.ProblemError, match=message):
            make()

    def test_a_share_of_steps_needs_steps_to_be_a_share_of(self) -> None:
        factory = fm.SchedulerOf("CosineAnnealingLR", T_max="100%")
        with pytest.raises(fm.ProblemError, match=r"T_max is a share of the run's steps; say of how many with over"):
            factory(SGD(nn.Linear(1, 1)))
        assert factory.over(30)(SGD(nn.Linear(1, 1))).T_max == 30


class TestFolders:
    def test_a_folder_that_exists_is_refused_with_both_ways_out(self, monkeypatch: Any, tmp_path: Path) -> None:
        (tmp_path / "mine").write_text("precious")
        with counting_steps(monkeypatch) as trained, pytest.raises(fm.StoreError, match="exists and is not an empty"):
            fit(folder=tmp_path)
        assert trained == []
        assert [item.name for item in tmp_path.iterdir()] == ["mine"]

    def test_a_finished_run_is_not_overwritten(self, tmp_path: Path) -> None:
        fit(folder=tmp_path / "run", steps=2)
        with pytest.raises(fm.StoreError, match=r"choose another folder or continue it with `forkmerge resume"):
            fit(folder=tmp_path / "run", steps=2)

    def test_a_folder_below_a_file_cannot_be_made(self, monkeypatch: Any, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with counting_steps(monkeypatch) as trained, pytest.raises(fm.StoreError, match="cannot create the run folder"):
            fit(folder=tmp_path / "file" / "run")
        assert trained == []

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
    def test_a_folder_that_cannot_be_written(self, monkeypatch: Any, tmp_path: Path) -> None:
        tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
        try:
            with counting_steps(monkeypatch) as trained, pytest.raises(fm.StoreError, match="Permission denied"):
                fit(folder=tmp_path / "run")
            assert trained == []
        finally:
            tmp_path.chmod(stat.S_IRWXU)

    def test_resuming_or_keeping_branches_needs_a_folder(self, monkeypatch: Any) -> None:
        with counting_steps(monkeypatch) as trained:
            with pytest.raises(fm.StoreError, match="resume=True needs the folder of the run: pass folder="):
                fit(resume=True)
            with pytest.raises(fm.ProblemError, match="keep_branches=True needs a folder to keep them in"):
                fit(fm.ForkMerge(keep_branches=True))
        assert trained == []

    def test_resuming_a_folder_that_is_no_run_is_refused(self, monkeypatch: Any, tmp_path: Path) -> None:
        (tmp_path / "mine").write_text("precious")
        with counting_steps(monkeypatch) as trained, pytest.raises(fm.StoreError, match="is not a run folder"):
            fit(folder=tmp_path, resume=True)
        assert trained == []


RECIPE = """
import forkmerge as fm
from problems import SGD, plain_net, shared_problem

def recipe(size: int = 3) -> fm.Recipe:
    return fm.Recipe(shared_problem(), plain_net, SGD, steps=4)

def number() -> int:
    return 3
"""


class TestRecipes:
    @pytest.fixture
    def load(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], fm.Recipe]:
        (tmp_path / "bad_input_recipe.py").write_text(RECIPE)
        monkeypatch.syspath_prepend(str(tmp_path))

        def write(text: str) -> fm.Recipe:
            path = tmp_path / "problem.toml"
            path.write_text(text)
            return fm.load_recipe(path)

        return write

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("stesp = 3", r"a recipe: unknown key 'stesp'\. Did you mean 'steps'\? Known: recipe"),
            ("[training]\nclip = 1.0", r"\[training\]: unknown key 'clip'\. Did you mean 'clip_norm'"),
            (
                "[algorithm]\nintervall = 3",
                r"\[algorithm\] ForkMerge: unknown key 'intervall'\. Did you mean 'inter",
            ),
            ("[algorithm]\nname = 'Forkmerge'", r"unknown algorithm 'Forkmerge'\. Did you mean 'ForkMerge'"),
            ("[algorithm]\npreset = 'papers'", r"unknown preset 'papers'\. Did you mean 'paper'"),
            ("target = 'tgd'", r"unknown task 'tgd'\. Did you mean 'tgt'"),
            ("[scheduler]\nT_max = 1", r"\[scheduler\] needs a name, e\.g\. name = 'CosineAnnealingLR'"),
            ("optimizer = 'Addam'", r"unknown optimizer 'Addam'\. Did you mean 'Adam'"),
            ("[arguments]\nsizes = 3", r"\[arguments\] do not fit .*'sizes'.*It takes: size"),
        ],
    )
    def test_an_unknown_key_offers_the_closest(self, load: Any, text: str, message: str) -> None:
        with pytest.raises(fm.ForkMergeError, match=message):
            load(f"recipe = 'bad_input_recipe:recipe'\n{text}\n")

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("steps = 3", "a recipe file needs recipe = 'module:function'"),
            ("steps = = 3", r"problem\.toml is not valid TOML"),
            ("recipe = 'bad_input_recipe:recpe'", r"unknown function 'recpe'\. Did you mean 'recipe'"),
            ("recipe = 'bad_input_recipe:number'", r"must return a forkmerge\.Recipe, got int"),
            ("recipe = 'no_such_module:recipe'", "no module named 'no_such_module'"),
            ("recipe = 'bad_input_recipe.py:recipe'", "names a file: write bad_input_recipe:recipe"),
            ("recipe = 'bad_input_recipe'", "is neither a .toml file nor 'module:function'"),
        ],
    )
    def test_a_recipe_that_cannot_be_found(self, load: Any, text: str, message: str) -> None:
        with pytest.raises(fm.ConfigError, match=message):
            load(text)

    def test_a_file_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(fm.ConfigError, match=r"cannot read .*gone\.toml: No such file"):
            fm.load_recipe(tmp_path / "gone.toml")


def test_a_refused_run_leaves_the_model_as_it_was() -> None:
    net = seeded(noisy_net)
    net.body[3].eval()
    calls = []

    def broken(predictions: Any, targets: Any) -> float:
        calls.append(1)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fit(problem=shared_problem(metrics={"m": broken}), net=net)
    assert calls == [1]
    assert same_bits(net, seeded(noisy_net))
    assert all(parameter.grad is None for parameter in net.parameters())
    assert not net.body[3].training
    assert net.body[1].training


def test_the_training_options_are_checked_where_they_are_given() -> None:
    with pytest.raises(fm.ProblemError, match="optimizer must be a function of the model that returns an optimizer"):
        fm.Training(SGD(plain_net()))


class TestFriendlyAnswers:
    def test_a_data_set_in_place_of_an_evaluation(self) -> None:
        good = shared_problem()
        with pytest.raises(fm.ProblemError, match=r"validation must be an Evaluation .* got TensorDataset: wrap"):
            fm.Problem("tgt", good.streams, TensorDataset(torch.zeros(2, 1)))

    def test_one_stream_needs_no_list(self) -> None:
        stream = next(iter(shared_problem().stream_map.values()))
        assert fm.Problem("tgt", stream, shared_problem().validation).tasks == shared_problem().tasks

    def test_an_optimizer_class_in_place_of_a_factory(self) -> None:
        with pytest.raises(fm.ProblemError, match=r"optimizer is the class Adam.*OptimizerOf\('Adam', lr=…\)"):
            fm.SingleTask().fit(shared_problem(), model=plain_net, optimizer=torch.optim.Adam, steps=1)

    def test_a_misspelt_optimizer_option_offers_the_closest(self) -> None:
        with pytest.raises(fm.ProblemError, match=r"unknown option of Adam 'lrr'\. Did you mean 'lr'"):
            fm.OptimizerOf("Adam", lrr=1)

    def test_losses_with_too_few_arguments(self) -> None:
        with pytest.raises(fm.ProblemError, match=r"must take \(model, batch, tasks, context\)"):
            fm.Stream(TensorDataset(torch.zeros(2, 1)), lambda model, batch: {}, ["tgt"], 1)

    def test_branches_as_a_list(self) -> None:
        model = plain_net()
        with pytest.raises(fm.ProblemError, match=r"branches must be .* got list"):
            fm.fork(model, torch.optim.SGD(model.parameters(), lr=0.1), ["alone"])

    def test_a_method_that_needs_the_target_in_a_branch_without_it(self) -> None:
        branches = {"alone": {"tgt": 1.0}, "others": dict.fromkeys(domains_problem().auxiliaries, 1.0)}
        with pytest.raises(fm.ProblemError, match="GCS treats the target differently, but branch 'others'"):
            fm.ForkMerge(branches, method="GCS").fit(domains_problem(), model=plain_net, optimizer=SGD, steps=1)

    def test_gradients_at_a_representation_that_nobody_declared(self) -> None:
        with pytest.raises(fm.ProblemError, match=r"gradients='representation' needs a declared one"):
            fm.Joint(method="MGDA").fit(
                shared_problem(), model=plain_net, optimizer=SGD, steps=1, gradients="representation"
            )
