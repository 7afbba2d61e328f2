"""Text: which corpora help a small language model."""
