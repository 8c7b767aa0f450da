"""RLlib's own inference, to time beside ours: a checkpoint's module, in PyTorch, and RLlib's distribution."""

from typing import Any

import numpy as np
import torch
from ray.rllib.algorithms.dqn.torch.default_dqn_torch_rl_module import DefaultDQNTorchRLModule
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.columns import Columns

from sparring.errors import InputError
from sparring.games import Game
from sparring.games.spec import Array
from sparring.networks.policy import features
from sparring.rllib.bridge import decode_state
from sparring.rllib.config import configure
from sparring.rllib.game import game_actions
from sparring.runs.run import find_run

__all__ = ["RLlibRunner"]


class RLlibRunner:
    """A `Runner` of `export.formats`: greedy, one observation at a time.

    :param run: `RUN` or `RUN@40`.
    """

    def __init__(self, run: str, game: Game, threads: int) -> None:
        found = find_run(run)
        if found is None:
            raise InputError(f"{run} is no run")
        torch.set_num_threads(threads)
        arrays, meta = found[0].state(found[1] or "last")
        state = decode_state(meta["trainee"]["state"], arrays)
        self._game = game
        self._module = configure(found[0].experiment, game).get_rl_module_spec(inference_only=True).build()
        self._module.set_state(state["learner_group"]["learner"]["rl_module"][DEFAULT_MODULE_ID])

    def prepare(self, obs: Array) -> dict[str, Any]:
        return {Columns.OBS: torch.from_numpy(features(self._game.observation, obs))}

    def run(self, ready: dict[str, Any]) -> Any:
        module = self._module
        with torch.no_grad():
            if isinstance(module, DefaultDQNTorchRLModule):
                return module.compute_q_values(ready)["qf_preds"].argmax(-1)
            out = module.forward_inference(ready)[Columns.ACTION_DIST_INPUTS]
            return module.get_inference_action_dist_cls().from_logits(out).to_deterministic().sample()

    def action(self, found: Any) -> Array:
        return game_actions(self._game, np.asarray(found))

    def outputs(self, found: Any) -> None:
        return None

    def value(self, found: Any) -> None:
        return None
