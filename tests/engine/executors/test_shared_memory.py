"""Shared memory, parcels, exact sums and the division of a round: the parts that parallel training is made of."""

from __future__ import annotations

import os
import subprocess
import sys
from multiprocessing import Pipe
from pathlib import Path

import numpy as np
import pytest
import torch

from forkmerge.engine.executors.shared_memory import Memory, Parcel, receive, send


class TestMemory:
    def test_what_one_side_writes_the_other_reads(self) -> None:
        here, there = Pipe()
        rows = [Memory(80) for _ in range(130)]  # more than fit into one system call
        send(here, {"step": 3}, rows)
        value, memories = receive(there)
        assert value == {"step": 3}
        assert [memory.key for memory in memories] == [memory.key for memory in rows]
        rows[129].tensor(torch.float64).fill_(2.5)
        assert memories[129].tensor(torch.float64).tolist() == [2.5] * 10
        send(there, "thanks")
        assert receive(here) == ("thanks", [])

    def test_private_memory_is_changed_for_oneself_only(self) -> None:
        here, there = Pipe()
        memory = Memory(8)
        send(here, None, [memory])
        (private,) = receive(there, private=True)[1]
        private.tensor(torch.uint8).fill_(7)
        assert memory.tensor(torch.uint8).sum() == 0

    def test_systems_without_nameless_files_use_a_name_for_a_moment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr(os, "memfd_create", raising=False)
        here, there = Pipe()
        memory = Memory(8)
        send(here, None, [memory])
        memory.tensor(torch.uint8).fill_(3)
        assert receive(there)[1][0].tensor(torch.uint8).tolist() == [3] * 8
        shm = Path("/dev/shm")
        assert not shm.is_dir() or not list(shm.glob("fm-*"))

    def test_an_end_that_is_gone_is_noticed(self) -> None:
        here, there = Pipe()
        there.close()
        with pytest.raises((EOFError, OSError)):
            receive(here)

    @pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts open files in /proc")
    def test_files_are_closed_with_their_memory_but_tensors_stay_usable(self) -> None:
        before = len(os.listdir("/proc/self/fd"))
        tensor = Memory(1 << 20).tensor(torch.float32)
        tensor.fill_(1.0)
        assert tensor.sum() == 1 << 18
        del tensor
        assert len(os.listdir("/proc/self/fd")) == before


class TestParcel:
    def test_an_object_comes_out_as_it_went_in(self) -> None:
        large, last = torch.randn(300, 300), torch.randn(2, 64, 64, 8).permute(0, 3, 1, 2)
        half, array = torch.randn(40_000).to(torch.bfloat16), np.arange(30_000)
        weight = torch.nn.Parameter(torch.randn(200, 200))
        value = {"large": large, "same": large, "last": last, "half": half, "array": array, "w": weight, "n": [1, "x"]}
        parcel = Parcel(value)
        opened = Parcel.open(parcel.places, parcel.memory)
        assert opened["n"] == [1, "x"]
        assert opened["large"] is opened["same"]
        assert isinstance(opened["w"], torch.nn.Parameter)
        assert opened["last"].stride() == last.stride()
        assert np.array_equal(opened["array"], array)
        for name in ("large", "last", "half", "w"):
            assert torch.equal(opened[name], value[name])
            assert opened[name].dtype == value[name].dtype

    def test_large_tensors_are_read_in_place(self) -> None:
        parcel = Parcel(torch.zeros(1 << 16))
        one, other = (Parcel.open(parcel.places, parcel.memory) for _ in range(2))
        assert one.data_ptr() == other.data_ptr()


@pytest.mark.parametrize("how", ["prompt", "script"])
def test_names_of_a_notebook_or_a_prompt_are_noted(how: str, tmp_path: Path) -> None:
    code = (
        "from forkmerge.engine.executors.shared_memory import Parcel\n"
        "class Net: pass\n"
        "def losses(): pass\n"
        "print(Parcel([Net(), losses, Parcel]).interactive)\n"
    )
    script = tmp_path / "script.py"
    script.write_text(code)
    words = [sys.executable, str(script)] if how == "script" else [sys.executable, "-"]
    done = subprocess.run(words, input=code, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout == ("[]\n" if how == "script" else "['Net', 'losses']\n")
