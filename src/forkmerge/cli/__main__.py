"""`python -m forkmerge.cli` is the command `forkmerge`."""

from forkmerge.cli import main

if __name__ == "__main__":
    main()
