"""The suite of `./run faults`, itself: what it calls survived, what it writes, and one try of each cheap kind."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from paths import ROOT

FAULTS = ROOT / "faults"
PAGE, RESULTS = ROOT / "docs" / "reliability.md", FAULTS / "results.json"


@pytest.fixture(scope="module", autouse=True)
def path() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FAULTS))
        yield
        for name in ("cases", "disturbed_run", "page", "processes", "ray_nodes", "suite"):
            sys.modules.pop(name, None)


def test_other_bits_tracebacks_and_hangs_are_failures(tmp_path: Path) -> None:
    from processes import End
    from suite import Suite

    suite = Suite(tmp_path, "right", {})
    ends = {
        "right": End("right", "", is_refusal=False, events=3),
        "refused": End("", "StoreError: damaged", is_refusal=True, events=3),
        "wrong": End("other", "", is_refusal=False, events=3),
        "traceback": End("", "KeyError", is_refusal=False, events=3),
    }
    judged = {name: suite.judged("bit flipped", "serial", end, may_refuse=True) for name, end in ends.items()}
    assert {name: (each.survived, each.same_bits) for name, each in judged.items()} == {
        "right": (True, True),
        "refused": (True, False),
        "wrong": (False, False),
        "traceback": (False, False),
    }
    assert not suite.judged("driver killed", "serial", ends["refused"]).survived
    assert not suite.judged("driver killed", "serial", ends["right"], "workers [3] live on").survived


def test_a_folder_with_a_flipped_bit_is_judged_by_its_resume(tmp_path: Path) -> None:
    from cases import DAMAGES, _resumed
    from disturbed_run import train
    from suite import Suite

    expected = train(tmp_path / "whole" / "run")
    path = tmp_path / "whole" / "run" / "model.safetensors"
    path.write_bytes(DAMAGES["bit flipped"](bytearray(path.read_bytes()), random.Random(0)))
    damaged = _resumed(Suite(tmp_path, expected, {}), "bit flipped", "serial", tmp_path / "whole" / "run")
    assert (damaged.survived, damaged.same_bits) == (True, False)
    assert "is damaged: model.safetensors" in damaged.message
    wrong = _resumed(Suite(tmp_path, "other bits", {}), "bit flipped", "serial", tmp_path / "new" / "run")
    assert not wrong.survived


def test_a_disk_that_is_found_too_small_before_training_is_named_as_one_that_is_full_is() -> None:
    from cases import disk_message

    full, small = (
        "StoreError: cannot write a: No space left on device.",
        "StoreError: a will need 2 MB: 1 are free there",
    )
    assert disk_message(["KeyError: 'x'", small]) == small
    assert disk_message([full]) == full
    assert disk_message(["KeyError: 'x'"]) == ""


def test_moments_are_the_same_in_every_run_of_the_suite(tmp_path: Path) -> None:
    from suite import Suite

    drawn = [[d.random() for d in Suite(tmp_path, "", {}, seed=1).draws("driver killed", 3)] for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) == 3
    assert len(list(Suite(tmp_path, "", {}, share=0.1).draws("driver killed", 20))) == 2


def test_a_full_run_has_the_kills_that_the_page_promises() -> None:
    from cases import PLAN

    kills = [(executor, tries) for function, executor, tries in PLAN if function.__name__.startswith("kill")]
    assert sum(tries for executor, tries in kills if executor != "ray") >= 50
    assert sum(tries for executor, tries in kills if executor == "ray") >= 15
    assert {function.__name__ for function, executor, _ in PLAN if executor == "ray"} >= {
        "kill_driver",
        "kill_worker",
        "kill_node",
        "stop_worker",
    }


def test_the_page_counts_and_puts_failures_first() -> None:
    from page import render

    tries = [
        {"fault": "worker killed", "executor": "processes", "survived": True, "same_bits": True, "message": ""},
        {"fault": "worker killed", "executor": "processes", "survived": False, "same_bits": False, "message": "a|b"},
        {
            "fault": "bit flipped",
            "executor": "serial",
            "survived": True,
            "same_bits": False,
            "message": f"StoreError: /tmp/x/3/run/checkpoints/00000012: its sha256 is {'0a' * 32}",
        },
    ]
    facts = {"minutes": 3.2, "cores": 2, "versions": "torch", "not_run": "more than one machine"}
    page = render({"seed": 0, "tries": tries, "facts": facts})
    assert "| worker killed | processes | 2 | 1 | 1 | **failed:** a\\|b |" in page
    assert "| bit flipped | serial | 1 | 1 | 0 | StoreError: RUN/checkpoints/N: its sha256 is … |" in page
    assert "3 tries, 2 of them kills. Seed 0, 3 minutes" in page


def test_the_page_is_that_of_the_results() -> None:
    from page import render

    assert PAGE.exists() == RESULTS.exists()
    if RESULTS.exists():
        assert PAGE.read_text("utf-8") == render(json.loads(RESULTS.read_text("utf-8")))
