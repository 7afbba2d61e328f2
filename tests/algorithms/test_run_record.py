"""The record of a run: JSON and back, a readable repr, escaped HTML."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import forkmerge as fm
from forkmerge.algorithms.run_record import Run
from problems import diverging_problem, evaluation, examples, facts, fit, minus_loss, noisy_net, shared_losses


@pytest.fixture(scope="module")
def run() -> Run:
    return fit(fm.ForkMerge("per_auxiliary", interval=4, floor=True, refit=True), net=noisy_net)


class TestRun:
    def test_it_survives_json(self, run: Run) -> None:
        text = json.dumps(run.to_json(), allow_nan=False)
        back = Run.from_json(json.loads(text))
        assert back == run
        assert back.model is None
        assert repr(back) == repr(run)

    def test_so_does_one_with_numbers_that_are_not_finite(self) -> None:
        lost = fit(fm.ForkMerge(interval=4), diverging_problem(1, "tgt"))
        back = Run.from_json(json.loads(json.dumps(lost.to_json(), allow_nan=False)))
        assert facts(back) == facts(lost)
        assert back.rounds[0].branches["alone"].losses["tgt"] is None

    def test_it_reports_timings_and_environment(self, run: Run) -> None:
        assert set(run.seconds) == {"train", "rank", "search", "merge"}
        assert all(value >= 0 for r in run.rounds for value in r.seconds.values())
        assert run.environment["torch"] == torch.__version__
        assert run.environment["threads"] == 1
        assert run.settings["training"]["steps"] == 12

    def test_its_repr_is_readable(self, run: Run) -> None:
        lines = repr(run).splitlines()
        assert lines[0] == "ForkMerge on 'tgt': 12 steps, seed 0, model: refit"
        assert len([line for line in lines if line.strip().startswith("round")]) == 3
        assert any(line.strip().startswith("relevance") for line in lines)

    def test_relevance_is_the_mean_over_steps(self) -> None:
        run = fit(fm.ForkMerge(interval=8, search=fm.Fixed((0.5, 0.5))), steps=12)
        first, second = run.rounds
        first.relevance.update(aux=0.0)
        assert (first.end - first.start, second.end - second.start) == (8, 4)
        assert run.relevance["aux"] == pytest.approx((0.0 * 8 + 0.5 * 4) / 12)

    def test_html_escapes_names(self) -> None:
        name = "<script>alert(1)<script>"
        inputs, labels = examples(16, 1)

        def losses(model: nn.Module, batch: Any, tasks: Sequence[str], context: fm.Context) -> Any:
            renamed = {name: "aux", "tgt": "tgt"}
            found = shared_losses(model, batch, [renamed[task] for task in tasks], context)
            return {task: found[renamed[task]] for task in tasks}

        stream = fm.Stream(TensorDataset(inputs, labels), losses, ("tgt", name), 8)
        problem = fm.Problem("tgt", [stream], evaluation(metrics={"<b>": minus_loss}))
        page = fit(fm.ForkMerge("per_auxiliary", interval=4), problem)._repr_html_()
        assert "<script>" not in page
        assert "&lt;script&gt;" in page
        assert "<b>&" not in page
        assert page.count("<tr>") == 4
