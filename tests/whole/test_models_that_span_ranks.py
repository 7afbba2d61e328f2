"""`fork(…, in_place=True)` of DDP, FSDP2 and compiled models: the bits of a plain model, on one rank and on two."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import mse_loss

import forkmerge as fm
import two_ranks
from paths import TESTS
from spanning_models import (
    BRANCHES,
    HELD_OUT,
    INPUTS,
    TRUTH,
    WRAPPERS,
    Training,
    adam,
    digest,
    net,
    one_rank,
    sharded,
    wide_net,
)
from torchrun import torchrun

INTERIOR = two_ranks.INTERIOR
# torch's distributed checkpoint warns of its own defaults.
pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning", "ignore:.*:FutureWarning")


@pytest.fixture
def alone() -> Iterator[None]:
    with one_rank():
        yield


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What every case gave on both ranks; launched once, whichever of pytest's workers comes first."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "two_ranks"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "ended").exists():
            with one_rank():
                training = Training(sharded(net())).run(range(1))
                dcp.save({"fork": training.forked}, checkpoint_id=folder / "of one")
            torchrun(
                TESTS / "two_ranks.py", [str(folder)], came_up=lambda _: any(folder.glob(f"{two_ranks.STARTED}-*"))
            )
            (folder / "ended").touch()
    results = {}
    for name in two_ranks.CASES:
        ranks = [json.loads((folder / f"{name}.{rank}.json").read_text()) for rank in (0, 1)]
        assert not any("error" in result for result in ranks), f"{name}: {ranks}"
        results[name] = [result["result"] for result in ranks]
    results["folder"] = [folder]
    return results


@pytest.fixture(scope="module")
def plain() -> Callable[[fm.Search | None], Training]:
    """A run of the plain model in copies of it, for every search."""
    runs: dict[str, Training] = {}

    def run(search: fm.Search | None) -> Training:
        if str(search) not in runs:
            runs[str(search)] = Training(net(), search, in_place=False).run()
        return runs[str(search)]

    return run


def assert_same(result: Any, run: Training) -> None:
    assert result["numbers"] == json.loads(json.dumps(run.numbers()))
    assert result["digest"] == run.digest()


@pytest.mark.usefixtures("alone")
class TestOneRank:
    @pytest.mark.parametrize("search", [None, INTERIOR, fm.Fixed((0.0, 1.0))], ids=["grid", "interior", "picked"])
    @pytest.mark.parametrize("wrapper", [name for name in WRAPPERS if name != "plain"])
    def test_a_wrapped_model_gives_the_bits_of_a_plain_one(self, wrapper: str, search: Any, plain: Any) -> None:
        run = Training(WRAPPERS[wrapper](net()), search).run()
        assert run.numbers() == plain(search).numbers()
        assert run.digest() == plain(search).digest()

    def test_the_search_finds_coefficients_between_the_branches(self, plain: Any) -> None:
        """So that candidates which are computed with the weights of others do not go unnoticed."""
        assert any(min(coefficients.values()) > 0 for coefficients, _, _ in plain(None).outcomes)

    def test_without_resharding_candidates_would_be_scored_with_old_weights(
        self, plain: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """After a forward pass without a backward one FSDP2 keeps the root's whole weights, whatever the shards are."""
        training = Training(sharded(net()))
        training.train(0)
        monkeypatch.setattr(FSDPModule, "reshard", lambda self: None)
        outcome = training.merge()
        expected = dict(map(json.dumps, pair) for pair in plain(None).outcomes[0][2])
        scores = dict(map(json.dumps, pair) for pair in outcome.candidates)
        assert scores.keys() == expected.keys()
        assert scores != expected

    @pytest.mark.parametrize("wrapper", ["fsdp", "ddp", "compiled"])
    def test_a_state_goes_on_inside_a_round_to_the_same_bits(self, wrapper: str, plain: Any) -> None:
        training = Training(WRAPPERS[wrapper](net())).run(range(1))
        training.train(1)
        resumed = Training(WRAPPERS[wrapper](net()))
        resumed.forked.load_state_dict(training.forked.state_dict())
        resumed.merge()
        assert resumed.run(range(2, 3)).digest() == plain(None).digest()

    @pytest.mark.parametrize("wrapper", ["fsdp", "ddp", "ddp with bucket views"])
    def test_gradients_that_were_not_stepped_with_stay_with_their_branch(self, wrapper: str) -> None:
        def accumulated(model: Any, in_place: bool) -> Training:
            training = Training(model, INTERIOR, in_place=in_place)
            for index, half in enumerate((INPUTS[:8], INPUTS[8:16])):
                for branch in training.forked:
                    (mse_loss(branch.model(half), half[:, :1]) * sum(branch.task_weights.values())).backward()
                    if index == 1:
                        branch.optimizer.step()
            training.merge()
            return training

        assert accumulated(WRAPPERS[wrapper](net()), True).digest() == accumulated(net(), False).digest()

    def test_gradients_that_fsdp_holds_back_are_refused_at_the_end_of_a_turn(self) -> None:
        training = Training(model := sharded(net()))
        model.set_requires_gradient_sync(False)
        turns = iter(training.forked)
        next(turns).model(INPUTS[:8]).mean().backward()
        with pytest.raises(fm.ProblemError, match=r"'alone' ends its turn with gradients that were not reduced"):
            next(turns)

    @pytest.mark.parametrize("change", ["whole", "local"])
    def test_weights_changed_while_no_branch_has_the_model_are_noticed(self, change: str) -> None:
        training = Training(model := sharded(net())).run(range(1))
        with torch.no_grad():
            weight = model[0].weight if change == "whole" else model[0].weight.to_local()
            weight.add_(1.0)
        with pytest.raises(fm.ProblemError, match=r"'0\.weight' was changed while no branch had the module"):
            training.train(1)

    def test_a_validation_pass_between_rounds_changes_nothing(self, plain: Any) -> None:
        training = Training(model := sharded(net()))
        for index in range(3):
            training.train(index)
            training.merge()
            with torch.no_grad():
                model(HELD_OUT)
        assert training.digest() == plain(None).digest()

    def test_a_plain_model_takes_the_merge_of_a_wrapped_one(self, plain: Any) -> None:
        for wrapper in ("ddp", "compiled ddp"):
            run = Training(WRAPPERS[wrapper](net())).run()
            assert digest(run.forked.merged_into(net())) == plain(None).digest()

    def test_another_sharded_model_takes_the_merge(self) -> None:
        run = Training(sharded(net())).run(range(1))
        assert digest(run.forked.merged_into(sharded(net()))) == run.digest()

    def test_a_checkpoint_of_a_sharded_model_goes_on_in_a_plain_one(self, plain: Any, tmp_path: Path) -> None:
        dcp.save({"fork": Training(sharded(net())).run(range(1)).forked}, checkpoint_id=tmp_path / "a")
        resumed = Training(net(), in_place=False)
        value = {"fork": resumed.forked.state_dict(by_parameter=True)}
        dcp.load(value, checkpoint_id=tmp_path / "a")
        resumed.forked.load_state_dict(value["fork"])
        assert resumed.run(range(1, 3)).digest() == plain(None).digest()

    def test_a_fork_that_never_stepped_is_saved_and_loaded_as_such(self, plain: Any, tmp_path: Path) -> None:
        dcp.save({"fork": Training(sharded(net())).forked}, checkpoint_id=tmp_path / "a")
        resumed = Training(sharded(net())).run(range(1))
        dcp.load({"fork": resumed.forked}, checkpoint_id=tmp_path / "a")
        assert resumed.run().digest() == plain(None).digest()

    def test_a_copying_fork_refuses_them_with_what_to_do(self) -> None:
        for wrapper in ("fsdp", "ddp"):
            model = WRAPPERS[wrapper](net())
            with pytest.raises(fm.ProblemError, match=r"spans ranks.*in_place=True"):
                fm.fork(model, adam(model), BRANCHES)


class TestTwoRanks:
    def test_with_the_same_batches_on_both_the_bits_are_those_of_a_plain_model(self, ended: Any, plain: Any) -> None:
        for rank in ended["same_batches"]:
            assert len(rank) == 10
            for name, result in rank.items():
                assert_same(result, plain(None if name.endswith("None") else INTERIOR))

    def test_with_half_of_a_batch_each_weights_are_close_and_equal_on_both(self, ended: Any, plain: Any) -> None:
        """The mean of two means is rounded otherwise than the mean of all: equal up to that, and no more."""
        first, second = ended["other_batches"]
        assert first == second
        for result in first.values():
            for numbers, expected in zip(result["numbers"], plain(None).numbers(), strict=True):
                assert numbers[0] == expected[0]
                assert numbers[1] == pytest.approx(expected[1], rel=1e-4)

    def test_a_rank_holds_its_share_of_every_branch(self, ended: Any, alone: None) -> None:
        states = Training(wide_net()).run(range(1)).forked._branches.values()
        size = sum(row.numel() for s in states for row in (*s._state.rows.values(), *s._state.optimizer_rows.values()))
        for rank in ended["rows"]:
            assert 0.4 < sum(rank) / size < 0.6

    def test_a_bad_shard_is_a_fault_of_the_branch_on_both(self, ended: Any) -> None:
        first, second = ended["bad_shard"]
        assert first["coefficients"] == second["coefficients"] == {"alone": 1.0, "joint": 0.0}
        assert first["faults"] == {"joint": "it has parameters that are not finite on another rank"}
        assert second["faults"] == {"joint": "it has parameters that are not finite"}
        assert first["digest"] == second["digest"]

    def test_a_rank_that_has_nothing_of_what_is_trained_is_no_mistake(self, ended: Any) -> None:
        assert ended["untrained_shard"][0] == ended["untrained_shard"][1]

    def test_the_score_of_rank_0_is_everybodys(self, ended: Any, plain: Any) -> None:
        for rank in ended["scores"]:
            for name in ("first", "nothing elsewhere"):
                assert rank[name]["score"] == plain(None).outcomes[0][1]
                assert rank[name]["coefficients"] == plain(None).outcomes[0][0]

    def test_scores_of_all_ranks_are_joined_or_averaged(self, ended: Any) -> None:
        first, second = ended["scores"]
        assert first == second
        assert first["mean"]["score"] == pytest.approx(first["first"]["score"] + 50)
        training = Training(net())
        training.train(0)
        whole = training.merge(lambda model: -(model(HELD_OUT) - TRUTH).square()[:, 0])
        assert first["joined"]["coefficients"] == whole.coefficients
        assert first["joined"]["score"] == pytest.approx(whole.score, rel=1e-6)
        training = Training(net())
        training.train(0)
        part = training.merge(lambda model: -(model(HELD_OUT[:10]) - TRUTH[:10]).square()[:, 0])
        assert first["first of examples"]["score"] == pytest.approx(part.score, rel=1e-6)

    def test_a_score_that_fails_on_one_rank_fails_on_both(self, ended: Any) -> None:
        (first, later), (second, _) = ended["failing_score"]
        assert first.startswith("ProblemError: score failed on another rank")
        assert second == "ValueError: no such file"
        assert later["numbers"]

    def test_buffers_of_rank_0_are_everybodys_after_a_merge(self, ended: Any) -> None:
        first, second = ended["norms"]
        assert first["before"] != second["before"]
        assert first["after"] == second["after"]

    def test_a_checkpoint_goes_on_on_two_ranks(self, ended: Any, plain: Any) -> None:
        for rank in ended["checkpoint"]:
            assert len(rank) == 6
            assert {result["digest"] for result in rank.values()} == {plain(None).digest()}

    @pytest.mark.parametrize("source", ["of two, fsdp", "of two, ddp"])
    @pytest.mark.parametrize("wrapper", ["fsdp", "ddp"])
    def test_a_checkpoint_of_two_ranks_goes_on_on_one(
        self, ended: Any, plain: Any, alone: None, source: str, wrapper: str
    ) -> None:
        resumed = Training(WRAPPERS[wrapper](net()))
        dcp.load({"fork": resumed.forked}, checkpoint_id=ended["folder"][0] / source)
        assert resumed.run(range(1, 3)).digest() == plain(None).digest()

    def test_a_state_of_each_ranks_own_goes_on_with_any_optimizer(self, ended: Any) -> None:
        for rank in ended["optimizers"]:
            assert len(rank) == 2
            assert all(one == other for one, other in rank.values())

    def test_mistakes_are_told_on_both(self, ended: Any) -> None:
        for untrained, into_plain in ended["mistakes"]:
            assert "no branch has changed since the last merge" in untrained
            assert "not sharded as the fork's is" in into_plain
