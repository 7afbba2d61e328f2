"""The command `forkmerge`."""


def main() -> None:
    """Run the command line."""
    from forkmerge.cli.run import app

    app()
