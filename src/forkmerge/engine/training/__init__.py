"""One branch: its options, its state, its steps."""
