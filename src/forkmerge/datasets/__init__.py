"""Ready problems: the demo's, on data that installed packages carry, and the paper's; the library imports none."""
