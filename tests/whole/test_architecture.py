"""The rules of the house, over the syntax trees of the whole package."""

from __future__ import annotations

import ast
import re
from collections import defaultdict

from architecture import (
    LAYERS,
    LEAVES,
    MOST_AT_ROOT,
    MOST_IN_FOLDER,
    PACKAGE,
    PAGE,
    QUESTIONS,
    imports,
    modules,
    render,
    room_of,
)


def test_every_module_is_in_a_room() -> None:
    inside = [module for module in modules() if room_of(module) not in (*LAYERS, *LEAVES)]
    assert inside == ["", "engine"]


def test_imports_point_down() -> None:
    levels = {room: level for level, room in enumerate(LAYERS)}
    wrong = [
        str(each)
        for each in imports()
        if (room := room_of(each.module)) in levels
        and each.source
        and levels.get(room_of(each.source), -1) < levels[room]  # a leaf is above every layer
    ]
    assert not wrong


def test_nobody_inside_imports_the_root_package() -> None:
    assert not [str(each) for each in imports() if not each.source and each.module]


def test_no_private_name_crosses_a_package() -> None:
    wrong = []
    for each in imports():
        path = f"{each.source}/{each.name}".strip("/").split("/")
        private = next((i for i, part in enumerate(path) if part.startswith("_") and not part.startswith("__")), None)
        if private is None or each.source == "_version":
            continue
        is_name = path[private] == each.name  # of a module: its folder is the package
        package = "/".join(path[: private - is_name])
        folder = modules()[each.module].parent.relative_to(PACKAGE).as_posix()
        if folder != package and not folder.startswith(f"{package}/"):
            wrong.append(str(each))
    assert not wrong


def test_a_folder_holds_few_files_and_the_root_few_entries() -> None:
    folders = defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        folders[path.parent].append(path.name)
    assert not {str(folder): len(names) for folder, names in folders.items() if len(names) > MOST_IN_FOLDER}
    ignored = {"__init__.py", "_version.py", "py.typed", "__pycache__"}
    entries = [path.name for path in PACKAGE.iterdir() if path.name not in ignored]
    assert len(entries) <= MOST_AT_ROOT, sorted(entries)


def test_a_class_name_belongs_to_one_class() -> None:
    owners = defaultdict(list)
    for module, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                owners[node.name.lstrip("_")].append(module)
    assert not {name: paths for name, paths in owners.items() if len(paths) > 1}


def test_names_are_nouns() -> None:
    """Names that say nothing of what they hold, wherever something is bound to them."""
    empty = {"found", "known", "given", "place"}
    stored = {("methods/torchjd/adapter", "given")}  # a key in run folders
    wrong = []
    for module, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            is_bound = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            name = node.id if is_bound else node.arg if isinstance(node, ast.arg) else ""
            if name in empty and (module, name) not in stored:
                wrong.append(f"{module}.py:{node.lineno}")
    assert not wrong


def test_every_module_says_in_a_sentence_what_it_owns() -> None:
    assert not [module for module, path in modules().items() if not ast.get_docstring(ast.parse(path.read_text()))]


def test_the_page_is_made_of_the_package() -> None:
    assert PAGE.read_text("utf-8") == render(), "run: .venv/bin/python tests/architecture.py"


def test_questions_share_no_word_with_the_path_they_ask_for() -> None:
    assert len(QUESTIONS) == 20
    for question, path in QUESTIONS:
        assert path in modules(), path
        words = set(re.findall(r"[a-z]+", question.lower()))
        assert not words & (set(re.split(r"[/_]", path)) - {"of"}), (question, path)
