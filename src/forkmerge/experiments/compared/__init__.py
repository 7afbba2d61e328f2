"""What a comparison compares by which words, and where its runs lie."""
