"""Changes the package one expression at a time and counts how many of the changes its tests notice (mutation testing).

    .venv/bin/pip install -c constraints.txt mutmut==3.8.1   # not in the `dev` extra: it brings a compiled parser along
    .venv/bin/python tests/mutants.py                        # 150 mutants of each package; writes docs/mutants.md
    .venv/bin/python tests/mutants.py engine/storage --all   # every mutant of one package; only prints

The sample is drawn with a fixed seed from all mutants that mutmut makes of a package, so that the same sources give the
same sample. For each mutant mutmut runs those tests at the package's path that call the changed function, one mutant at
a time. A reason that docs/mutants.md gives for a survivor is kept as long as the mutant is drawn and survives.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "mutants.md"
# What is mutated, and the tests at its path.
PACKAGES = {
    "engine/merging": "tests/engine/merging",
    "engine/storage": "tests/engine/storage",
    "methods/solvers": "tests/methods/solvers",
    "experiments/paired_statistics": "tests/experiments/test_paired_statistics.py",
}
SAMPLE, SEED, GOAL = 150, 14, 0.9
NOT_EXPLAINED = "**Not explained yet.**"
# A mutant is given up after (what its tests take + constant) × multiplier seconds, and counts as killed: it loops.
SETTINGS = """
[tool.mutmut]
source_paths = ["src"]
only_mutate = ["src/forkmerge/{package}.py", "src/forkmerge/{package}/*"]
pytest_add_cli_args_test_selection = ["{tests}"]
pytest_add_cli_args = ["-n", "0", "-p", "no:cacheprovider"]
process_isolation = "forkserver" # torch is imported once; the tests of each mutant run in a fork of that process
timeout_constant = 3.0
timeout_multiplier = 6.0
"""
INTRODUCTION = f"""# Mutants: changes of the code that the tests do not notice

A test suite that runs every line need not check what the lines do. So a tool changes the code, one expression at a
time (`<` becomes `<=`, an argument `None`, `+` becomes `-`, a text another text), and the tests have to fail. This page
lists the changes, *mutants*, that they let pass, and why. It is written by

```text
.venv/bin/pip install -c constraints.txt mutmut==3.8.1
.venv/bin/python tests/mutants.py
```

which draws {SAMPLE} mutants of each package below with a fixed seed and runs, for each, the tests at the package's path
that call the changed function. [mutmut](https://mutmut.readthedocs.io) changes undecorated functions and methods, not
constants of a module. A mutant that does not come to an end counts as killed. At least {GOAL:.0%} have to be killed.
"""


def list_mutants(package: str, folder: Path) -> list[str]:
    """Copy into `folder` what mutmut needs, its settings included, and return the names of the package's mutants."""
    for name in ("src", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    settings = SETTINGS.format(package=package, tests=PACKAGES[package])
    (folder / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text() + settings)
    (folder / "mutants/src").mkdir(parents=True)  # Python would take it for absent for good if it came after its start
    os.chdir(folder)
    try:
        from mutmut.configuration import reset_config
        from mutmut.mutation.file_mutation import mutate_file_contents
        from mutmut.utils.file_utils import walk_mutatable_files
        from mutmut.utils.format_utils import get_mutant_name
    except ImportError:
        sys.exit("mutmut is missing: .venv/bin/pip install -c constraints.txt mutmut==3.8.1")
    reset_config()
    return [
        get_mutant_name(path, name)
        for path in sorted(walk_mutatable_files())
        for name in mutate_file_contents(str(path), path.read_text()).mutant_names
    ]


def run_tests(folder: Path, names: list[str]) -> dict[str, str]:
    """Run the tests against each of the mutants, one after another, and return what became of it."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder / "mutants/src")}
    command = [sys.executable, "-c", "from mutmut.__main__ import cli; cli()"]
    log = folder / "log.txt"
    with log.open("w") as file:
        run = subprocess.run(
            [*command, "run", "--max-children", "1", *names], env=environment, stdout=file, stderr=file
        )
    if run.returncode:
        lines = [line for line in log.read_text().splitlines() if not re.match(r"[⠀-⣿]", line)]  # without its spinner
        sys.exit("mutmut failed; this is the end of what it printed:\n" + "\n".join(lines[-40:]))
    results = subprocess.run(
        [*command, "results", "--all", "true"], env=environment, capture_output=True, text=True, check=True
    )
    states = dict(line.strip().rsplit(": ", 1) for line in results.stdout.splitlines() if ": " in line)
    return {name: states[name] for name in names}


def describe(name: str) -> str:
    """Return one line of Markdown for a mutant: file, function, what is changed into what."""
    from mutmut.mutation.diff_apply import find_mutant, get_diff_for_mutant

    path = find_mutant(name).path
    diff = get_diff_for_mutant(name, path=path).splitlines()
    before, after = (
        " ".join(line[1:].strip() for line in diff if line.startswith(sign) and not line.startswith(3 * sign))
        for sign in "-+"
    )
    function = re.sub("^x_?", "", name.rpartition("__mutmut_")[0].rpartition(".")[2]).strip("ǁ").replace("ǁ", ".")
    quote = "``" if "`" in before + after else "`"
    changed = f"{quote}{before}{quote} → {quote}{after}{quote}"
    return f"`{path.relative_to('src/forkmerge')}`, `{function}`: {changed}"


def read_page() -> tuple[dict[str, str], dict[str, str]]:
    """Return the sections of the page by package, and its reasons by mutant."""
    text = PAGE.read_text() if PAGE.exists() else ""
    sections = dict(re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    return sections, dict(re.findall(r"^- (.*)\n  (.*)$", text, re.MULTILINE))


def mutate(package: str, every: bool, reasons: dict[str, str]) -> tuple[str, float]:
    """Return the section of the page about `package`, and the share of its mutants that are killed."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        names = list_mutants(package, Path(folder))
        drawn = names if every else sorted(random.Random(SEED).sample(names, min(SAMPLE, len(names))), key=names.index)
        states = run_tests(Path(folder), drawn)
        alive = [describe(name) for name in drawn if states[name] not in ("killed", "timeout")]
        os.chdir(ROOT)
    share = 1 - len(alive) / len(drawn)
    killed = f"{len(drawn) - len(alive)} of {len(drawn)} mutants are killed ({share:.1%})"
    late = list(states.values()).count("timeout")
    section = f"\n{killed}, {late} of them by the time limit; {len(names)} exist. The others:\n\n"
    return section + "".join(f"- {line}\n  {reasons.get(line, NOT_EXPLAINED)}\n" for line in alive), share


def main() -> None:
    """Mutate the packages of the command line, or all, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", nargs="*", help=f"one or more of {', '.join(PACKAGES)}; without any, all of them")
    parser.add_argument("--all", action="store_true", help="every mutant instead of a sample; writes nothing")
    options = parser.parse_args()
    if unknown := set(options.package) - set(PACKAGES):
        parser.error(f"{', '.join(sorted(unknown))}: expected {', '.join(PACKAGES)}")
    sections, reasons = read_page()
    shares = {}
    for package in options.package or PACKAGES:
        sections[package], shares[package] = mutate(package, options.all, reasons)
        print(f"## {package}\n{sections[package]}", flush=True)
        if not options.all:
            texts = [f"\n## {name}\n{sections[name].rstrip()}\n" for name in PACKAGES if name in sections]
            PAGE.write_text(INTRODUCTION + "".join(texts))
    if any(share < GOAL for share in shares.values()):
        sys.exit(f"fewer than {GOAL:.0%} are killed.")


if __name__ == "__main__":
    main()
