"""Runs benchmarks, one process each, and makes docs/performance.md and its details of their results.

    ./run bench [NAME ...] [--quick] [OPTIONS OF A BENCHMARK]

Words: `list` names the benchmarks, `page` only makes the page, `page --check` says whether it is up to date.
Without a name all run. Options that this runner does not know go to the benchmark.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from harness import HERE, QUICK, RESULTS, warn_if_busy
from page import DETAILS, ORDER, PAGE, render, summarise

_GUESS, _QUICK_GUESS = 300.0, 20.0  # seconds, where no earlier run tells


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="small versions, into benchmarks/quick")
    parser.add_argument("--check", action="store_true", help="with `page`: write nothing, fail if it is out of date")
    options, extra = parser.parse_known_args(argv)
    if options.names == ["page"]:
        return check_page() if options.check else write_page(RESULTS, PAGE)
    known = available()
    unknown = [name for name in options.names if name not in known]
    if unknown:
        if unknown != ["list"]:
            close = difflib.get_close_matches(unknown[0], known, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            print(f"there is no benchmark {unknown[0]!r}.{hint} These exist:", file=sys.stderr)
        show_list(known)
        return 0 if unknown == ["list"] else 2
    names = options.names or known
    if extra and len(names) != 1:
        print(f"options of a benchmark ({' '.join(extra)}) need its name: ./run bench NAME …", file=sys.stderr)
        return 2
    return run_all(names, extra, quick=options.quick)


def available() -> list[str]:
    """Return the benchmarks that exist."""
    return [name for name in ORDER if (HERE / f"{name}.py").exists()]


def show_list(names: list[str]) -> None:
    """Print what every benchmark answers, and how long it takes."""
    for name in names:
        first = (importlib.import_module(name).__doc__ or "").split("\n\n")[0].replace("\n", " ").strip()
        print(f"  {name:10} {duration(estimate(name, RESULTS, _GUESS)):>8}  {first}")


def run_all(names: list[str], extra: list[str], *, quick: bool) -> int:
    """Run benchmarks one after the other and make the page; a failed one does not stop the others."""
    folder, guess = (QUICK, _QUICK_GUESS) if quick else (RESULTS, _GUESS)
    left = {name: estimate(name, folder, guess) for name in names}
    failed = []
    warn_if_busy()
    for place, name in enumerate(names, start=1):
        total = duration(sum(left.values()))
        say(f"[{place}/{len(names)}] {name}: about {duration(left.pop(name))}; all that is left about {total}")
        started = time.perf_counter()
        words = [sys.executable, str(HERE / f"{name}.py"), *(["--quick"] if quick else []), *extra]
        if subprocess.run(words, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False).returncode:
            failed.append(name)
        say(f"[{place}/{len(names)}] {name}: took {duration(time.perf_counter() - started)}")
    if failed:
        say(f"failed: {', '.join(failed)}")
        return 1
    return write_page(folder, folder / "performance.md" if quick else PAGE)


def estimate(name: str, folder: Path, guess: float) -> float:
    """Return the seconds that the last run took, or a guess."""
    path = folder / f"{name}.json"
    return float(json.loads(path.read_text("utf-8")).get("seconds", guess)) if path.exists() else guess


def duration(seconds: float) -> str:
    """Return a time a person can read."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def write_page(folder: Path, page: Path) -> int:
    """Make the pages of the results in a folder."""
    for path, text in _made(folder, page).items():
        path.write_text(text, "utf-8")
        say(f"wrote {os.path.relpath(path)}")
    return 0


def _made(folder: Path, page: Path) -> dict[Path, str]:
    return {page: summarise(folder), page.with_name(DETAILS): render(folder)}


def check_page() -> int:
    """Say whether the pages are what the results say."""
    stale = 0
    for path, text in _made(RESULTS, PAGE).items():
        written = path.read_text("utf-8") if path.exists() else ""
        difference = list(difflib.unified_diff(written.splitlines(), text.splitlines(), path.name, "results", n=1))
        if difference:
            print("\n".join(difference[:40]))
            say(f"{path.name} is not what the results say: ./run bench page")
            stale = 1
    return stale


def say(text: str) -> None:
    """Print a line of the runner's own."""
    print(f"bench: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
