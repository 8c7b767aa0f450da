"""The model card: what a published version is, for people who find its folder."""

import time

from sparring.games import Dict, Discrete, MultiDiscrete, Space
from sparring.networks.policy import Policy
from sparring.registry.manifest import Manifest

__all__ = ["card"]


def card(manifest: Manifest, policy: Policy) -> str:
    game = manifest.game
    sections = [
        f"# {game.name} · {manifest.model} · version {manifest.version}",
        _table(_facts(manifest, policy)),
        "## Results",
        _table({f"`{k}`": f"{v:.6g}" for k, v in sorted(manifest.metrics.items())}) or "None were recorded.",
        "## Settings",
        _table({f"`{k}`": f"`{v}`" for k, v in sorted(manifest.config.items())}) or "None were recorded.",
        "## Play with it",
        "`policy.onnx` takes raw observations and gives the game's actions: normalisation, scaling and exploration are "
        "inside. Any ONNX runtime will do:",
        _example(policy),
        "It also gives `sampled`, an exploring action made from the optional input `noise` "
        f"([N, {policy.noise_size}], {_NOISE[policy.noise_kind]}), and `log_prob`, its log-probability. "
        "(That `noise` may be left out is what ONNX Runtime warns of when it loads the file: it is meant.) "
        "To train on from it, load `policy.safetensors` with `sparring.export.weights.load`.",
    ]
    return "\n\n".join(sections) + "\n"


_NOISE = {"uniform": "uniform in 0..1", "normal": "standard normal"}


def _facts(manifest: Manifest, policy: Policy) -> dict[str, str]:
    game, data = manifest.game, manifest.data
    size = sum(array.size for array in policy.params.values())
    return {
        "Game": f"{game.name} (schema `{game.schema}`)" + (f", Gymnasium's `{game.env}`" if game.env else ", declared"),
        "Observation": _space(game.observation),
        "Action": _space(game.action),
        "Algorithm": manifest.algorithm,
        "Network": f"{_layers(policy)}; {size:,} numbers"
        + (", normalised input" * ("normaliser.mean" in policy.params)),
        "Exploration": f"{policy.exploration:g}",
        "Published": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(manifest.created)),
        "Trained on from": "scratch" if manifest.parent is None else f"version {manifest.parent}",
        "Experience": f"{data.steps:,} steps in {data.fragments:,} fragments (store cursors {data.first}–{data.last})"
        if data.fragments
        else "not recorded",
    }


def _layers(policy: Policy) -> str:
    words = [
        (type(layer).__name__, layer.summary(), getattr(layer, "activation", None) or "") for layer in policy.layers
    ]
    parts = [" ".join(filter(None, each)) for each in words]
    return " → ".join([*parts, type(policy.head).__name__])


def _space(space: Space) -> str:
    if isinstance(space, Discrete):
        return f"one of {space.n} whole numbers from {space.start}"
    if isinstance(space, MultiDiscrete):
        return f"{len(space.nvec)} whole numbers below {', '.join(map(str, space.nvec))}"
    if isinstance(space, Dict):
        return "; ".join(f"`{name}`: {_space(space.fields[name])}" for name in sorted(space.fields))
    bounds = [f"{word} {_bound(b)}" for word, b in (("from", space.low), ("to", space.high)) if b is not None]
    return " ".join([f"{space.dtype} of shape {list(space.shape)}", *bounds])


def _bound(bound: float | tuple[float, ...]) -> str:
    if isinstance(bound, tuple) and len(bound) > 8:
        return "bounds of their own"
    return f"[{', '.join(f'{b:g}' for b in bound)}]" if isinstance(bound, tuple) else f"{bound:g}"


def _example(policy: Policy) -> str:
    space = policy.game.observation
    parts = [f'"obs.{name}": {name}' for name in sorted(space.fields)] if isinstance(space, Dict) else ['"obs": obs']
    return (
        "```python\nimport onnxruntime\n"
        'session = onnxruntime.InferenceSession("policy.onnx", providers=["CPUExecutionProvider"])\n'
        f'action = session.run(["action"], {{{", ".join(parts)}}})[0]  # a batch: arrays begin with N\n```'
    )


def _table(rows: dict[str, str]) -> str:
    if not rows:
        return ""
    # A bar would end its cell.
    lines = [
        "| | |",
        "|---|---|",
        *(f"| {k} | {v} |" for k, v in ((k, v.replace("|", "\\|")) for k, v in rows.items())),
    ]
    return "\n".join(lines)
