"""Stores: the seam (`protocol`), the embedded default (`sqlite`) and the one for unit tests (`memory`).

Implementations are imported from their modules: clients import the seam's messages and need no database for it.
"""

from sparring.store.protocol import (
    Episode,
    Outcome,
    PlayerStats,
    Stats,
    Store,
    StoreBusy,
    StoreFull,
    Tail,
    VersionStats,
)

__all__ = ["Episode", "Outcome", "PlayerStats", "Stats", "Store", "StoreBusy", "StoreFull", "Tail", "VersionStats"]
