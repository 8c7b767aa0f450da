"""Google's compiler for the Edge TPU, where it is installed: which operators of a file it takes."""

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import msgspec

from sparring.errors import NotInstalled, SparringError
from sparring.export.tflite import carry_about

__all__ = ["COMPILER", "Mapping", "compiled", "require_compiler"]

COMPILER = "edgetpu_compiler"
LONGEST = 300.0  # seconds
COUNT = re.compile(r"Number of operations that will run on (Edge TPU|CPU): (\d+)")


class Mapping(msgspec.Struct, frozen=True):
    """Operators by where they run."""

    tpu: int
    cpu: int


def require_compiler() -> None:
    """:raises NotInstalled: it is not on the path."""
    if shutil.which(COMPILER) is None:
        raise NotInstalled(
            f"the Edge TPU runs only files that {COMPILER} has compiled, which is not on the path: install it "
            "(https://coral.ai/docs/edgetpu/compiler), or give a file that is compiled already"
        )


def compiled(name: str, data: bytes) -> tuple[dict[str, bytes], Mapping] | None:
    """The file for the Edge TPU, by its name, and how it is mapped; None: the compiler is not on the path.

    :raises SparringError: the compiler failed; the message has its words.
    """
    program = shutil.which(COMPILER)
    if program is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / name
        source.write_bytes(data)
        words = [program, "--show_operations", "--out_dir", folder, str(source)]
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=LONGEST, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SparringError(f"{COMPILER} did not compile {name}: {error}") from error
        made = source.with_name(f"{source.stem}_edgetpu.tflite")
        counts = {place: int(count) for place, count in COUNT.findall(done.stdout)}
        if done.returncode or not made.is_file() or not counts:
            raise SparringError(f"{COMPILER} did not compile {name}: {(done.stderr or done.stdout).strip()[-500:]}")
        return {made.name: carry_about(data, made.read_bytes())}, Mapping(
            counts.get("Edge TPU", 0), counts.get("CPU", 0)
        )
