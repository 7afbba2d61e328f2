"""What every rank of a run of torchrun does: each case in turn, its results in a file of the rank's own.

torchrun --standalone --nproc-per-node 2 tests/two_ranks.py FOLDER
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import forkmerge as fm
from spanning_models import (
    BATCH,
    BRANCHES,
    HELD_OUT,
    TRUTH,
    WRAPPERS,
    Training,
    minus_loss,
    net,
    norm_net,
    sharded,
    wide_net,
)

STARTED = "started"
INTERIOR = fm.Fixed((0.3, 0.7))
CASES: dict[str, Callable[[Path], Any]] = {}


def case(function: Callable[[Path], Any]) -> Callable[[Path], Any]:
    CASES[function.__name__] = function
    return function


def ending(training: Training) -> dict[str, Any]:
    return {"numbers": training.numbers(), "digest": training.digest()}


@case
def same_batches(folder: Path) -> Any:
    """The mean of two equal gradients is exact, so that nothing distinguishes a wrapped model from a plain one."""
    wrappers = {name: wrap for name, wrap in WRAPPERS.items() if name not in ("plain", "compiled")}
    return {
        f"{name} {search}": ending(Training(wrap(net()), search).run())
        for name, wrap in wrappers.items()
        for search in (None, INTERIOR)
    }


@case
def other_batches(folder: Path) -> Any:
    half = BATCH // 2
    share = slice(half * dist.get_rank(), half * (dist.get_rank() + 1))
    runs = {name: Training(WRAPPERS[name](net()), share=share).run() for name in ("fsdp", "ddp")}
    return {name: ending(run) for name, run in runs.items()}


@case
def rows(folder: Path) -> Any:
    """How much of the model each branch holds here."""
    training = Training(sharded(wide_net())).run(range(1))
    states = [branch._state for branch in training.forked._branches.values()]
    return [sum(row.numel() for row in (*s.rows.values(), *s.optimizer_rows.values())) for s in states]


@case
def bad_shard(folder: Path) -> Any:
    training = Training(sharded(net()))
    training.train(0)
    for branch in training.forked:
        if branch.name == "joint" and dist.get_rank() == 1:
            with torch.no_grad():
                branch.model[0].weight.to_local()[0, 0] = torch.nan
    outcome = training.merge()
    return {"coefficients": outcome.coefficients, "faults": outcome.faults, "digest": training.digest()}


@case
def untrained_shard(folder: Path) -> Any:
    """Only a layer of which rank 1 has nothing is trained: rank 1 has changed nothing, and that is no mistake."""
    model = sharded(net())
    training = Training(model, optimizer=lambda m: torch.optim.SGD([m[4].weight, m[4].bias], lr=0.1))
    return ending(training.run(range(1)))


@case
def scores(folder: Path) -> Any:
    """Every rank gives another score."""
    rank = dist.get_rank()

    def of_rank(model: nn.Module) -> float:
        return minus_loss(model) + 100 * rank

    def per_example(model: nn.Module) -> torch.Tensor:
        own = slice(0, 10) if rank == 0 else slice(10, None)
        return -(model(HELD_OUT[own]) - TRUTH[own]).square()[:, 0]

    result = {}
    for name, score, ranks in (
        ("first", of_rank, "first"),
        ("nothing elsewhere", lambda model: of_rank(model) if rank == 0 else (model(HELD_OUT), None)[1], "first"),
        ("mean", of_rank, "all"),
        ("joined", per_example, "all"),
        ("first of examples", per_example, "first"),
    ):
        training = Training(sharded(net()))
        training.train(0)
        outcome = training.merge(score, ranks=ranks)
        result[name] = {"score": outcome.score, "coefficients": outcome.coefficients, "digest": training.digest()}
    return result


@case
def failing_score(folder: Path) -> Any:
    def fails_on_rank_1(model: nn.Module) -> float:
        value = minus_loss(model)
        if dist.get_rank() == 1:
            raise ValueError("no such file")
        return value

    training = Training(sharded(net()))
    training.train(0)
    before = training.digest()
    try:
        training.merge(fails_on_rank_1)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    assert training.digest() == before
    return [message, ending(Training(sharded(net())).run(range(1)))]


@case
def norms(folder: Path) -> Any:
    """Ranks read other batches, so that each has other BatchNorm statistics until the merge."""
    share = slice(0, 8) if dist.get_rank() == 0 else slice(8, None)
    training = Training(sharded(norm_net()), search=INTERIOR, share=share)
    training.train(0)
    running = {name: branch._state.buffers for name, branch in training.forked._branches.items()}
    before = {name: buffers["1.running_mean"].tolist() for name, buffers in running.items()}
    training.merge()
    return {"before": before, "after": training.model[1].running_mean.tolist()}


@case
def checkpoint(folder: Path) -> Any:
    """Saved after one round, and read by a run that starts anew, and by another number of ranks."""
    for name in ("fsdp", "ddp"):
        training = Training(WRAPPERS[name](net())).run(range(1))
        dcp.save({"fork": training.forked}, checkpoint_id=folder / f"of two, {name}")
    result = {}
    for source in ("of two, fsdp", "of two, ddp", "of one"):
        for name in ("fsdp", "ddp"):
            resumed = Training(WRAPPERS[name](net()))
            dcp.load({"fork": resumed.forked}, checkpoint_id=folder / source)
            result[f"{source} in {name}"] = ending(resumed.run(range(1, 3)))
    return result


@case
def optimizers(folder: Path) -> Any:
    """Each rank goes on with its own state. (torch's Adafactor itself fails on sharded parameters.)"""
    makes = {
        "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.02, momentum=0.9),
        "fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.02, fused=True),
    }
    result = {}
    for name, make in makes.items():
        training = Training(sharded(net()), INTERIOR, optimizer=make).run(range(1))
        value = training.forked.state_dict()
        resumed = Training(sharded(net()), INTERIOR, optimizer=make)
        resumed.forked.load_state_dict(value)
        result[name] = [run.run(range(1, 2)).digest() for run in (training, resumed)]
    return result


@case
def mistakes(folder: Path) -> Any:
    forked = fm.fork(model := sharded(net()), torch.optim.SGD(model.parameters(), lr=0.1), BRANCHES, in_place=True)
    messages = []
    training = Training(sharded(net())).run(range(1))
    for attempt in (lambda: forked.merge(minus_loss), lambda: training.forked.merged_into(net())):
        try:
            attempt()
        except fm.ProblemError as error:
            messages.append(str(error))
    return messages


def main(folder: Path) -> None:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=90))
    rank = dist.get_rank()
    dist.barrier()
    (folder / f"{STARTED}-{rank}").touch()
    for name, function in CASES.items():
        try:
            result = {"result": function(folder)}
        except Exception:
            result = {"error": traceback.format_exc()}
        (folder / f"{name}.{rank}.json").write_text(json.dumps(result))
        if "error" in result:
            print(result["error"], file=sys.stderr, flush=True)
            os._exit(1)  # the other rank would wait for this one
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
