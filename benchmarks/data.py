"""Memory and time of `sparring data export|import` for a store of a given size: docs/data.md.

python benchmarks/data.py --megabytes 1000 --formats parquet,npz,csv,minari
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from sparring.experience import Columns, new_id
from sparring.experience.fragment import pack
from sparring.games import Box, Discrete, Game
from sparring.store import open_store

GAME = Game("walker", Box((44,)), Discrete(4))
STEPS = 500


def fill(path: Path, megabytes: int) -> None:
    store, rng, size = open_store(str(path)), np.random.default_rng(1), 0
    store.register(GAME)
    while size < megabytes * 1_000_000:
        fragments = []
        for _ in range(50):
            obs = rng.standard_normal((STEPS + 1, 44), np.float32)
            columns = Columns(obs, rng.integers(0, 4, STEPS).astype("<i4"), np.ones(STEPS, "<f4"))
            fields = {"player": f"player-{rng.integers(50)}", "episode": new_id(), "start": 0, "terminated": True}
            fragments.append(pack(GAME, columns, id=new_id(), time=time.time(), **fields))
        store.append(fragments)
        size += sum(len(f.obs) for f in fragments)
    store.close()


def measured(*words: str) -> tuple[float, float, str]:
    """Seconds, MB of memory at most, what was printed."""
    code = "import sys; from sparring.cli.entry import main; main()"
    begin = time.monotonic()
    wrapper = [sys.executable, "-c", code, *words]
    script = f"""
import resource, subprocess, sys
done = subprocess.run({wrapper!r}, capture_output=True, text=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, done.stdout.strip() or done.stderr[-500:])
sys.exit(done.returncode)"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    most, _, said = done.stdout.partition(" ")
    return time.monotonic() - begin, int(most) / 1000, said.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--formats", default="parquet,npz,csv,minari")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        fill(home / "from.db", options.megabytes)
        print("| format | export | import |\n|---|---|---|")
        for form in options.formats.split(","):
            cells = []
            for words in (
                ("export", "walker", str(home / form), "--store", str(home / "from.db")),
                ("import", "walker", str(home / form), "--store", str(home / f"{form}.db")),
            ):
                seconds, most, said = measured("data", *words, "--format", form)
                print(said, file=sys.stderr)
                cells.append(f"{most:.0f} MB, {seconds:.0f} s")
            print(f"| {form} | {' | '.join(cells)} |", flush=True)
            for path in home.glob(f"{form}.db*"):
                path.unlink()


if __name__ == "__main__":
    main()
