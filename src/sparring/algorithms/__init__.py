"""Algorithms turn batches into better parameters. One file each; they know nothing of files, processes or clusters.

- `protocol`: what an algorithm is, and all that trainers read of it
- `registry`: algorithms by name, ours and anybody's
- `replay`, `trajectories`: what they learn from
"""

from sparring.algorithms.registry import ALGORITHMS, check, complete, create, default_for, defaults, find

__all__ = ["ALGORITHMS", "check", "complete", "create", "default_for", "defaults", "find"]
