"""`python -m sparring.algorithms NAME [HYPERPARAMETERS GAME]`: whether a name means an algorithm, and takes these
hyperparameters for this game (both as JSON). Exit code 2 and the reason if not, 3 where nothing can be learned here."""

import importlib.util
import sys

import msgspec

from sparring.algorithms.lookup import MARK, create, find
from sparring.errors import InputError
from sparring.games import Game

if __name__ == "__main__":
    if importlib.util.find_spec("jax") is None:
        sys.exit(3)
    try:
        find(sys.argv[1])
        if len(sys.argv) > 2:
            from sparring.algorithms.large import require_small  # JAX, which is there

            require_small(create(sys.argv[1], Game.from_json(sys.argv[3]), msgspec.json.decode(sys.argv[2])))
    except InputError as error:
        sys.stdout.write(f"{MARK}{error}")
        sys.exit(2)
