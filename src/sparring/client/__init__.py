"""What a game ships with: record play, get bots. Needs NumPy, msgspec, urllib3 and, once a bot is loaded, ONNX Runtime;
nothing of the training stack."""

from sparring.client.bot import Actions, Bot
from sparring.client.client import Client, Player, public_bot
from sparring.client.recorder import Acted
from sparring.client.transports.base import (
    Refused,
    SchemaMismatch,
    Transport,
    Unavailable,
    UnknownGame,
    Upload,
    UploadTooLarge,
)
from sparring.client.uploader import UploadStats

Stats = UploadStats  # its name in 0.1

__all__ = [
    "Acted",
    "Actions",
    "Bot",
    "Client",
    "Player",
    "Refused",
    "SchemaMismatch",
    "Stats",
    "Transport",
    "Unavailable",
    "UnknownGame",
    "Upload",
    "UploadStats",
    "UploadTooLarge",
    "public_bot",
]
