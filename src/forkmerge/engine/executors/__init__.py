"""Where branches are trained and candidates measured: in this process, or in others, with the same bits."""
