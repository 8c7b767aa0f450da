"""Algorithms turn batches into better parameters. One file each; they know nothing of files, processes or clusters.
`deterministic` is what `ddpg` and `td3` share.

- `protocol`: what an algorithm is, and all that trainers read of it
- `lookup`: algorithms by name, ours and anybody's
- `replay`, `trajectories`: what they learn from
"""

from sparring.algorithms.lookup import ALGORITHMS, check, check_for, complete, create, default_for, defaults, find

__all__ = ["ALGORITHMS", "check", "check_for", "complete", "create", "default_for", "defaults", "find"]
