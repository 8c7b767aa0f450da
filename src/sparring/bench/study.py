"""What the hardware study of PPO on Atari Pong measured, to stand beside ours. It used RLlib with TensorFlow, an RTX
and a V100 GPU, a many-core server, TensorFlow Lite and a Google Coral Edge TPU. Its networks are
experiments/pong/model1.yaml …"""

from typing import NamedTuple

__all__ = ["INFERENCE", "MODELS", "RETURNS", "TRAINING", "Iteration", "is_pong"]

MODELS = (1, 3, 4)
EPOCHS = 30  # passes over the same steps
# Milliseconds of a step by model.
INFERENCE: dict[str, tuple[float, float, float]] = {
    "RLlib on CPU": (1.01, 1.29, 1.46),
    "RLlib with GPU": (1.8, 2.4, 2.1),
    "RLlib without GPU": (0.77, 1.5, 1.1),
    "TFLite float on CPU": (0.57, 1.64, 1.26),
    "TFLite int8 on CPU": (10.1, 70.0, 43.0),
    "TFLite int8 on Coral": (0.41, 1.03, 0.75),
}


class Iteration(NamedTuple):
    """Seconds of an iteration with 8 workers, and samples learned a second."""

    whole: float
    learn: float
    sample: float
    learned_per_s: float

    @property
    def passes_per_s(self) -> float:
        return self.learned_per_s * EPOCHS


# By model: whole, learn, sample, learned a second.
_TRAINING = {
    "GPU 0 (RTX)": ((15.2, 10.6, 5.3, 459), (34.4, 26.7, 7.5, 181), (19.1, 13.7, 6.0, 354)),
    "GPU 0, workers on CPUs": ((12.0, 10.8, 2.1, 454), (32.3, 26.9, 5.2, 179), (17.2, 14.5, 3.4, 337)),
    "GPU 1 (V100)": ((15.7, 9.8, 5.6, 492), (37.0, 27.5, 8.1, 175), (24.3, 17.2, 6.4, 279)),
    "both": ((13.5, 10.8, 3.7, 453), (24.9, 19.0, 6.0, 255), (21.3, 17.2, 4.4, 281)),
    "both, 16 workers": ((17.1, 14.1, 3.7, 458), (43.3, 35.8, 6.8, 179), (27.2, 22.5, 4.7, 285)),
    "no GPU (many-core server)": ((287, 282, 4.7, 14), (516, 505, 11, 8), (441, 433, 8, 9)),
}
TRAINING = {place: tuple(Iteration(*row) for row in rows) for place, rows in _TRAINING.items()}
RETURNS = (
    "Return on Pong in the study: −12.7 after 1,000 iterations, −7 after 2,000, −2.2 to +0.8 after 11,000 (52 M "
    "steps); models 2, 5 and 6 stayed at −21. Every quantised model lost 21:0."
)


def is_pong(game: str) -> bool:
    return "Pong" in game
