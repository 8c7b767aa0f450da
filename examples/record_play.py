"""Records play with the client: what a game ships with. Without --server it brings a small platform of its own.

python examples/record_play.py --episodes 5
python examples/record_play.py --server http://127.0.0.1:8400 --player ann
"""

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import gymnasium

import sparring


@contextmanager
def platform(directory: Path) -> Iterator[str]:
    """Gateway, store and registry in this process. `sparring up` is the real one, with a trainer."""
    from sparring.gateway.app import create_app
    from sparring.gateway.server import background

    store = sparring.open_store(str(directory / "store.db"))
    try:
        with background(create_app(store, sparring.Registry(directory / "registry"), None)) as url:
            yield url
        stats = store.stats("CartPole-v1")
        print(f"the store has {stats.fragments} fragments, {stats.steps} steps")
    finally:
        store.close()


def play(client: sparring.Client, episodes: int) -> int:
    """Your game's loop, with one call more; how many steps. The bot plays at random until a version is published."""
    env, bot, steps = gymnasium.make("CartPole-v1"), client.bot(), 0
    for episode in range(episodes):
        obs, _ = env.reset(seed=episode)
        over = False
        while not over:
            action = bot.act(obs, explore=True)
            next_obs, reward, terminated, truncated, _ = env.step(action)
            client.record(obs, action, float(reward), terminated, truncated, next_obs)
            obs, over, steps = next_obs, terminated or truncated, steps + 1
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--server", help="a platform's address; default: one in this process")
    parser.add_argument("--player", default="somebody", help="the player's name")
    parser.add_argument("--episodes", type=int, default=5, help="episodes to play")
    words = parser.parse_args()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = words.server or stack.enter_context(platform(directory))
        game = sparring.load_game("CartPole-v1")
        with sparring.Client(url, game, words.player, directory=directory / "client") as client:
            steps = play(client, words.episodes)
            arrived = client.flush(30)
            print(f"{steps} steps recorded, {'all' if arrived else 'not all'} of them sent")


if __name__ == "__main__":
    main()
