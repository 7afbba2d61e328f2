"""Ready problems on data that installed packages carry, and image files decoded once; the library imports none."""
