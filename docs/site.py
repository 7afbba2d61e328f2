"""What the site has besides docs/*.md: pages of the root folder, notebooks, the API, and files that pages link to.

mkdocs calls `on_files` and `on_page_markdown`. Links are written for a clone, where they lead to files; here they are
turned to where these are on the site. One that leads nowhere stays as it is, and mkdocs, being strict, ends.
"""

import os
import re
from pathlib import Path

import jupytext
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
}
"""Pages of the root folder, and what they are called on the site."""
REFERENCE = {
    "forkmerge": ["forkmerge"],
    "methods": ["forkmerge.methods"],
    "models": ["forkmerge.models"],
    "integrations": [f"forkmerge.integrations.{name}" for name in ("lightning", "loggers", "lora")],
    "testing": ["forkmerge.testing"],
}
"""Which modules a page of the API has."""
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
FENCE = re.compile(r"(^```.*?^```)", flags=re.M | re.S)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add pages that are not in docs, and files that pages link to."""
    for name, place in PAGES.items():
        files.append(File.generated(config, place, content=(ROOT / name).read_text("utf-8")))
    for path in sorted((ROOT / "docs" / "notebooks").glob("*.py")):
        text = jupytext.writes(jupytext.read(path), fmt="md")
        text = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.S)  # its metadata
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=text))
    for name, modules in REFERENCE.items():
        text = "\n\n".join(f"::: {module}\n    options:\n      heading_level: 2" for module in modules)
        files.append(File.generated(config, f"reference/{name}.md", content=f"# API: {name}\n\n{text}\n"))
    for path in sorted({path for page in files.documentation_pages() for path in _files_linked_from(page)}):
        place = _place(path)
        if files.get_file_from_path(place) is None:
            files.append(_outside(path, place, config))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links to files into links to where these are on the site."""
    folder = _source(page.file.src_uri).parent

    def turned(match: re.Match[str]) -> str:
        before, link, anchor, after = match.groups()
        path = _target(folder, link)
        if path is None:
            return match[0]
        link = os.path.relpath(_place(path), os.path.dirname(page.file.src_uri) or ".")
        return f"{before}{link}{anchor or ''}{after}"

    parts = FENCE.split(markdown)
    return "".join(part if part.startswith("```") else LINK.sub(turned, part) for part in parts)


def _source(place: str) -> Path:
    """Return where a page of the site is from."""
    root = {page: name for name, page in PAGES.items()}
    return ROOT / root[place] if place in root else ROOT / "docs" / place


def _target(folder: Path, link: str) -> Path | None:
    """Return which file or folder of the repository a link leads to, if any."""
    path = (folder / link).resolve()
    return path if ":" not in link and path.is_relative_to(ROOT) and path.exists() else None


def _place(path: Path) -> str:
    """Return where a file or folder of the repository is on the site."""
    name = path.relative_to(ROOT).as_posix()
    if name in PAGES:
        return PAGES[name]
    if name.startswith("docs/"):
        place = name.removeprefix("docs/")
        return place.removesuffix(".py") + ".md" if place.startswith("notebooks/") else place
    as_page = path.is_dir() or name.startswith("examples/")
    return f"repository/{name}.md" if as_page else f"repository/{name}"


def _files_linked_from(page: File) -> set[Path]:
    """Return the files and folders of the repository, outside of docs, that a page links to."""
    folder = _source(page.src_uri).parent
    parts = FENCE.split(page.content_string)
    found = [_target(folder, link[1]) for part in parts if not part.startswith("```") for link in LINK.findall(part)]
    return {path for path in found if path is not None and not path.is_relative_to(ROOT / "docs")}


def _outside(path: Path, place: str, config: MkDocsConfig) -> File:
    """Return a file as it is; a program, or a folder of them, as a page."""
    if not place.endswith(".md"):
        return File.generated(config, place, abs_src_path=str(path))
    programs = sorted(path.glob("*.py")) if path.is_dir() else [path]
    text = "\n\n".join(f"## {each.name}\n\n```python\n{each.read_text('utf-8')}```" for each in programs)
    title = path.relative_to(ROOT).as_posix()
    return File.generated(config, place, content=f"# {title}\n\n{text}\n", inclusion=InclusionLevel.NOT_IN_NAV)
