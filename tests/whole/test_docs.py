"""Every snippet a reader can copy is executed: README, docs, examples and docstrings."""

import doctest
import importlib
import os
import re
import socket
import subprocess
import sys

import pytest
import torch

import forkmerge
from paths import ROOT
from torchrun import torchrun

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]
PAIR = [ROOT / "examples" / "own_loop" / f"{name}.py" for name in ("plain", "with_forkmerge")]
ON_RANKS = ROOT / "examples" / "fsdp.py"
EXAMPLES = [path for path in sorted((ROOT / "examples").rglob("*.py")) if path.name != "setting.py"]
PACKAGE = ROOT / "src" / "forkmerge"
MODULES = {
    ".".join(("forkmerge", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if "templates" not in path.parts
}
WITH_EXAMPLES = [name for name, path in MODULES.items() if ">>> " in path.read_text("utf-8")]


def prose(page):
    return re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.M | re.S)


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)


def pages_with(language):
    return [page for page in PAGES if blocks(page, language)]


@pytest.mark.parametrize(
    "page", [page for page in pages_with("python") if page.stem != "README"], ids=lambda page: page.name
)
def test_python_snippets_of_a_page_run_in_order(page, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    for name, value in rank_alone().items():
        monkeypatch.setenv(name, value)
    namespace = {"__name__": page.stem}
    try:
        for number, block in enumerate(blocks(page, "python")):
            exec(compile(block, f"{page.name}[{number}]", "exec"), namespace)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def rank_alone():
    """What torchrun would tell the only rank of a page that starts ranks."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    return {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "1"}


def test_the_readme_prints_what_it_shows(monkeypatch, tmp_path, capsys):
    """Up to numbers, and to what they decide: processors differ in the last digits."""
    monkeypatch.chdir(tmp_path)
    page = ROOT / "README.md"
    namespace = {"__name__": page.stem}
    for block in blocks(page, "python")[:-1]:
        exec(block, namespace)
    capsys.readouterr()
    exec(blocks(page, "python")[-1], namespace)

    def masked(text):
        text = re.sub(r"^(no difference shown|(better|worse) than single-task training)$", "VERDICT", text, flags=re.M)
        return re.sub(r"[+−-]?\d+(\.\d+)?(e-\d+)?", "N", text).split()

    (shown,) = blocks(page, "text")
    assert masked(capsys.readouterr().out) == masked(shown)


@pytest.mark.parametrize("page", pages_with("toml"), ids=lambda page: page.name)
def test_toml_snippets_of_a_page_have_known_keys_only(page):
    from forkmerge.experiments.compare_options import options_from
    from forkmerge.experiments.compared_methods import compared_methods_from
    from forkmerge.experiments.execution import execution_from
    from forkmerge.experiments.recipe import _KEYS, _TRAINING, tomllib

    for block in blocks(page, "toml"):
        settings = tomllib.loads(block)
        execution_from(settings.pop("execution", {}))
        compared_methods_from(",".join(options_from(settings.pop("compare", {})).methods))
        assert set(settings) <= set(_KEYS)
        assert set(settings.get("training", {})) <= set(_TRAINING)
        forkmerge.experiments.recipe.algorithm_from(settings.get("algorithm", {}), forkmerge.ForkMerge("mixed"))


def test_links_of_pages_lead_somewhere():
    links = [(page, link) for page in PAGES for link in re.findall(r"\w\]\(([^)#\s]+)\)", prose(page))]
    assert links
    files = [(page, link) for page, link in links if not link.startswith("http")]
    assert not [f"{page.name}: {link}" for page, link in files if not (page.parent / link).exists()]


def test_commands_in_the_readme_exist():
    from typer.main import get_command

    from forkmerge.cli.commands import app

    commands = set(get_command(app).commands) | {"test"}
    shown = re.findall(r"^\./run (\S+)", (ROOT / "README.md").read_text("utf-8"), re.M)
    assert shown
    assert set(shown) <= commands


def test_pages_examples_and_recipes_call_the_command_by_one_name():
    """`./run` is for the README, and for what only the repository has: its tests, benchmarks and results."""
    from typer.main import get_command

    from forkmerge.cli.commands import app

    words = "|".join(get_command(app).commands)
    files = [
        path for folder in ("docs", "examples", "recipes") for path in (ROOT / folder).rglob("*") if path.is_file()
    ]
    texts = {path: path.read_text("utf-8") for path in files if path.suffix in (".md", ".py", ".toml")}
    assert len(texts) > 30
    assert not [path.name for path, text in texts.items() if re.search(rf"\./run ({words})\b", text)]
    guide = texts[ROOT / "docs" / "guide.md"]
    assert "`./run …` is the same command" in guide


# Of Lightning, as in pyproject.toml: what torch deprecates of its trees, and a suggestion of workers for loaders.
IGNORED = [
    "ignore:`isinstance(treespec, LeafSpec)` is deprecated:FutureWarning",
    *(f"ignore:The '{kind}_dataloader' does not have many workers" for kind in ("train", "val")),
]


def run_example(example):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error", *(word for each in IGNORED for word in ("-W", each)), example.name],
        cwd=example.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
    return done.stdout


@pytest.mark.parametrize(
    "example", [path for path in EXAMPLES if path not in (*PAIR, ON_RANKS)], ids=lambda path: path.stem
)
def test_examples_run(example):
    run_example(example)


def test_the_example_of_ranks_runs_on_two():
    printed = torchrun(ON_RANKS, [], came_up=lambda output: "round 1" in output)
    assert [line.split(":")[0] for line in printed.splitlines()] == [f"round {index}" for index in range(1, 9)]
    assert "with related" in printed


def test_the_pair_of_loops_runs_and_forkmerge_beats_joint_training():
    plain, merged = (float(run_example(example).split()[-1]) for example in PAIR)
    assert merged > plain + 0.1


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_docstring_examples_hold(name):
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.attempted > 0
    assert result.failed == 0


def test_every_module_can_be_imported():
    for name in MODULES:
        if not name.endswith("__main__"):
            importlib.import_module(name)


def test_every_public_name_has_a_docstring():
    undocumented = [name for name in forkmerge.__all__ if not (getattr(forkmerge, name).__doc__ or "").strip()]
    assert not undocumented
