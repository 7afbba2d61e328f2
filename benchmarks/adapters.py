"""Memory of LoRA branches on one frozen backbone, in sizes of the backbone, each case in a fresh process.

    ./run bench adapters [--repeats 3]

Resident memory at its highest, from before the model is made to the end of two rounds of `adapter_rounds`, above what
the process holds after all imports and the same with a small model. Two sentences of eight words a step, so that
activations are small; nothing is subtracted for them.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from harness import begin, parser, quartiles, save
from memory import peak, start_peak
from page import Goal, Section, Table, show
from rich.progress import track

from forkmerge.integrations.lora import adapter_rounds

RANK, WORDS = 8, 1000


def adapted(hidden: int) -> torch.nn.Module:
    """Return a BERT of six layers with adapters on its queries and values."""
    from peft import LoraConfig, get_peft_model
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=WORDS, hidden_size=hidden, num_hidden_layers=6, num_attention_heads=8, intermediate_size=4 * hidden
    )
    lora = LoraConfig(r=RANK, target_modules=["query", "value"], task_type="SEQ_CLS")
    return get_peft_model(BertForSequenceClassification(config), lora)


class Trainer:
    """Two steps of AdamW."""

    def __init__(self, branch: Any, steps: int) -> None:
        self.branch, self.steps = branch, steps

    def train(self) -> None:
        model = self.branch.model
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        tokens = torch.randint(WORDS, (2, 8), generator=torch.Generator().manual_seed(0))
        for _ in range(self.steps):
            model(input_ids=tokens, labels=torch.tensor([0, 1])).loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def train(branches: int, hidden: int) -> dict[str, int]:
    """Train and merge, and return the bytes of the backbone and of one branch's trained parameters."""
    torch.manual_seed(0)
    model = adapted(hidden)
    tokens = torch.randint(WORDS, (2, 8), generator=torch.Generator().manual_seed(1))

    def score(candidate: torch.nn.Module) -> float:
        return -candidate(input_ids=tokens, labels=torch.tensor([0, 1])).loss.item()

    mixtures = {f"branch {index}": {"target": 1.0 + index} for index in range(branches)}
    for _ in adapter_rounds(model, mixtures, Trainer, score, count=2, steps=2):
        pass
    sizes = {True: 0, False: 0}
    for parameter in model.parameters():
        sizes[parameter.requires_grad] += parameter.nbytes
    return {"adapter": sizes[True], "backbone": sizes[False]}


def measure(branches: int, hidden: int) -> dict[str, float]:
    """Measure one case in this process."""
    train(branches, 32)
    gc.collect()
    before = start_peak()
    sizes = train(branches, hidden)
    return {"peak": (peak() - before) / sizes["backbone"], **sizes}


def in_fresh_process(branches: int, hidden: int) -> dict[str, float]:
    """Measure one case in a process of its own."""
    command = [sys.executable, __file__, "--case", str(branches), str(hidden)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def section(results: Mapping[str, Any]) -> Section:
    """Say what the results mean."""
    rows, goals = [], []
    for case in results["cases"]:
        adapters = case["branches"] * case["adapter"] / case["backbone"]
        cells = f"{adapters:.3f}", f"{case['peak']['median']:.2f}", f"{case['worst']:.2f}"
        rows.append([f"B={case['branches']}", *cells])
        goals.append(Goal(f"B={case['branches']}, the worst of {results['repeats']}", 1.25, case["worst"], unit=" P"))
    first, last = results["cases"][0], results["cases"][-1]
    said = f"{last['worst']:.2f} with B={last['branches']}, {first['worst']:.2f} with B={first['branches']}"
    return Section(
        "Adapters",
        "Peak resident memory of rounds of LoRA branches in sizes P of the frozen backbone, which is held once: the "
        "backbone, and for every branch its adapters and, while it is trained, its gradients and optimizer state.",
        [Table(["branches", "all adapters", "median", "worst"], rows)],
        goals,
        [
            f"A BERT with {last['backbone'] / 4e6:.1f}M frozen float32 parameters; {last['adapter'] / 4e3:.0f} "
            f"thousand trained ones in every branch, of rank {RANK}. Each case in a fresh process, above what it "
            "holds after imports and the same with a small model."
        ],
        [("How much memory do LoRA branches take, in sizes of the frozen backbone?", said)],
    )


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--repeats", type=int)
    arguments.add_argument("--case", nargs=2, type=int, metavar=("B", "HIDDEN"), help="for itself")
    known = arguments.parse_args(argv)
    if known.case:
        torch.set_num_threads(1)
        print(json.dumps(measure(*known.case)))
        return
    options = begin(arguments, argv)
    repeats, hidden = options.repeats or (1 if options.quick else 3), 64 if options.quick else 768
    cases = []
    for branches in track((2,) if options.quick else (2, 5), description="adapters"):
        found = [in_fresh_process(branches, hidden) for _ in range(repeats)]
        peaks = [each["peak"] for each in found]
        sizes = {name: found[0][name] for name in ("adapter", "backbone")}
        cases.append({"branches": branches, **sizes, "peak": quartiles(peaks), "worst": max(peaks)})
    save("adapters", {"repeats": repeats, "cases": cases}, options.out)
    show("adapters", options.out)


if __name__ == "__main__":
    main()
