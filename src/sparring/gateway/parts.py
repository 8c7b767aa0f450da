"""The gateway's parts, which the modules in `routes` share."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from starlette.applications import Starlette

from sparring.gateway.endpoint import Budget
from sparring.gateway.live import Live
from sparring.gateway.prometheus import PrometheusMetrics
from sparring.gateway.routes.ab_requests import Testing
from sparring.gateway.routes.act import Acting
from sparring.gateway.routes.fragments import Limits, Uploads
from sparring.gateway.routes.game_settings import SettingsOfGames
from sparring.gateway.routes.games import Games
from sparring.gateway.routes.generations import Generations
from sparring.gateway.routes.lifecycle import Lifecycle
from sparring.gateway.routes.models import Models
from sparring.gateway.routes.moves import Changes
from sparring.gateway.routes.revising import Revising
from sparring.registry.registry import Registry
from sparring.store.profile import GameSettings
from sparring.store.protocol import Store

__all__ = ["Parts"]


class Parts:
    """What the routes are made of, each made once."""

    def __init__(
        self,
        store: Store,
        registry: Registry,
        trainer_dir: Path | None,
        limits: Limits,
        stream_status: Path | None,
        defaults: GameSettings = GameSettings(),
    ) -> None:
        self.store = store
        self.limits = limits
        self.metrics = PrometheusMetrics()
        self.budget = Budget(limits.in_flight)
        self.games = Games(store, self.budget, defaults)
        self.models = Models(registry, self.games)
        self.live = Live(store, self.games, self.models, trainer_dir, stream_status)
        self.uploads = Uploads(store, self.games, self.metrics, limits, self.budget, self.live.changed)
        self.acting = Acting(self.games, self.models, self.budget)
        self.changes = Changes(registry, self.models, self.live, self.budget)
        self.testing = Testing(store, registry, self.games, self.models, self.live, self.budget)
        self.generations = Generations(store, self.games, self.budget)
        self.revising = Revising(store, self.games, self.live, self.budget)
        self.settings = SettingsOfGames(store, self.games, self.budget, self.live)
        self.lifecycle = Lifecycle(store, self.games, self.models, self.live, self.uploads, self.acting)

    @contextlib.asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        pushing = asyncio.create_task(self.live.run())
        try:
            yield
        finally:
            pushing.cancel()
            self.uploads.close()
            self.models.close()
