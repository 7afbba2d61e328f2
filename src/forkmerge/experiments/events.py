"""What a caller can watch while something runs; whoever runs it prints nothing.

- begin: `runs` in all, `ended` of them before, `kinds` and `work` (an estimate) of those that are still to be done;
- start, progress: the run with this `index` has been started, has done so many `steps` of its work;
- end: the run with this `index` has ended: its `title`, its `result` in words, and its `error` or None;
- pretraining: `name`, `step` of `steps`, and whether it `begins` there;
- news, warning: `text`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Watch = Callable[[Mapping[str, Any]], None]


def unwatched(event: Mapping[str, Any]) -> None:
    """Watch nothing."""
