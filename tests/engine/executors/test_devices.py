"""Devices: bad names are refused before training, and one device needs no process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import forkmerge as fm
from problems import fit, same_bits


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
            fit(devices=devices, observe=lambda event: pytest.fail("it has begun"))

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_devices_that_the_machine_lacks_are_refused_before_training(self) -> None:
        with pytest.raises(fm.ProblemError, match="device 'cuda:0' cannot be used"):
            fit(devices=["cuda:0"], observe=lambda event: pytest.fail("it has begun"))

    def test_devices_of_several_kinds_are_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("forkmerge.engine.executors.devices._device", torch.device)
        with pytest.raises(fm.ProblemError, match=r"of one kind.*got cpu and cuda"):
            fit(devices=["cpu", "cuda:0"])

    def test_one_device_needs_no_process(self) -> None:
        assert same_bits(fit(devices=["cpu"], workers=1), fit())
