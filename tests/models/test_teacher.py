"""A running average of a model's weights, as part of the model and of its branch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import forkmerge as fm
from forkmerge.algorithms.events import CheckpointWritten
from forkmerge.models import WithTeacher
from unlabelled_images import model, options, splits


class TestTeacher:
    def test_it_is_the_moving_average_of_everything_that_floats(self) -> None:
        pair = model(decay=0.75)
        expected = {name: value.clone() for name, value in pair.student.state_dict().items()}
        optimizer = torch.optim.SGD(pair.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            pair(torch.randn(4, 3, 8, 8), "class").square().sum().backward()
            optimizer.step()
            pair.after_optimizer_step()
            for name, value in pair.student.state_dict().items():
                if value.is_floating_point():
                    expected[name] = 0.75 * expected[name] + 0.25 * value
                else:
                    assert value == step + 1
                    expected[name] = value.clone()
        for name, value in pair.teacher.state_dict().items():
            torch.testing.assert_close(value, expected[name])

    def test_by_hand(self) -> None:
        """θ′ ← αθ′ + (1 − α)θ with α = 0.9: from 1, past 2 and 3, to 1.1 and 1.29."""
        student = nn.Linear(1, 1, bias=False)
        nn.init.ones_(student.weight)
        pair = WithTeacher(student, decay=0.9)
        for value, average in ((2.0, 1.1), (3.0, 1.29)):
            nn.init.constant_(student.weight, value)
            pair.after_optimizer_step()
            assert pair.teacher.weight.item() == pytest.approx(average)

    def test_no_optimizer_sees_it(self) -> None:
        pair = model()
        assert not list(pair.teacher.parameters())
        assert len(list(pair.parameters())) == len(list(pair.student.parameters()))

    def test_its_own_passes_leave_no_trace(self) -> None:
        pair = model().train()
        before = {name: value.clone() for name, value in pair.teacher.state_dict().items()}
        pair.teacher(torch.randn(4, 3, 8, 8), "class")
        for name, value in pair.teacher.state_dict().items():
            assert torch.equal(value, before[name]) or name.endswith("num_batches_tracked")

    def test_it_answers_in_evaluation_mode(self) -> None:
        pair = model()
        nn.init.zeros_(pair.teacher.get_submodule("heads.class").weight)
        nn.init.zeros_(pair.teacher.get_submodule("heads.class").bias)
        x = torch.randn(2, 3, 8, 8)
        assert pair.train()(x, "class").abs().sum() > 0
        assert pair.eval()(x, "class").abs().sum() == 0
        pair.evaluate = False
        assert pair(x, "class").abs().sum() > 0

    def test_tied_weights_stay_tied(self) -> None:
        class Tied(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
                self.second.weight = self.first.weight

        pair = WithTeacher(Tied())
        assert pair.teacher.first.weight is pair.teacher.second.weight

    def test_a_decay_of_one_is_refused(self) -> None:
        with pytest.raises(fm.ProblemError, match="decay must be"):
            WithTeacher(nn.Linear(1, 1), 1.0)

    def test_it_merges_by_the_coefficients(self) -> None:
        """Two branches trained apart, merged half and half: the teacher is the mean of theirs."""
        problem = splits().problem(["rotation"])
        mixtures = [fm.Mixture("alone", {"class": 1.0}), fm.Mixture("joint", {"class": 1.0, "rotation": 1.0})]
        merged = fm.ForkMerge(mixtures, interval=3, search=fm.Fixed((0.5, 0.5))).fit(problem, **options(steps=3))
        ends = [fm.Joint(dict(m.task_weights)).fit(problem, **options(steps=3)).model.teacher for m in mixtures]
        for name, value in merged.model.teacher.state_dict().items():
            if value.is_floating_point():
                theirs = [end.state_dict()[name] for end in ends]
                torch.testing.assert_close(value, (theirs[0] + theirs[1]) / 2)
        assert any(not torch.equal(a, b) for a, b in zip(*(e.state_dict().values() for e in ends), strict=True))

    def test_it_resumes_with_the_branch(self, tmp_path: Path) -> None:
        """Stopped in the middle of a round, a run ends with the same bits."""
        problem, algorithm = splits().problem(), fm.ForkMerge("per_auxiliary", interval=3)
        whole = algorithm.fit(problem, **options())

        class Stopped(Exception):
            pass

        def stop(event: Any) -> None:
            if isinstance(event, CheckpointWritten) and event.step == 4:
                raise Stopped

        with pytest.raises(Stopped):
            algorithm.fit(problem, **options(folder=tmp_path / "run", checkpoint_every=2, on_event=stop))
        again = algorithm.fit(problem, **options(folder=tmp_path / "run", checkpoint_every=2, resume=True))
        for name, value in whole.model.state_dict().items():
            assert torch.equal(value, again.model.state_dict()[name]), name
