"""`python -m sparring.cli`."""

from sparring.cli.entry import main

main()
