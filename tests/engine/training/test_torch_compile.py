"""`torch.compile` as an option: the same training by other kernels, compiled once for all branches."""

from __future__ import annotations

import copy
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.training.test_memory_format import wide_net
from torch import nn

import forkmerge as fm
from _asserts import assert_close, assert_same_bits, assert_same_run
from forkmerge.algorithms.events import RoundFinished
from forkmerge.engine.merging.race_over_examples import count_operations
from forkmerge.engine.training import torch_compile
from forkmerge.engine.training.torch_compile import compiled, install
from forkmerge.methods import PCGrad
from problems import SGD, TASKS, WIDTH, Net, fit, noisy_net, plain_net, seeded, shared_problem

# torch warns of its own doings while it compiles: a look at gradients of traced tensors, and old code it imports.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]
EAGER = "aot_eager"  # all of torch.compile but the code generation: no compiler is needed, and little time


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with every graph that is compiled."""
    sizes: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        sizes.append(len(inputs))
        return graph.forward

    monkeypatch.setattr(torch_compile, "backend_of", lambda how: backend)
    return sizes


def values() -> list[Any]:
    return [getattr(config, key) for config, wanted in torch_compile._configs() for key in wanted]


def test_a_compiled_run_trains_the_same_model_and_leaves_no_trace() -> None:
    before, net = values(), seeded(noisy_net)
    names = list(net.state_dict())
    run = fit(net=net, compile=EAGER)
    assert_close(run, fit(net=lambda: seeded(noisy_net)), rtol=1e-3, atol=1e-4)
    assert list(net.state_dict()) == names
    assert all(module._compiled_call_impl is None for module in net.modules())
    assert values() == before
    assert run.settings["training"]["compile"] == EAGER


def test_branches_and_rounds_share_what_was_compiled(graphs: list[int]) -> None:
    counts = []
    for steps, mixtures in ((2, "mixed"), (12, "mixed"), (12, "per_auxiliary")):
        torch._dynamo.reset()
        graphs.clear()
        fit(fm.ForkMerge(mixtures, interval=2), net=seeded(noisy_net), steps=steps, compile=True)
        counts.append(len(graphs))
    assert 0 < counts[0] == counts[1] == counts[2]


@pytest.mark.parametrize("call", ["the model", "its parts"])
def test_whatever_a_loss_function_calls_is_compiled(graphs: list[int], call: str) -> None:
    net, x = seeded(plain_net), torch.ones(2, 6)
    plain = net(x)
    torch._dynamo.reset()
    with compiled(net, True, lambda: None):
        logits = net(x) if call == "the model" else net.heads["tgt"](net.body(x))
        assert len(graphs) == (1 if call == "the model" else 2)
    assert torch.equal(logits, plain)


def test_hooks_run_and_pickles_and_copies_are_plain() -> None:
    net, called = seeded(plain_net), list[int]()
    handle = net.register_forward_hook(lambda *_: called.append(1))
    install(net, EAGER)
    net(torch.ones(2, 6))
    handle.remove()
    assert called
    for twin in (pickle.loads(pickle.dumps(net)), copy.deepcopy(net)):
        assert twin._compiled_call_impl is None
        assert_same_bits(net, twin)


class Odd(nn.Module):
    """Has a shape of its own for every call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, WIDTH)

    def forward(self, x: Any) -> Any:
        return torch.tanh(self.layer(x))


def test_many_batch_sizes_never_fall_back_to_uncompiled_code(graphs: list[int]) -> None:
    net = Net(Odd())
    torch._dynamo.reset()
    with compiled(net, True, lambda: None):
        for size in range(2, 12):
            net(torch.ones(size, 6))
    assert len(graphs) == 10  # the default limit of torch is 8; after it, calls would run as they are


def test_operations_of_a_compiled_model_are_counted_as_before(graphs: list[int]) -> None:
    net, inputs = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(3, WIDTH)
    expected = 3 * (WIDTH * 8 + 8 * 2)
    assert count_operations(net, lambda: net(inputs)) == expected
    with compiled(net, True, lambda: net(inputs)):
        assert len(graphs) > 0
        assert count_operations(net, lambda: net(inputs)) == expected
        assert net._compiled_call_impl is not None


def test_gradient_methods_may_pass_backward_several_times() -> None:
    algorithm = fm.Joint(dict.fromkeys(TASKS, 1.0), method=PCGrad())
    assert_close(
        fit(algorithm, net=lambda: seeded(plain_net), compile=EAGER),
        fit(algorithm, net=lambda: seeded(plain_net)),
        rtol=1e-3,
        atol=1e-4,
    )


def test_channels_last_weights_are_compiled_as_such(graphs: list[int]) -> None:
    run = fit(net=lambda: seeded(wide_net), compile=True)
    assert graphs
    assert run.settings["training"]["channels_last"] is True
    assert_same_bits(run, fit(net=lambda: seeded(wide_net)))


def test_interrupted_and_resumed_in_workers_a_compiled_run_has_the_same_bits(tmp_path: Path) -> None:
    algorithm = fm.ForkMerge("mixed", interval=4)
    whole = fit(algorithm, net=noisy_net, compile=EAGER)

    def stop(event: Any) -> None:
        if isinstance(event, RoundFinished):
            raise KeyboardInterrupt

    options: dict[str, Any] = {"net": noisy_net, "folder": tmp_path / "run"}
    with pytest.raises(KeyboardInterrupt):
        fit(algorithm, **options, compile=EAGER, on_event=stop)
    torch._dynamo.reset()
    again = fit(algorithm, **options, compile=EAGER, resume=True, workers=2)
    assert_same_run(whole, again)
    with pytest.raises(fm.StoreError, match=r"training\.compile was 'aot_eager' and is False now"):
        fit(algorithm, **options, resume=True)


def no_compiler(graph: Any, inputs: Any) -> Callable[..., Any]:
    raise RuntimeError("no C++ compiler found\nand many more lines")


def test_a_model_that_cannot_be_compiled_says_so_before_training(tmp_path: Path, monkeypatch: Any) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(torch_compile, "backend_of", lambda how: no_compiler)
    net = seeded(plain_net)
    message = r"cannot be compiled with compile=True: .*no C\+\+ compiler found\. Leave compile out"
    with pytest.raises(fm.ProblemError, match=message):
        fit(net=net, compile=True, folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert net._compiled_call_impl is None


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("inducter", "unknown backend 'inducter'. Did you mean 'inductor'?"),
        ("cudagraphs", "remembers where weights are"),
    ],
)
def test_backends_that_cannot_serve_are_refused(how: str, message: str) -> None:
    with pytest.raises(fm.ProblemError) as info:
        fm.Training(SGD, compile=how)
    assert message in str(info.value)


@pytest.mark.skipif(shutil.which("g++") is None, reason="generated code needs a C++ compiler, g++")
def test_generated_code_trains_the_same_model() -> None:
    algorithm = fm.SingleTask()
    runs = [fit(algorithm, shared_problem(), lambda: seeded(plain_net), steps=4, compile=how) for how in (True, False)]
    assert_close(*runs, rtol=1e-3, atol=1e-4)
