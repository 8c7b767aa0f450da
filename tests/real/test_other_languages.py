"""The page "Other languages": its JavaScript is a client that closes the loop, from a declaration to a version that
learned from what it played."""

import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import urllib3

from sparring.api import Snapshot
from sparring.registry.registry import Registry
from sparring.store.sqlite import SqliteStore

pytestmark = pytest.mark.real
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "other-languages.md"
UP = [sys.executable, "-m", "sparring.cli", "up", "--port", "0", "--print-address", "--publish-every", "1"]


def node() -> str:
    found = subprocess.run([ROOT / "scripts/tool", "node"], capture_output=True, text=True, check=True)
    return str(Path(found.stdout.strip()) / "node")


def test_a_client_in_javascript_plays_until_a_version_learned_from_it(tmp_path: Path) -> None:
    blocks = re.findall(r"^```js\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    assert len(blocks) >= 5
    script = tmp_path / "play.mjs"
    script.write_text("".join(blocks))
    with subprocess.Popen([*UP, "--data", str(tmp_path / "data")], stdout=subprocess.PIPE, text=True) as platform:
        try:
            assert platform.stdout is not None
            server = platform.stdout.readline().strip()
            played = subprocess.run(
                [node(), script, "1"],
                env={"SPARRING_SERVER": server},
                capture_output=True,
                text=True,
                timeout=150,
            )
            assert (played.returncode, played.stderr) == (0, "")
            answer = urllib3.request("GET", f"{server}/v1/games/larger/stats").data
        finally:
            platform.terminate()
    lines = played.stdout.splitlines()
    assert re.fullmatch(r"random 0: return \d+", lines[0])
    assert re.fullmatch(r"bot [1-9]\d*: return \d+", lines[-1])
    version = int(lines[-1].split()[1].rstrip(":"))
    store = SqliteStore(tmp_path / "data" / "store.db", readonly=True)
    fragments = store.tail("larger", 0, 10_000).fragments
    store.close()
    assert sum(f.steps for f in fragments) == 20 * len(lines)
    assert {f.model for f in fragments} == {"random", "bot"}
    assert all(f.log_prob is not None for f in fragments)
    manifest = Registry(tmp_path / "data" / "registry").manifest("larger", "bot", version)
    assert 0 < manifest.data.steps <= 20 * len(lines)
    trainer = msgspec.json.decode(answer, type=Snapshot).trainer
    assert trainer is not None
    assert trainer.people_steps == 0
    assert trainer.bot_steps > 0
    assert trainer.left_out == {}
