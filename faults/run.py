"""Kills, stops, fills, truncates and flips what a run is made of, and writes docs/reliability.md.

    ./run faults [NAME ...] [--on ray] [--share 0.1] [--seed 0]

Names are those of the functions in cases.py; with names, --on or a share below 1 the page is printed and not written.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import torch
from cases import PLAN, all_tries
from page import render
from processes import WORKERS
from suite import Try

HERE = Path(__file__).parent
MOST_MINUTES = 40
RAY = f"Ray {version('ray')}"
RESULTS, PAGE = HERE / "results.json", HERE.parent / "docs" / "reliability.md"


def main(argv: list[str] | None = None) -> int:
    known = sorted({function.__name__ for function, _, _ in PLAN})
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(known)}; all where none is given")
    parser.add_argument("--share", type=float, default=1.0, help="of the tries of a full run, at least one of each")
    parser.add_argument("--on", nargs="+", choices=list(WORKERS), default=list(WORKERS), help="where branches run")
    parser.add_argument("--seed", type=int, default=0, help="of all random moments")
    options = parser.parse_args(argv)
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"there is no fault {unknown[0]!r}; these exist: {', '.join(known)}")
    started, tries = time.monotonic(), []
    for each in all_tries(options.seed, options.share, options.names, options.on):
        tries.append(each)
        say(each, len(tries))
        if time.monotonic() - started > 60 * MOST_MINUTES:
            raise SystemExit(f"stopped after {MOST_MINUTES} minutes and {len(tries)} tries: it should take less.")
    results = {
        "seed": options.seed,
        "tries": [asdict(each) for each in tries],
        "facts": {
            "minutes": (time.monotonic() - started) / 60,
            "cores": os.cpu_count(),
            "versions": f"Python {platform.python_version()}, torch {torch.__version__}, {RAY}, {platform.system()}",
            "not_run": "more than one machine",
        },
    }
    if options.names or options.share < 1 or set(options.on) != set(WORKERS):
        print(render(results))
    else:
        RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        PAGE.write_text(render(results), encoding="utf-8")
    failed = [each for each in tries if not each.survived]
    print(f"{len(tries)} tries, {len(failed)} failed", file=sys.stderr)
    return 1 if failed else 0


def say(each: Try, count: int) -> None:
    word = "same bits" if each.same_bits and each.survived else "refused" if each.survived else "FAILED"
    print(f"{count:4} {each.fault} ({each.executor}): {word} {each.message[:200]}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
