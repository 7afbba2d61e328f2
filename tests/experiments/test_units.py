"""Seconds and bytes as people read them."""

from __future__ import annotations

from forkmerge.experiments.units import show_bytes, show_seconds


def test_durations_and_sizes_are_readable() -> None:
    assert [show_seconds(s) for s in (0.0012, 0.5, 42, 300, 9000, 400000)] == [
        "1.2 ms",
        "0.5 s",
        "42 s",
        "5 min",
        "2.5 h",
        "4.6 days",
    ]
    assert [show_bytes(n) for n in (12, 1500, 2_340_000, 7.1e12)] == ["12 bytes", "1.5 kB", "2.34 MB", "7.1 TB"]
