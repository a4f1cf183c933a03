"""Runs the command line: `python -m service.cli` is the same as `batchweave`."""

from service.cli.table import main

main()
