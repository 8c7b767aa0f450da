"""`study.csv` and `study.json`: a row per iteration with the columns that studies of training time have, by RLlib's
names, for scripts that read those."""

import csv
import io
import json

from sparring.files import write_whole
from sparring.runs.metrics import Row
from sparring.runs.sinks import Opening

__all__ = ["COLUMNS", "Study"]

# Its columns, each with our metric and what that is multiplied by.
COLUMNS = {
    "n": ("iteration", 1),
    "episode_reward_min": ("episode/return_min", 1),
    "episode_reward_mean": ("episode/return_mean", 1),
    "episode_reward_max": ("episode/return_max", 1),
    "episode_len_mean": ("episode/length_mean", 1),
    "learn_time_ms": ("time/learn_s", 1000),
    "time_total_s": ("time/total_s", 1),
}


class Study:
    """A cell is empty where no episode ended in that iteration."""

    def __init__(self, opening: Opening) -> None:
        self._directory = opening.directory
        self._rows = [_study(row) for row in opening.rows]
        self._write()

    def write(self, row: Row) -> None:
        self._rows.append(_study(row))
        self._write()

    def _write(self) -> None:
        table = io.StringIO()
        writer = csv.DictWriter(table, list(COLUMNS))
        writer.writeheader()
        writer.writerows(self._rows)
        write_whole(self._directory / "study.csv", table.getvalue().encode())
        write_whole(self._directory / "study.json", json.dumps(self._rows, indent=1).encode())

    def close(self) -> None:
        pass


def _study(row: Row) -> dict[str, float]:
    return {name: row[ours] * factor for name, (ours, factor) in COLUMNS.items() if ours in row}
