"""`fit`: the model that comes back, and what is refused before anything is trained."""

from __future__ import annotations

import copy

from problems import fit, noisy_net, same_bits, seeded


def test_the_returned_model_is_independent_of_the_run() -> None:
    net = seeded(noisy_net)
    run = fit(net=net)
    assert run.model is net
    assert all(parameter.grad is None for parameter in net.parameters())
    starts = [p.untyped_storage().data_ptr() for p in net.parameters()]
    assert len(set(starts)) == len(starts)


def test_the_given_module_is_trained_and_returned() -> None:
    module = seeded(noisy_net)
    before = copy.deepcopy(module)
    run = fit(net=module)
    assert run.model is module
    assert not same_bits(before, module)
