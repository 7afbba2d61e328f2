"""Why auxiliary tasks help or hurt: pure functions of models, problems and records, with typed results."""
