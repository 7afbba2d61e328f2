"""The command `forkmerge`."""


def main() -> None:
    """Run the command line."""
    from forkmerge.cli.commands import app

    app()
