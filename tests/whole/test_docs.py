"""Every snippet a reader can copy is executed: README, docs, examples and docstrings."""

import doctest
import importlib
import os
import pkgutil
import re
import subprocess
import sys

import pytest

import forkmerge
from paths import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = [path for path in sorted((ROOT / "examples").rglob("*.py")) if path.name != "setting.py"]
MODULES = [
    info.name for info in pkgutil.walk_packages(forkmerge.__path__, "forkmerge.") if "templates" not in info.name
]


def prose(page):
    return re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.M | re.S)


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_snippets_of_a_page_run_in_order(page, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": page.stem}
    for number, block in enumerate(blocks(page, "python")):
        exec(compile(block, f"{page.name}[{number}]", "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_toml_snippets_of_a_page_have_known_keys_only(page):
    from forkmerge.experiments.compare_options import options_from
    from forkmerge.experiments.compared_methods import compared_methods_from
    from forkmerge.experiments.recipe import _KEYS, _TRAINING, tomllib

    for block in blocks(page, "toml"):
        settings = tomllib.loads(block)
        compared_methods_from(",".join(options_from(settings.pop("compare", {})).methods))
        assert set(settings) <= set(_KEYS)
        assert set(settings.get("training", {})) <= set(_TRAINING)
        forkmerge.experiments.recipe.algorithm_from(settings["algorithm"], forkmerge.ForkMerge())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_a_page_lead_somewhere(page):
    links = re.findall(r"\w\]\(([^)#\s]+)\)", prose(page))
    missing = [link for link in links if not link.startswith("http") and not (page.parent / link).exists()]
    assert not missing


def test_commands_in_the_readme_exist():
    from typer.main import get_command

    from forkmerge.cli.commands import app

    known = set(get_command(app).commands) | {"test"}
    shown = re.findall(r"^\./run (\S+)", (ROOT / "README.md").read_text("utf-8"), re.M)
    assert shown
    assert set(shown) <= known


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_examples_run(example):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error", example.name],
        cwd=example.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_forkmerge_beats_joint_training_in_the_pair_of_loops():
    accuracy = {}
    for name in ("plain", "with_forkmerge"):
        out = subprocess.run(
            [sys.executable, f"{name}.py"],
            cwd=ROOT / "examples" / "own_loop",
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        accuracy[name] = float(out.split()[-1])
    assert accuracy["with_forkmerge"] > accuracy["plain"] + 0.1


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_hold(name):
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0


def test_every_public_name_has_a_docstring():
    undocumented = [name for name in forkmerge.__all__ if not (getattr(forkmerge, name).__doc__ or "").strip()]
    assert not undocumented
