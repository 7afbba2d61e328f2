"""Recipes, what they would cost, and comparisons of methods over targets and seeds."""
