"""python -m service.cli: the command line, as `batchweave` is it."""

from service.cli.table import main

main()
