"""Contamination: documents of other corpora that give away what a target is validated and tested on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from forkmerge.problem.text.documents import Document
from forkmerge.problem.text.near_duplicates import DuplicateIndex


@dataclass(frozen=True)
class Contamination:
    """What was found in one corpus.

    Args:
        corpus: Its name.
        documents: How many it has.
        same_id: Indices of documents with the id of a held-out one: its translations.
        duplicates: Indices of near-duplicates, of held-out documents or of their translations.
        examples: Some of them in words.
        has_ids: Whether its documents have ids; without, its translations of held-out ones are not found.
    """

    corpus: str
    documents: int
    same_id: tuple[int, ...] = ()
    duplicates: tuple[int, ...] = ()
    examples: tuple[str, ...] = field(default=())
    has_ids: bool = False

    @property
    def all(self) -> tuple[int, ...]:
        """The indices of all of them."""
        return tuple(sorted({*self.same_id, *self.duplicates}))

    def __str__(self) -> str:
        if not self.all:
            return f"{self.corpus}: none of {self.documents} documents"
        kinds = {"near-duplicates": len(self.duplicates), "with the same id": len(self.same_id)}
        counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items() if count)
        return f"{self.corpus}: {len(self.all)} of {self.documents} documents ({counts}); {'; '.join(self.examples)}"


def find_contamination(
    corpus: str, documents: Sequence[Document], held_out: Sequence[Document], others: Sequence[Document] = ()
) -> Contamination:
    """Return which documents of a corpus are held-out ones, nearly, or translations of them.

    Args:
        corpus: The corpus' name.
        documents: Its documents.
        held_out: The documents to validate and test on.
        others: Further documents of the target, from which boilerplate is known.
    """
    ids = {document.id: document for document in held_out if document.id is not None}
    same_id = [index for index, document in enumerate(documents) if document.id in ids]
    texts = [document.text for document in documents]
    index = DuplicateIndex([document.text for document in held_out], [document.text for document in others])
    duplicates = {pair.second: held_out[pair.first] for pair in index.pairs(texts)}
    # A near-duplicate of a translation gives away as much as the translation.
    rest = [text for number, text in enumerate(texts) if number not in same_id]
    for pair in DuplicateIndex([texts[number] for number in same_id], rest).pairs(texts):
        if pair.second not in same_id:
            duplicates.setdefault(pair.second, documents[same_id[pair.first]])
    examples = [
        f"{documents[number].origin} is nearly {other.origin}" for number, other in list(duplicates.items())[:2]
    ]
    examples += [f"{documents[number].origin} has the id {documents[number].id}" for number in same_id[:1]]
    has_ids = any(document.id is not None for document in documents)
    return Contamination(corpus, len(documents), tuple(same_id), tuple(sorted(duplicates)), tuple(examples), has_ids)
