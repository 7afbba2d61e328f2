"""The command `forkmerge` as tests call it, and a tiny problem to call it on."""

from __future__ import annotations

from typer.testing import CliRunner, Result

from forkmerge.cli.commands import app

TINY = """
import os, time
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset
import forkmerge as fm

_on_step = lambda step: time.sleep(float(os.environ.get("TINY_SLEEP", 0)))


def data(count, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 4, generator=generator)
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.heads = nn.Linear(4, 8), nn.ModuleDict({t: nn.Linear(8, 2) for t in ("tgt", "aux")})

    def forward(self, inputs, task="tgt"):
        return self.heads[task](torch.tanh(self.body(inputs)))


def losses(model, batch, tasks, context):
    _on_step(context.step)
    return {task: cross_entropy(model(batch[0], task), batch[1]) for task in tasks}


def recipe(examples=16):
    print("building the recipe")
    problem = fm.Problem(
        "tgt",
        [fm.Stream(data(examples, 1), losses, ("tgt", "aux"), 4)],
        validation=fm.Evaluation(data(20, 2), fm.accuracy),
        test=fm.Evaluation(data(30, 3), fm.accuracy),
    )
    return fm.Recipe(problem, Net, fm.OptimizerOf("Adam", lr=0.01), steps=24, algorithm=fm.ForkMerge(interval=8))


def broken():
    raise ValueError("a mistake of the user's own")
"""


def invoke(*words: object, code: int = 0) -> Result:
    """Call the command, which must end with this exit code."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def error_of(*words: object) -> str:
    """The one line that a refused command prints."""
    result = invoke(*words, code=2)
    assert result.stdout.replace("building the recipe\n", "") == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    return line.removeprefix("error: ")
