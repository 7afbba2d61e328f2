"""A conformance kit: what methods and executors, ours or yours, must do.

```python
from forkmerge.testing import MethodConformance, check_executor

class TestMine(MethodConformance):
    method = Mine

def test_my_executor():
    check_executor(lambda: MyExecutor(workers=2))
```
"""

from forkmerge.testing.executor_conformance import check_executor
from forkmerge.testing.method_conformance import MethodConformance, conformance_of_all
from forkmerge.testing.small_training import (
    TASKS,
    Poison,
    SmallLosses,
    SmallNet,
    same_state,
    small_problem,
    train_small,
)

__all__ = [
    "TASKS",
    "MethodConformance",
    "Poison",
    "SmallLosses",
    "SmallNet",
    "check_executor",
    "conformance_of_all",
    "same_state",
    "small_problem",
    "train_small",
]
