"""The bridge to RLlib: any of its algorithms in our experiments, runs and registry. RLlib plays and learns; what a game
is, what a run reports and what is published are ours. Nothing here is loaded unless an experiment's algorithm is called
`rllib/…`.

- `game`: a game as RLlib's environments, episodes and rows see it
- `config`: an experiment as RLlib's configuration, every key checked
- `module`: what RLlib learned as our policy, checked to be equal
- `bridge`: the algorithm behind the training loop's seam, its state as plain arrays
"""

import os

os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # else it warns of how RLlib starts its own actors
import sparring.launch.ray_cluster  # noqa: F401  # first: it makes settings that Ray reads when it is imported
