"""The memory format of convolutions: a rule of structure, resolved once, and never a trace in what a run gives back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import forkmerge as fm
from _asserts import assert_same_bits, assert_same_run, bits
from branch_training import resumed_bits, train
from forkmerge.algorithms.events import RoundFinished
from forkmerge.engine.training.memory_format import memory_format, suits_channels_last, to_channels_last
from forkmerge.errors import ProblemError
from forkmerge.experiments.cost_of_run import estimate_run
from problems import (
    SGD,
    TASKS,
    WIDTH,
    Net,
    conv_net,
    evaluation,
    examples,
    fit,
    minus_loss,
    plain_net,
    seeded,
    shared_losses,
    shared_problem,
)

FORMAT = torch.channels_last


def wide_net(*, views: bool = False) -> Net:
    """A conv net that the rule turns to channels_last; with `views` it cannot be run that way."""
    last = ViewFlat() if views else nn.Flatten()
    layers = [
        nn.Unflatten(1, (2, 1, 3)),
        nn.Upsample(scale_factor=2.0),
        nn.Conv2d(2, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 2, (1, 3), padding=(0, 1)),
        nn.AdaptiveAvgPool2d((2, 2)),
        last,
    ]
    return Net(nn.Sequential(*layers))


class ViewFlat(nn.Module):
    """Flattens as people used to."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(len(x), WIDTH)


def view_net() -> Net:
    return wide_net(views=True)


def conv(net: nn.Module) -> nn.Conv2d:
    return net.body[2]  # type: ignore[no-any-return,index]


def is_last(weight: Tensor) -> bool:
    return not weight.is_contiguous() and weight.is_contiguous(memory_format=FORMAT)


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ([nn.Linear(32, 32)], False),
        ([nn.Conv2d(3, 64, 16, 16)], False),  # a patch embedding alone
        ([nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)], False),
        ([nn.Conv2d(3, 16, 3), nn.Conv2d(16, 8, 3)], True),
        ([nn.Conv2d(3, 32, 3), nn.Conv2d(32, 32, 3, groups=32)], True),
        ([nn.ConvTranspose2d(16, 3, 4)], True),
        ([nn.Conv2d(4, 16, 1, 2), nn.Conv2d(16, 16, 3)], False),  # torch's kernel for it spoils memory
        ([nn.Conv2d(16, 32, 1, 2), nn.Conv2d(32, 16, 3)], True),
        ([nn.Conv1d(32, 32, 3), nn.Conv3d(32, 32, 3)], False),
        ([nn.Conv2d(3, 4, 3).to(memory_format=FORMAT)], True),  # the user's own choice
    ],
)
def test_the_rule_looks_at_structure(layers: list[nn.Module], expected: bool) -> None:
    assert suits_channels_last(nn.Sequential(*layers), "float32") is expected


@pytest.mark.parametrize(("device", "precision", "expected"), [("cuda", "float32", False), ("cuda", "bfloat16", True)])
def test_gpus_gain_in_half_precision_only(device: str, precision: str, expected: bool, monkeypatch: Any) -> None:
    monkeypatch.setattr("forkmerge.engine.training.memory_format.device_of", lambda model: torch.device(device))
    assert suits_channels_last(wide_net(), precision) is expected


def test_other_parameters_of_four_dimensions_keep_their_format() -> None:
    net = wide_net()
    net.register_parameter("tokens", nn.Parameter(torch.zeros(1, 4, 3, 3)))
    changed = to_channels_last(net)
    assert [tuple(weight.shape) for weight in changed] == [(16, 2, 3, 3), (2, 16, 1, 3)]
    assert net.get_parameter("tokens").is_contiguous()
    assert to_channels_last(net) == []


@pytest.mark.parametrize("channels_last", [None, True])
def test_training_and_evaluation_run_in_one_format_and_the_model_gets_its_own_back(channels_last: Any) -> None:
    seen: dict[str, set[bool]] = {"losses": set(), "predict": set()}

    def losses(model: Any, batch: Any, tasks: Any, context: fm.Context) -> Any:
        seen["losses"].add(is_last(conv(model).weight))
        x, labels = batch
        z = model.body(x)
        return {t: nn.functional.cross_entropy(model.heads[t](z), labels[:, TASKS.index(t)]) for t in tasks}

    def predict(model: Any, batch: Any) -> Any:
        seen["predict"].add(is_last(conv(model).weight))
        return model(batch[0]), batch[1][:, 0]

    problem = shared_problem()
    stream = fm.Stream(problem.stream_map["all"].dataset, losses, TASKS, 8)
    held_out = fm.Evaluation(problem.target_validation.dataset, minus_loss, predict)
    net = seeded(wide_net)
    run = fit(problem=fm.Problem("tgt", [stream], held_out), net=net, channels_last=channels_last)
    assert seen == {"losses": {True}, "predict": {True}}
    assert run.settings["training"]["channels_last"] is True
    assert all(parameter.is_contiguous() for parameter in net.parameters())
    nn.utils.parameters_to_vector(net.parameters())


def test_the_format_changes_nothing_but_rounding() -> None:
    runs = [fit(net=wide_net, channels_last=last) for last in (True, False)]
    for name, tensor in bits(runs[0]).items():
        torch.testing.assert_close(tensor, bits(runs[1])[name], rtol=1e-3, atol=1e-4)


def test_small_and_dense_nets_are_left_alone() -> None:
    assert fit(net=plain_net).settings["training"]["channels_last"] is False


def test_a_model_that_uses_view_is_trained_in_its_own_format() -> None:
    run = fit(net=view_net)
    assert run.settings["training"]["channels_last"] is False
    assert_same_bits(run, fit(net=view_net, channels_last=False))
    with pytest.raises(fm.ProblemError, match=r"channels_last=True .*Use \.flatten or \.reshape instead of \.view"):
        fit(net=view_net, channels_last=True)


def test_a_dry_run_follows_the_rule_too() -> None:
    for net in (wide_net, view_net):
        module = seeded(net)
        before = bits(module)
        estimate_run(fm.Recipe(shared_problem(), module, SGD, steps=4))
        assert_same_bits(before, module)
        assert all(parameter.is_contiguous() for parameter in module.parameters())


def test_resumed_runs_keep_the_format_they_began_with(tmp_path: Path, monkeypatch: Any) -> None:
    algorithm = fm.ForkMerge("mixed", interval=4, optimizer_state="average")
    whole = fit(algorithm, net=wide_net, channels_last=True)
    seen = []

    def stop(event: Any) -> None:
        seen.append(event)
        if isinstance(event, RoundFinished):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(algorithm, net=wide_net, folder=tmp_path / "run", on_event=stop)
    monkeypatch.setattr(
        "forkmerge.engine.training.memory_format._FEWEST_CHANNELS", 1000
    )  # another machine, or release, another rule
    again = fit(algorithm, net=wide_net, folder=tmp_path / "run", resume=True)
    assert_same_run(whole, again)
    assert fit(algorithm, net=wide_net).settings["training"]["channels_last"] is False
    with pytest.raises(fm.StoreError, match=r"training\.channels_last was True and is False now"):
        fit(algorithm, net=wide_net, folder=tmp_path / "run", resume=True, channels_last=False)


def test_a_failed_check_leaves_the_model_as_it_was() -> None:
    net = seeded(wide_net)

    def fail() -> None:
        assert is_last(conv(net).weight)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"), memory_format(net, True, "float32", fail):
        raise AssertionError("never reached")
    assert conv(net).weight.is_contiguous()


def test_wrong_values_are_refused() -> None:
    with pytest.raises(fm.ProblemError, match=r"channels_last must be True, False or None \(by rule\), got 'yes'"):
        fm.Training(SGD, channels_last="yes")  # type: ignore[arg-type]


def test_a_wish_that_would_spoil_memory_is_refused() -> None:
    net = nn.Sequential(nn.Conv2d(4, 16, 1, 2), nn.Conv2d(16, 16, 3))
    with pytest.raises(ProblemError, match="write outside its tensors"), memory_format(net, True, "float32", list):
        pass


class TestMemoryFormats:
    def test_channels_last_computes_the_same_function(self) -> None:
        nets = [seeded(conv_net).double(), seeded(conv_net).double()]
        inputs, labels = examples(16, 1)
        stream = fm.Stream(TensorDataset(inputs.double(), labels), shared_losses, TASKS, 8)
        problem = fm.Problem("tgt", {"all": stream}, evaluation())
        for net, last in zip(nets, (True, False), strict=True):
            train(net, problem, channels_last=last)
        for name, tensor in bits(nets[0]).items():
            torch.testing.assert_close(tensor, bits(nets[1])[name], rtol=1e-9, atol=1e-12)

    def test_channels_last_weights_stay_channels_last_views_of_one_row(self) -> None:
        net = seeded(conv_net)
        result = train(net, channels_last=True, optimizer=SGD)
        weight, row = net.body[2].weight, result.state.rows["float32"]
        assert weight.is_contiguous(memory_format=torch.channels_last)
        assert not weight.is_contiguous()
        assert row.data_ptr() <= weight.data_ptr() < row.data_ptr() + row.nbytes

    def test_a_channels_last_run_survives_two_formats_of_storage(self) -> None:
        whole = resumed_bits(conv_net, SGD, cuts=(0, 10), channels_last=True)
        assert_same_bits(whole, resumed_bits(conv_net, SGD, channels_last=True))
