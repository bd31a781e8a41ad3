"""`python -m selfcon`."""

from selfcon.cli import main

main()
