"""What branches are trained on, and how their steps differ."""
