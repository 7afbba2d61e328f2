"""Settings are chosen without the test data: a part of the training data takes its place."""

import pytest
import torch
from torch.utils.data import Subset, TensorDataset

import forkmerge as fm
from forkmerge.problem.split_dataset import part
from problems import plain_net, shared_problem


def rows(dataset: object) -> list[float]:
    return [float(dataset[index][0].sum()) for index in range(len(dataset))]  # type: ignore[arg-type,index]


def with_test() -> fm.Problem:
    problem = shared_problem()
    return fm.Problem(problem.target, problem.streams, problem.validation, test=problem.target_validation)


def test_a_third_of_the_training_data_takes_the_place_of_the_test_data() -> None:
    problem = with_test()
    made = problem.for_development()
    (stream,) = problem.stream_map.values()
    (kept,) = made.stream_map.values()
    held = made.evaluations("test")[made.target].dataset
    assert len(held) == len(stream.dataset) // 3  # type: ignore[arg-type]
    assert sorted(rows(kept.dataset) + rows(held)) == sorted(rows(stream.dataset))
    assert rows(made.target_validation.dataset) == rows(problem.target_validation.dataset)


@pytest.mark.parametrize("wrap", [lambda data: data, lambda data: Subset(data, range(9))])
def test_the_parts_are_the_same_every_time_and_overlap_nowhere(wrap: object) -> None:
    data = wrap(TensorDataset(torch.arange(9.0)[:, None]))  # type: ignore[operator]
    kept, held = part(data)
    assert rows(kept) == rows(part(data)[0])
    assert sorted(rows(kept) + rows(held)) == list(range(9))
    assert type(kept) is type(data)


def test_a_recipe_file_asks_for_it_with_one_key() -> None:
    from forkmerge.experiments.recipe import recipe_from

    made = recipe_from(
        {"settings": {"recipe": "tests.whole.test_development:recipe", "development": True}, "folders": []}
    )
    assert rows(made.problem.evaluations("test")[made.problem.target].dataset) == rows(
        with_test().for_development().evaluations("test")[made.problem.target].dataset
    )


def test_test_data_of_another_form_is_refused_by_name() -> None:
    problem = shared_problem()
    held = problem.target_validation
    odd = fm.Evaluation(held.dataset, held.metrics, held.predict, as_training=held.dataset)
    with pytest.raises(fm.ProblemError, match="another form"):
        fm.Problem(problem.target, problem.streams, problem.validation, test=odd).for_development()


def recipe() -> fm.Recipe:
    return fm.Recipe(with_test(), plain_net, fm.OptimizerOf("SGD", lr=0.1), 4)
