"""docs/games.md: each of its declarations is one, and together they show every space."""

import re
from pathlib import Path

from sparring.games import Box, Dict, Discrete, Game, MultiDiscrete
from sparring.games.spec import column

PAGE = (Path(__file__).parents[2] / "docs" / "games.md").read_text()
GAMES = [Game.declared(text) for text in re.findall(r"```json\n(.*?)```", PAGE, re.S)]


def test_every_space_has_an_example_that_loads() -> None:
    spaces = [space for game in GAMES for space in (game.observation, game.action)]
    parts = [part for space in spaces if isinstance(space, Dict) for part in space.fields.values()]
    assert {type(space) for space in spaces} == {Box, Dict, Discrete, MultiDiscrete}
    assert any(isinstance(each, Box) and each.is_image for each in spaces)
    assert any(isinstance(each, Box) and isinstance(each.low, tuple) for each in spaces)
    assert any(isinstance(each, Discrete) and each.start for each in parts)
    assert len({game.name for game in GAMES}) == len(GAMES)


def test_the_padded_rows_fit_their_game() -> None:
    code = next(code for code in re.findall(r"```python\n(.*?)```", PAGE, re.S) if "np.zeros" in code)
    scope: dict[str, object] = {}
    exec(code, scope)
    horde = next(game for game in GAMES if game.name == "horde")
    assert horde.observation.problem(column(horde.observation, [scope["obs"]])) is None
