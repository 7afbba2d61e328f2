"""What a run writes: one folder, files that survive a kill, values without pickle."""
