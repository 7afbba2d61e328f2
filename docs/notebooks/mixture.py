# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Which text should a language model learn from?
#
# The target is a corpus with little text, and there are others that may help or hurt. One run trains the model and
# searches the mixture. `pip install 'forkmerge[hf,lora]'` installs what this page needs; [Mix](../mix.md) has the same
# as a command.
#
# All text here comes with Python. The target is eight pages of its manual. `docstrings` are those of the standard
# library, also English about Python. `tables` are its character sets, thousands of lines of hexadecimal numbers.

# %%
import ast
import encodings
import json
import tempfile
from pathlib import Path
from pydoc_data.topics import topics

import torch

import forkmerge as fm

torch.set_num_threads(1)  # a model this small gains nothing from more
folder = Path(tempfile.mkdtemp())


def docstrings(path: Path) -> str:
    nodes = ast.walk(ast.parse(path.read_text("utf-8")))
    texts = [ast.get_docstring(node) for node in nodes if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))]
    return "\n\n".join(text for text in texts if text)


def corpus(name: str, texts: list[str]) -> Path:
    path = folder / f"{name}.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts), "utf-8")
    return path


library = sorted(Path(ast.__file__).parent.glob("[a-h]*.py"))
pages = [topics[name] for name in sorted(topics) if 500 < len(topics[name]) < 3000]
manual = corpus("manual", pages[:8])
others = [
    corpus("docstrings", [docstrings(path) for path in library]),
    corpus("tables", [path.read_text("utf-8") for path in sorted(Path(encodings.__file__).parent.glob("cp125*.py"))]),
]

# %% [markdown]
# `model` is the folder of a model of transformers, and by default only adapters (LoRA) are trained. For this page a
# configuration is enough: a small model over bytes, which starts from random weights and is trained whole.

# %%
config = {"model_type": "llama", "vocab_size": 257, "hidden_size": 32, "intermediate_size": 64}
config |= {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64}
(folder / "config.json").write_text(json.dumps(config))

# %% [markdown]
# One branch reads the target alone, and one each of the others and the target in turn. A fifth of the target's text
# validates merges and a fifth tests the result; what gives away that text would be left out of the other corpora.

# %%
result = fm.mix(
    manual,
    others,
    folder / "config.json",
    out=folder / "mixed",
    full=True,
    lr=1e-2,
    steps=100,
    interval=25,
    length=64,
    baselines=False,  # True also trains with equal weights, and with every other corpus alone
)
result

# %% [markdown]
# The rows are the *mixture over time*: of every round, the share of the steps that read each corpus. *Relevance* is the
# weight that a corpus had in the merges, with its interval:

# %%
{name: [round(number, 2) for number in estimate] for name, estimate in result.relevance.items()}

# %% [markdown]
# The model is in a folder that transformers loads. It is the mixture's, unless the target only validates better:

# %%
result.model_is, sorted(path.name for path in result.model.iterdir())

# %% [markdown]
# Eight pages and one seed say little: `seeds=5` gives the gain its interval. With more corpora this is where the search
# pays, since nobody has to train every combination.
