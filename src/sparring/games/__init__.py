"""Games: what they are (`spec`) and where they come from (`catalog`)."""

from sparring.games.spec import Action, Box, Dict, Discrete, Game, MultiDiscrete, Space

__all__ = ["Action", "Box", "Dict", "Discrete", "Game", "MultiDiscrete", "Space"]
