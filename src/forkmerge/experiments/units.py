"""Seconds and bytes as people read them."""

from __future__ import annotations


def show_seconds(seconds: float) -> str:
    """Return a duration such as "40 s", "3 min" or "2.5 h"."""
    if seconds < 0.095:
        return f"{seconds * 1000:.2g} ms"
    if seconds < 99.5:
        return f"{seconds:.2g} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"


def show_bytes(count: float) -> str:
    """Return a size such as "1.4 MB"."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
