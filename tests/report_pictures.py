"""Makes the pictures of docs/report.md: a comparison from its committed records, and a run of the demo's problem.

PYTHONPATH=src python tests/report_pictures.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from PIL import Image

from chromium import Chromium
from forkmerge.algorithms.forkmerge import ForkMerge
from forkmerge.datasets.digits import recipe
from forkmerge.experiments.recipe import Recipe
from forkmerge.report import write_report
from paths import ROOT

RECORDS = ROOT / "results" / "cifar10.json"


def main() -> None:
    """Write both pictures."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        comparison = write_report(RECORDS, place / "comparison.html")
        whole = recipe(seed=1)
        changed = {**vars(whole), "steps": 200, "algorithm": ForkMerge("per_auxiliary", interval=40)}
        Recipe(**changed).fit(folder=place / "run")
        run = write_report(place / "run")
        browser = Chromium(place / "profile")
        try:
            shots = {
                "report": (comparison, 900, 1000, False),
                "phone": (comparison, 390, 1000, False),
                "dark": (run, 390, 1000, True),
            }
            for name, (page, width, height, dark) in shots.items():
                tab = browser.open(page, width=width, height=height, dark=dark)
                tab.draw_all()
                tab.picture(place / f"{name}.png", full=False)
        finally:
            browser.close()
        (ROOT / "docs" / "report.png").write_bytes((place / "report.png").read_bytes())
        both = Image.new("RGB", (800, 1000), "#888")
        for name, left in (("phone", 0), ("dark", 410)):
            both.paste(Image.open(place / f"{name}.png"), (left, 0))
        both.save(ROOT / "docs" / "report-phone-dark.png", optimize=True)


if __name__ == "__main__":
    main()
