"""TorchJD's scalarizers, weightings and aggregators as methods."""
