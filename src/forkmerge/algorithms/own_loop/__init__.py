"""ForkMerge in your own training loop: any model, any optimizer, any score, no `Problem`."""
