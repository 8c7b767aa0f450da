"""Whole numbers that play like floats: weights are tuned so that, rounded, the policy chooses what it chose before. A
short distillation through the rounding (Jacob et al. 2018, section 3), on the calibration data."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sparring.export import tape as tapes
from sparring.export.tape import Op
from sparring.export.whole_numbers import Whole, agreement, snap, weights_of
from sparring.games import Box
from sparring.games.spec import Array
from sparring.networks.plain import evaluate
from sparring.networks.spec import choices

__all__ = ["tune"]

STEPS, CHECKS, BATCH, RATE = 1200, 6, 256, 3e-3
IMAGES, STEPS_IMAGES = 32, 60  # a batch of these, and steps: a convolution's take longer
SHARP = 16.0  # how much the preferences of the policy are sharpened: what wins narrowly shall win still


def tune(found: Whole, x: Array, on_progress: Callable[[str], object]) -> Whole:
    """The best of what it was and of a few looks on the way."""
    on_progress("the rounded policy is tuned to play like the policy")
    (targets, values), start = _targets(found, x), found.into(x)
    params = {i: (jnp.asarray(op.w), jnp.asarray(op.b)) for i, op in enumerate(found.tape.ops) if _is_tuned(op)}
    steps = STEPS_IMAGES if found.plain.image else STEPS
    optimiser = optax.adam(optax.cosine_decay_schedule(RATE, steps))
    step = _stepper(found, optimiser)
    state, best, rng = optimiser.init(params), (agreement(found, x), found), np.random.default_rng(0)
    batch = IMAGES if found.plain.image else BATCH
    for i in range(1, steps + 1):
        rows = rng.integers(0, len(x), min(batch, len(x)))
        params, state = step(params, state, start[rows], targets[rows], None if values is None else values[rows])
        if i % (steps // CHECKS) == 0:
            tried = _with(found, params)
            best = max(best, (agreement(tried, x), tried), key=lambda each: each[0])
            on_progress(f"tuned {i} of {steps} steps: {best[0]:.2%} of its actions are the policy's")
    return best[1]


def _is_tuned(op: Op) -> bool:
    return op.w is not None and not op.fixed


def _targets(found: Whole, x: Array) -> tuple[Array, Array | None]:
    """What the outputs shall be like: probabilities of choices, or actions in ±1. And the values, where it has any."""
    exact = found.exact
    pieces = [evaluate(exact, some) for some in np.array_split(x, -(-len(x) // IMAGES))]
    out = np.concatenate([piece[0] for piece in pieces])
    values = np.concatenate([piece[1] for piece in pieces if piece[1] is not None]) if exact.value else None
    if exact.bound != "argmax":
        return np.tanh(out) if exact.bound == "tanh" else out, values
    form = found.forms[found.tape.outputs["outputs"]]
    return np.asarray(_likely(found, jnp.asarray(out), form.scale * 255)), values


def _likely(found: Whole, out: Any, span: float) -> Any:
    parts = jnp.split(out, np.cumsum(choices(found.exact.game.action))[:-1], -1)
    return jnp.concatenate([jax.nn.softmax(SHARP * part * (4 / span)) for part in parts], -1)


def _stepper(found: Whole, optimiser: Any) -> Any:
    tape, forms, number = found.tape, found.forms, found.tape.outputs["outputs"]
    box, span = isinstance(found.exact.game.action, Box), forms[number].scale * 255

    def value_loss(tensors: list[Any], values: Any) -> Any:
        """Layers that it shares with the policy are tuned, too."""
        if values is None:
            return 0.0
        place = tape.outputs["value"]
        return jnp.square((tensors[place][:, 0] - values) / (forms[place].scale * 255)).mean()

    def loss(params: Any, start: Any, targets: Any, values: Any) -> Any:
        weights: list[Any] = [(op.w, op.b) for op in tape.ops]
        for i, (w, b) in params.items():
            weights[i] = _through(w, _snapped(tape.ops[i], w)), b
        x = (start.astype(jnp.float32) - forms[0].zero) * np.float32(forms[0].scale)
        tensors = tapes.run(tape, x, jnp, weights, lambda i, v: _through(v, snap(jnp, v, forms[i])))
        out, valued = tensors[number], value_loss(tensors, values)
        if box:
            return jnp.square(out - targets).mean() + valued
        return -(targets * jnp.log(_likely(found, out, span) + 1e-6)).sum(-1).mean() + valued

    @jax.jit
    def step(params: Any, state: Any, start: Any, targets: Any, values: Any) -> Any:
        grads = jax.grad(loss)(params, start, targets, values)
        updates, state = optimiser.update(grads, state)
        return optax.apply_updates(params, updates), state

    return step


def _through(value: Any, rounded: Any) -> Any:
    """Rounded, with the slope of what is not; none beyond the range."""
    return value + jax.lax.stop_gradient(rounded - value)


def _snapped(op: Op, w: Any) -> Any:
    axes = tuple(range(w.ndim - 1)) if op.kind == "conv" else None
    scale = jnp.maximum(jnp.abs(w).max(axes), 1e-9) / 127
    return jnp.clip(jnp.rint(w / scale), -127, 127) * scale


def _with(found: Whole, params: Any) -> Whole:
    ops = [op._replace(w=np.asarray(params[i][0]), b=np.asarray(params[i][1])) if i in params else op
           for i, op in enumerate(found.tape.ops)]  # fmt: skip
    tape = replace(found.tape, ops=ops)
    return replace(found, tape=tape, weights=weights_of(tape, found.forms))
