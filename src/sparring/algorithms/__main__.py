"""`python -m sparring.algorithms NAME`: whether a name means an algorithm. Exit code 2 and the reason if not."""

import sys

from sparring.algorithms.registry import MARK, find
from sparring.errors import InputError

if __name__ == "__main__":
    try:
        find(sys.argv[1])
    except InputError as error:
        sys.stdout.write(f"{MARK}{error}")
        sys.exit(2)
