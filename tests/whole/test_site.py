"""The pages are a site without broken links, its reference has every public name, and its notebooks run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jupytext
import nbclient
import pytest
import yaml

import forkmerge
from paths import ROOT

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.py"))


def build(folder: Path, site: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(site)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_the_site_builds_without_a_broken_link_and_its_reference_has_every_public_name(tmp_path: Path) -> None:
    """One test, for building takes seconds."""
    built = build(ROOT, tmp_path)
    assert built.returncode == 0, built.stderr
    reference = (tmp_path / "reference" / "forkmerge.html").read_text("utf-8")
    names = set(forkmerge.__all__) - {"__version__"}
    assert not [name for name in sorted(names) if f'id="forkmerge.{name}"' not in reference]
    # mkdocs looks at pages; this looks at what is there, programs and records included.
    texts = {path: path.read_text("utf-8") for path in tmp_path.rglob("*.html") if path.name != "404.html"}
    links = [(path, link) for path, text in texts.items() for link in re.findall(r'(?:href|src)="([^"#:]+)["#]', text)]
    assert len(links) > 500
    assert not [f"{path.name}: {link}" for path, link in links if not (path.parent / link).exists()]
    elsewhere = r'<(?:script|img)[^>]+src="https?:|<link[^>]+rel="stylesheet"[^>]+href="https?:'
    assert not [path.name for path, text in texts.items() if re.search(elsewhere, text)]  # nothing is fetched


def test_broken_links_anchors_and_pages_that_no_group_has_end_the_build(tmp_path: Path) -> None:
    """With the settings and the hooks of the real one, in a folder that looks like a clone."""
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))
    (tmp_path / "docs").mkdir()
    shutil.copy2(ROOT / "docs" / "site.py", tmp_path / "docs")
    for name in ("README", "CONTRIBUTING", "SECURITY", "CHANGELOG"):
        (tmp_path / f"{name}.md").write_text("# A\n")
    (tmp_path / "docs" / "a.md").write_text("# A\n[b](no.md) [c](../README.md#no) [d](../src/no.py)\n")
    (tmp_path / "docs" / "b.md").write_text("# B\n")
    pages = ["index.md", "contributing.md", "security.md", "changelog.md", "a.md"]
    config.update(nav=pages, plugins=[], theme={"name": "mkdocs"})
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(config))
    hook = (tmp_path / "docs" / "site.py").read_text("utf-8")
    (tmp_path / "docs" / "site.py").write_text(
        re.sub(r"^REFERENCE = \{.*?^\}", "REFERENCE = {}", hook, flags=re.M | re.S)
    )
    built = build(tmp_path, tmp_path / "site")
    assert built.returncode == 1
    for said in ("'no.md'", "'#no'|anchor '#no'", "'../src/no.py'", "b.md"):
        assert re.search(said, built.stderr), (said, built.stderr)


def test_pages_are_in_four_groups() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))
    assert [name for group in config["nav"] for name in group] == ["Start", "Use", "Understand", "Reference"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run_in_a_kernel(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("PYTHONWARNINGS", "ignore:IProgress not found")  # tqdm's, of a Jupyter without widgets
    notebook = jupytext.read(path)
    nbclient.NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    shown = [output["data"] for output in outputs if output["output_type"] == "execute_result"]
    assert any("text/html" in data for data in shown)
    assert not [output for output in outputs if output.get("name") == "stderr"]
    text = "".join(data["text/plain"] for data in shown)
    assert re.search("better than|worse than|no difference|the mixture gains", text), text
