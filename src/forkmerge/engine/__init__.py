"""What everything runs on: storage, the training of a branch, merges, and executors; imports point that way back."""
