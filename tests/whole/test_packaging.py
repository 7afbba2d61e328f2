"""What a clone and an installation promise: light import, typed wheel, one version, tested pins and matrix, `./run`."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from importlib.metadata import distributions, packages_distributions, requires
from pathlib import Path

import pytest
import yaml
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import forkmerge
from paths import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PACKAGE = ROOT / "src" / "forkmerge"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
HEAVY = {"torchjd", "torchmetrics", "plotly", "matplotlib", "sklearn"}
MAX_FILE_LINES = 350
MAX_BODY_LINES = 45


def test_importing_the_package_loads_no_heavy_library():
    code = "import sys, forkmerge; print(*{name.partition('.')[0] for name in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert "forkmerge" in loaded.split()
    assert not HEAVY & set(loaded.split())


def test_an_extra_installs_only_what_the_code_reads():
    text = "".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    modules = {
        "mlflow-skinny": "mlflow",
        "pillow": "PIL",
        "scikit-learn": "sklearn",
        "tensorboard": "torch.utils.tensorboard",  # which needs it
    }
    extras = PYPROJECT["project"]["optional-dependencies"]
    of_the_package = {extra: names for extra, names in extras.items() if extra not in ("dev", "docs")}
    for requirement in {requirement for names in of_the_package.values() for requirement in names}:
        name = re.split("[<>=!~]", requirement)[0]
        module = modules.get(name, name)
        assert re.search(rf"^\s*(import|from) {module}\b|\(\"{module}\"\)", text, flags=re.MULTILINE), name


def test_the_version_is_the_same_everywhere():
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    cited = re.search(r"^version: (\S+)$", citation, flags=re.MULTILINE)
    assert cited is not None
    assert forkmerge.__version__ == PYPROJECT["project"]["version"] == cited[1]
    assert f"## [{forkmerge.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Iterator[tuple[zipfile.ZipFile, tarfile.TarFile]]:
    """The wheel and the sdist."""
    from hatchling.builders.sdist import SdistBuilder
    from hatchling.builders.wheel import WheelBuilder

    folder = str(tmp_path_factory.mktemp("dist"))
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=folder, versions=["standard"])
    (sdist,) = SdistBuilder(str(ROOT)).build(directory=folder, versions=["standard"])
    with zipfile.ZipFile(wheel) as zipped, tarfile.open(sdist) as tarred:
        yield zipped, tarred


def test_the_wheel_ships_every_module_the_type_marker_the_licence_and_the_command(built):
    wheel, _ = built
    names = set(wheel.namelist())
    (entry_points,) = (wheel.read(name).decode() for name in names if name.endswith("entry_points.txt"))
    files = {path.relative_to(PACKAGE.parent).as_posix() for path in PACKAGE.rglob("*.*") if path.suffix != ".pyc"}
    assert {"forkmerge/py.typed", "forkmerge/report/page.html"} < files <= names
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    assert "forkmerge = forkmerge.cli:main" in entry_points


def _installed_with(requirement: str) -> set[str]:
    """The packages that pip would install for a requirement, the package itself included."""
    packages: set[str] = set()
    waiting = [Requirement(requirement)]
    while waiting:
        wanted = waiting.pop()
        if str(wanted) in packages:
            continue
        packages.add(str(wanted))
        further = [Requirement(text) for text in requires(wanted.name) or ()]
        for extra in ("", *wanted.extras):
            waiting += [each for each in further if each.marker is None or each.marker.evaluate({"extra": extra})]
    return {canonicalize_name(Requirement(text).name) for text in packages}


def test_the_wheel_alone_runs_the_demo_from_an_empty_folder_with_no_package_but_those_of_its_extra(built, tmp_path):
    wheel, _ = built
    wheel.extractall(tmp_path / "wheel")
    (tmp_path / "empty").mkdir()
    needed = _installed_with("forkmerge[demo]")
    assert {"torch", "mlxtend", "scipy"} < needed
    owners = {name: {canonicalize_name(owner) for owner in of} for name, of in packages_distributions().items()}
    absent = [name for name, of in owners.items() if not of & (needed | {"setuptools", "pip"})]
    assert {"pytest", "plotly", "transformers"} < set(absent)
    code = "import sys; sys.modules.update(dict.fromkeys(sys.argv[1:])); from forkmerge.cli import demo; "
    code += "demo.run_demo(seeds=1, workers=1, steps=8); print(demo.__file__)"
    ran = subprocess.run(
        [sys.executable, "-c", code, *absent],
        cwd=tmp_path / "empty",
        env={**os.environ, "PYTHONPATH": str(tmp_path / "wheel"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == str(tmp_path / "wheel" / "forkmerge" / "cli" / "demo.py")
    assert (tmp_path / "empty" / "runs" / "demo" / "coefficients.png").is_file()


def test_the_sdist_holds_what_the_wheel_is_built_from_and_what_tests_it(built):
    wheel, sdist = built
    names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {f"src/{name}" for name in wheel.namelist() if name.startswith("forkmerge/")} <= names
    assert {"pyproject.toml", "README.md", "LICENSE", "SECURITY.md", "run", "constraints.txt"} <= names
    assert "tests/whole/test_packaging.py" in names


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_the_metadata_is_valid_and_the_readme_is_its_description(built, kind):
    wheel, sdist = built
    if kind == "wheel":
        (text,) = (wheel.read(name) for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    else:
        text = sdist.extractfile(f"forkmerge-{forkmerge.__version__}/PKG-INFO").read()
    metadata = Metadata.from_email(text, validate=True)  # raises for a field that is unknown, or not as it must be
    assert metadata.description_content_type == "text/markdown"  # anything else would be rendered as reStructuredText
    assert metadata.description == (ROOT / "README.md").read_text(encoding="utf-8")
    assert metadata.license_expression == "MIT"
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["preferred-citation"]
    (preprint,) = (each["value"].removeprefix("arXiv:") for each in citation["identifiers"])
    assert metadata.project_urls["Paper"] == f"https://arxiv.org/abs/{preprint}"


def test_twine_finds_nothing_wrong(built):
    paths = [built[0].filename, built[1].name]
    checked = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", *paths], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout
    assert checked.stdout.count("PASSED") == 2


def test_the_classifiers_exist():
    trove_classifiers = pytest.importorskip("trove_classifiers")  # hatchling brings it along
    assert set(PYPROJECT["project"]["classifiers"]) <= trove_classifiers.classifiers


def test_the_workflow_tries_every_python_of_the_classifiers_and_the_newest_and_oldest_torch():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8"))
    (job,) = workflow["jobs"].values()
    matrix = job["strategy"]["matrix"]
    classifiers = "\n".join(PYPROJECT["project"]["classifiers"])
    pythons = re.findall(r"^Programming Language :: Python :: (3\.\d+)$", classifiers, flags=re.MULTILINE)
    assert matrix["python"] == pythons
    assert PYPROJECT["project"]["requires-python"] == f">={pythons[0]}"
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert [f"torch=={version}" for version in matrix["torch"]] == re.findall(r"^torch==.*$", constraints, flags=re.M)
    (oldest,) = matrix["include"]
    (torch,) = (text for text in PYPROJECT["project"]["dependencies"] if Requirement(text).name == "torch")
    assert torch == f"torch>={oldest['torch'].removesuffix('.0')}"
    assert job["steps"][-1]["run"] == "./run test"


def test_the_workflow_pins_the_oldest_torch_where_the_suite_reads_it(tmp_path):
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8"))
    (job,) = workflow["jobs"].values()
    (oldest,) = job["strategy"]["matrix"]["include"]
    (step,) = (step for step in job["steps"] if step.get("if") == "${{ matrix.oldest }}")
    shutil.copy2(ROOT / "constraints.txt", tmp_path)
    command = step["run"].replace("${{ matrix.torch }}", oldest["torch"])
    subprocess.run(["bash", "-ec", command], cwd=tmp_path, check=True)
    changed = set((tmp_path / "constraints.txt").read_text().splitlines())
    before = set((ROOT / "constraints.txt").read_text().splitlines())
    assert changed - before == {f"torch=={oldest['torch']}"}
    assert {Requirement(line).name for line in before - changed} == {"torch", "sympy"}


def test_everything_the_suite_installs_directly_is_pinned():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"==[\w.]+", str(pin.specifier)) for pin in pins)
    project = PYPROJECT["project"]
    extras = [text for names in project["optional-dependencies"].values() for text in names]
    wanted = [Requirement(text) for text in (*project["dependencies"], *extras)]
    names = {canonicalize_name(item.name) for item in wanted if item.marker is None or item.marker.evaluate()}
    assert names - {"forkmerge"} <= {canonicalize_name(pin.name) for pin in pins}


def test_a_pin_has_a_marker_where_its_release_no_longer_supports_the_oldest_python():
    """As the file says; without it pip finds no solution there, and tries every release of everything first."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    oldest = PYPROJECT["project"]["requires-python"].removeprefix(">=")
    unmarked = [pin.name for pin in pins if pin.marker is None or pin.marker.evaluate({"python_version": oldest})]
    installed = {canonicalize_name(each.name): each.metadata.get("Requires-Python") for each in distributions()}
    ranges = {name: installed.get(canonicalize_name(name)) for name in unmarked}
    assert len([each for each in ranges.values() if each]) > 50
    assert not {name: each for name, each in ranges.items() if each and oldest not in SpecifierSet(each)}


def test_building_the_package_needs_no_torch():
    assert [Requirement(text).name for text in PYPROJECT["build-system"]["requires"]] == ["hatchling"]


def _functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", node


def _body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return (node.end_lineno or 0) - body[0].lineno + 1 if body else 0


def _is_annotated(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    listed = node.args
    arguments = [*listed.posonlyargs, *listed.args, *listed.kwonlyargs, listed.vararg, listed.kwarg]
    missing = [item.arg for item in arguments if item is not None and item.annotation is None]
    return node.returns is not None and not set(missing) - {"self", "cls"}


def test_no_source_file_is_longer_than_350_lines():
    texts = {str(path): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    lengths = {name: len(text.splitlines()) for name, text in texts.items()}
    assert lengths
    assert not {name: length for name, length in lengths.items() if length > MAX_FILE_LINES}


def test_no_function_body_is_longer_than_45_lines():
    assert not [where for where, node in _functions() if _body_lines(node) > MAX_BODY_LINES]


def test_every_function_is_annotated():
    assert not [where for where, node in _functions() if not _is_annotated(node)]


# `./run` is tried with a stand-in for Python, so that these tests install nothing: it notes each `venv` and
# `pip install` it is asked for, the last one with its requirement, and prints the other calls with their folder and
# thread setting.
STAND_IN = r"""#!/usr/bin/env bash
here=$(dirname "$0")
case "$1 $2" in
  "-c "*version_info*) printf '%s %s\n' "$(cat "$here/version")" "$STAND_IN/python" ;;
  "-c "*) [ ! -e "$STAND_IN/no-venv" ] ;;
  "-m venv")
    echo venv >>"$STAND_IN/asked"
    mkdir "$3/bin"
    cp "$STAND_IN/python" "$STAND_IN/version" "$3/bin" ;;
  "-m pip")
    [ "$3" = install ] || exit 0
    echo "pip" >>"$STAND_IN/asked"
    printf '%s\n' "${!#}" >"$STAND_IN/requirement"
    [ ! -e "$STAND_IN/pip-is-slow" ] || sleep 0.5
    [ ! -e "$STAND_IN/pip-is-killed" ] || kill -9 0
    [ ! -e "$STAND_IN/pip-fails" ] || { echo "no matching distribution"; exit 1; }
    printf '#!/usr/bin/env bash\necho "forkmerge|$PWD|$OMP_NUM_THREADS|$*"\n' >"$here/forkmerge"
    chmod +x "$here/forkmerge" ;;
  *) echo "$2|$PWD|$OMP_NUM_THREADS|${*:3}"; [ ! -e "$STAND_IN/$2-fails" ] ;;
esac
"""


class Clone:
    """A copy of what `./run` reads, in a folder with spaces, beside a stand-in for Python."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "a clone with spaces"
        self.stand_in = folder / "stand in"
        self.elsewhere = folder / "else where"
        for made in (self.root, self.stand_in, self.elsewhere):
            made.mkdir()
        for name in ("run", "pyproject.toml", "constraints.txt"):
            shutil.copy2(ROOT / name, self.root / name)
        (self.stand_in / "python").write_text(STAND_IN)
        (self.stand_in / "python").chmod(0o755)
        self.set("version", "3.11.7")

    def set(self, name: str, text: str = "") -> None:
        (self.stand_in / name).write_text(text)

    def unset(self, name: str) -> None:
        (self.stand_in / name).unlink()

    def start(self, *words: str, **environment: str) -> subprocess.Popen[str]:
        kept = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        chosen = {"PYTHON": str(self.stand_in / "python"), "STAND_IN": str(self.stand_in), **environment}
        # A session of its own, so that a stand-in that kills its process group does not end pytest.
        return subprocess.Popen(
            [str(self.root / "run"), *words],
            cwd=self.elsewhere,
            env={**kept, **chosen},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        started = self.start(*words, **environment)
        out, err = started.communicate(timeout=30)
        return subprocess.CompletedProcess(words, started.returncode, out, err)

    def asked(self) -> list[str]:
        """What was installed since the last question."""
        path = self.stand_in / "asked"
        words = path.read_text().split() if path.exists() else []
        path.unlink(missing_ok=True)
        return words

    def extras(self) -> set[str]:
        """What the last `pip install` was to bring along."""
        return set((self.stand_in / "requirement").read_text().strip().removeprefix(".[").removesuffix("]").split(","))


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


@pytest.mark.parametrize("name", ["run", ".ci/run"])
def test_the_scripts_are_executable_and_parse(name):
    assert os.access(ROOT / name, os.X_OK)
    subprocess.run(["bash", "-n", str(ROOT / name)], check=True)


def test_run_installs_once_and_passes_words_on_from_any_folder(clone):
    first = clone.run("show", "my run")
    assert first.stdout == f"forkmerge|{clone.elsewhere}||show my run\n"
    assert "installing into .venv" in first.stderr
    assert clone.asked() == ["venv", "pip"]
    second = clone.run("demo", "--seeds", "2")
    assert (second.stdout, second.stderr) == (f"forkmerge|{clone.elsewhere}||demo --seeds 2\n", "")
    assert clone.asked() == []


def test_run_without_words_explains_itself_and_installs_nothing(clone):
    answer = clone.run()
    assert answer.returncode == 2
    assert "usage: ./run demo" in answer.stderr
    assert not (clone.root / ".venv").exists()


@pytest.mark.parametrize("word", ["demo", "run", "--help"])
def test_run_installs_for_the_command_less_than_for_the_suite(clone, word):
    clone.run(word)
    assert {"demo", "report"} < clone.extras() < set(PYPROJECT["project"]["optional-dependencies"]) - {"dev"}


@pytest.mark.parametrize("word", ["test", "bench", "results", "docs"])
def test_run_adds_what_development_needs_in_place_and_once(clone, word):
    clone.run("demo")
    clone.asked()
    added = clone.run(word)
    assert "adding to .venv" in added.stderr
    assert (clone.asked(), clone.extras()) == (["pip"], {"dev"})
    for again in (word, "demo"):
        assert clone.run(again).returncode == 0
    assert clone.asked() == []


def test_run_installs_everything_at_once_where_the_suite_comes_first(clone):
    assert clone.run("test").returncode == 0
    assert (clone.asked(), clone.extras()) == (["venv", "pip"], {"dev"})
    clone.run("demo")
    assert clone.asked() == []


@pytest.mark.parametrize("trouble", ["pip-is-killed", "pip-fails"])
def test_run_remakes_the_environment_for_every_job_after_an_interrupted_addition(clone, trouble):
    clone.run("demo")
    clone.set(trouble)
    assert clone.run("test").returncode != 0
    clone.unset(trouble)
    clone.asked()
    assert clone.run("demo").returncode == 0
    assert clone.asked() == ["venv", "pip"]
    assert "dev" not in clone.extras()


def test_run_test_installs_again_after_the_command_alone_followed_a_changed_dependency(clone):
    clone.run("test")
    with (clone.root / "constraints.txt").open("a") as file:
        file.write("# changed\n")
    clone.run("demo")
    clone.asked()
    clone.run("test")
    assert (clone.asked(), clone.extras()) == (["pip"], {"dev"})


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_run_installs_again_when_a_dependency_changes(clone, name):
    clone.run("demo")
    clone.asked()
    with (clone.root / name).open("a") as file:
        file.write("# changed\n")
    clone.run("demo")
    assert clone.asked() == ["pip"]


def test_run_installs_again_after_the_folder_moved(clone):
    clone.run("demo")
    clone.asked()
    clone.root = clone.root.rename(clone.root.with_name("moved"))
    assert clone.run("demo").returncode == 0
    assert clone.asked() == ["pip"]


def test_run_keeps_the_interpreter_of_the_environment_unless_another_is_named(clone):
    clone.run("demo")
    clone.asked()
    clone.run("demo", PYTHON="")
    assert clone.asked() == []
    clone.set("version", "3.12.1")
    clone.run("demo")
    assert clone.asked() == ["venv", "pip"]


def test_run_remakes_the_environment_of_a_killed_installation(clone):
    clone.set("pip-is-killed")
    assert clone.run("demo").returncode == -9
    clone.unset("pip-is-killed")
    assert clone.run("demo").returncode == 0
    assert clone.asked() == ["venv", "pip", "venv", "pip"]


def test_run_shows_why_an_installation_failed_and_then_starts_over(clone):
    clone.set("pip-fails")
    failure = clone.run("demo")
    assert failure.returncode == 1
    assert failure.stdout == ""
    assert "no matching distribution" in failure.stderr
    assert "install.log" in failure.stderr
    clone.unset("pip-fails")
    assert clone.run("demo").returncode == 0
    assert clone.asked() == ["venv", "pip", "venv", "pip"]


@pytest.mark.skipif(shutil.which("flock") is None, reason="without flock two first calls are not kept apart")
def test_two_first_calls_at_once_install_once(clone):
    clone.set("pip-is-slow")
    both = [clone.start("demo"), clone.start("demo")]
    answers = [(started.communicate(timeout=30)[0], started.returncode) for started in both]
    assert answers == [(f"forkmerge|{clone.elsewhere}||demo\n", 0)] * 2
    assert clone.asked() == ["venv", "pip"]


@pytest.mark.skipif(shutil.which("flock") is None, reason="without flock two first calls are not kept apart")
def test_first_calls_of_both_levels_at_once_end_with_everything_installed(clone):
    clone.set("pip-is-slow")
    both = [clone.start("demo"), clone.start("test", "-k", "a")]
    for started in both:
        started.communicate(timeout=30)
    assert [started.returncode for started in both] == [0, 0]
    assert clone.asked() in (["venv", "pip"], ["venv", "pip", "pip"])  # whichever came first
    assert clone.extras() == {"dev"}
    for word in ("demo", "test"):
        clone.run(word)
    assert clone.asked() == []


@pytest.mark.parametrize("version", ["2.7.18", "3.9.19"])
def test_run_refuses_an_old_python_by_version(clone, version):
    clone.set("version", version)
    answer = clone.run("demo")
    assert answer.returncode == 1
    assert f"Python {version}" in answer.stderr
    assert "3.10 or newer" in answer.stderr
    assert clone.asked() == []


def test_run_says_what_to_do_without_python_or_venv(clone):
    missing = clone.run("demo", PYTHON="no-such-python")
    assert missing.returncode == 1
    assert "cannot start 'no-such-python'" in missing.stderr
    clone.set("no-venv")
    without = clone.run("demo")
    assert without.returncode == 1
    assert "no venv module" in without.stderr
    assert "python3-venv" in without.stderr
    assert clone.asked() == []


def test_run_test_with_arguments_is_pytest_alone_at_the_root_on_one_thread(clone):
    assert clone.run("test", "-k", "a or b").stdout == f"pytest|{clone.root}|1|-k a or b\n"


def test_run_bench_starts_the_runner_at_the_root(clone):
    assert clone.run("bench", "memory", "--quick").stdout == f"memory|{clone.root}||--quick\n"


def test_run_docs_builds_the_site_at_the_root(clone):
    answer = clone.run("docs", "--clean")
    assert answer.stdout == f"mkdocs|{clone.root}||build --clean\n"
    assert "build/site/index.html" in answer.stderr
    clone.set("mkdocs-fails")
    assert clone.run("docs").returncode != 0


def test_run_test_does_every_check_and_names_those_that_failed(clone):
    answer = clone.run("test")
    called = [line.partition("|")[0] for line in answer.stdout.splitlines()]
    assert called == ["ruff", "ruff", "mypy", "pytest"]
    assert answer.returncode == 0
    clone.set("mypy-fails")
    answer = clone.run("test")
    assert answer.stdout.splitlines()[-1].startswith("pytest|")
    assert answer.returncode == 1
    assert answer.stderr.splitlines()[-1] == "run: failed: mypy"
