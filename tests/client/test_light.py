import subprocess
import sys

from fake_server import GAME

HEAVY = (
    "jax",
    "jaxlib",
    "starlette",
    "uvicorn",
    "gymnasium",
    "onnx",
    "onnxruntime",
    "obstore",
    "typer",
    "rich",
    "optax",
    "botocore",
)


def test_importing_the_client_imports_nothing_of_the_training_stack() -> None:
    code = f"import sys, sparring.client; print(sorted(m for m in {HEAVY!r} if m in sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.strip() == "[]"


def test_a_bot_needs_onnx_runtime_and_nothing_more() -> None:
    # The policy is rendered in one process and played in another, which must get by without the renderer.
    render = "import sys; from fake_server import GAME, policy_file; sys.stdout.buffer.write(policy_file(GAME))"
    play = f"""
import sys
from sparring.client.bot import Loaded
from sparring.games import Game
game = Game.from_json(sys.argv[1])
policy = Loaded(sys.stdin.buffer.read(), game, "bot", 1)
print(sorted(m for m in {HEAVY!r} if m in sys.modules))
"""
    folder = __file__.rpartition("/")[0]
    data = subprocess.run([sys.executable, "-c", render], capture_output=True, check=True, cwd=folder).stdout
    argv = [sys.executable, "-c", play, GAME.to_json().decode()]
    found = subprocess.run(argv, input=data, capture_output=True, check=True).stdout
    assert found.decode().strip() == "['onnxruntime']"
