"""Ready problems on data that installed packages carry; nothing here is imported by the rest of the library."""
