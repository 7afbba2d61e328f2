"""Text to learn from: documents, near-duplicates among them, windows of tokens, bits per byte."""
