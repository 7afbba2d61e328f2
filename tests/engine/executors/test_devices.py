"""Devices: bad names are refused before training, and one device needs no process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import forkmerge as fm
from _asserts import assert_same_bits
from forkmerge.engine.executors import devices as devices_module
from forkmerge.engine.executors.devices import on_own_device, own_index, resolve_workers, set_own_index
from problems import fit


class TestDevices:
    @pytest.mark.parametrize(
        ("devices", "message"),
        [
            ("cuda", r"devices must be a list such as \['cuda:0', 'cuda:1'\], got 'cuda'"),
            ([], "devices must be a list"),
            (["cpu", "gpu:1"], "device 'gpu:1' cannot be used"),
            (["cpu", 1.5], "device '1.5' cannot be used"),
            (["meta"], "device 'meta' cannot be used: it holds no numbers"),
        ],
    )
    def test_bad_names_are_refused_before_training(self, devices: Any, message: str) -> None:
        with pytest.raises(fm.ProblemError, match=message):
            fit(devices=devices, on_event=lambda event: pytest.fail("it has begun"))

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_devices_that_the_machine_lacks_are_refused_before_training(self) -> None:
        with pytest.raises(fm.ProblemError, match="device 'cuda:0' cannot be used"):
            fit(devices=["cuda:0"], on_event=lambda event: pytest.fail("it has begun"))

    def test_devices_of_several_kinds_are_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("forkmerge.engine.executors.devices._device", torch.device)
        with pytest.raises(fm.ProblemError, match=r"of one kind.*got cpu and cuda"):
            fit(devices=["cpu", "cuda:0"])

    def test_one_device_needs_no_process(self) -> None:
        assert_same_bits(fit(devices=["cpu"], workers=1), fit())


def test_there_are_as_many_processes_as_devices_unless_somebody_says() -> None:
    assert [resolve_workers(*each) for each in ((None, None), (None, ["cpu", "cpu"]), (3, ["cpu"]), (2, None))] == [
        1,
        2,
        3,
        2,
    ]


def test_worker_i_of_independent_calls_has_device_i_modulo_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices_module, "_own_index", 0)
    assert on_own_device({"devices": ["cuda:0", "cuda:1"], "seed": 3}) == {"devices": ["cuda:0"], "seed": 3}
    set_own_index(3)
    assert own_index() == 3
    assert on_own_device({"devices": ["cuda:0", "cuda:1"]}) == {"devices": ["cuda:1"]}
    assert on_own_device({"devices": None, "seed": 3}) == {"devices": None, "seed": 3}
