"""Where the repository's files are, wherever a test lies."""

from pathlib import Path

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
