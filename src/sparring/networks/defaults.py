"""The network that a game gets when nobody chose one: by the kind of its observations."""

from collections.abc import Iterable

from sparring.games import Box, Dict, Discrete, MultiDiscrete, Space
from sparring.networks.spec import Conv, Dense, Layer, feature_shape

__all__ = ["describe", "is_image", "kind_of", "layers_for"]

WIDEST = 256  # units of a default Dense layer behind a wide vector
LARGE, MIDDLE, SMALL = 36, 12, 3  # shortest sides of images from which each of the networks below fits
AREA = 100  # pixels that may be left behind the convolutions: 64 filters of them and 512 units are 3 million weights


def layers_for(observation: Space, usual: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """`usual` is the algorithm's own for vectors. Wide vectors get at least as many units as they have numbers, up to
    256; images get convolutions."""
    shape = feature_shape(observation)
    if len(shape) == 3 and min(shape[:2]) >= SMALL:
        return _for_image(*shape[:2])
    width, most = 1, WIDEST
    for n in shape:
        width *= n
    wide = min(1 << (width - 1).bit_length(), most)
    return tuple(
        Dense(max(layer.units, wide), layer.activation, layer.norm) if isinstance(layer, Dense) else layer
        for layer in usual
    )


def _for_image(height: int, width: int) -> tuple[Layer, ...]:
    """Mnih et al. 2015 for large images, Young and Tian 2019 (MinAtar) for tiny ones; more strides where much is
    left."""
    shortest = min(height, width)
    if shortest >= LARGE:
        layers, units = [Conv(32, 8, 4), Conv(64, 4, 2), Conv(64, 3)], 512
    elif shortest >= MIDDLE:
        layers, units = [Conv(32, 4, 2), Conv(64, 3)], 256
    else:
        layers, units = [Conv(16, 3)], 128
    sides = [height, width]
    for layer in layers:
        sides = [(side - layer.kernel) // layer.stride + 1 for side in sides]
    while sides[0] * sides[1] > AREA and min(sides) >= 3:
        layers.append(Conv(64, 3, 2))
        sides = [(side - 3) // 2 + 1 for side in sides]
    return (*layers, Dense(units))


def is_image(observation: Space) -> bool:
    return isinstance(observation, Box) and observation.is_image


def kind_of(observation: Space) -> str:
    """In words, for people who wonder why they got this network."""
    shape = feature_shape(observation)
    if len(shape) == 3:
        return f"images of {shape[0]}×{shape[1]}×{shape[2]}"
    if isinstance(observation, Discrete):
        return f"a choice of {observation.n}"
    if isinstance(observation, MultiDiscrete):
        return f"{len(observation.nvec)} choices, {shape[0]} inputs"
    return (
        f"{len(observation.fields)} fields, {shape[0]} inputs"
        if isinstance(observation, Dict)
        else f"{shape[0]} inputs"
    )


def describe(layers: Iterable[Layer]) -> str:
    """`conv 32 8×8/4, conv 64 4×4/2, conv 64 3×3/1, dense 512`."""
    return ", ".join(f"{layer.kind} {layer.summary()}".rstrip() for layer in layers) or "no layers, only a head"
