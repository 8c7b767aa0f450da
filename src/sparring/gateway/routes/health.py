"""For load balancers and Prometheus."""

import asyncio
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec
from prometheus_client.core import Metric
from starlette.requests import Request
from starlette.responses import Response

from sparring.api import Snapshot
from sparring.errors import SparringError
from sparring.gateway.endpoint import JSON, HTTPProblem, answer
from sparring.gateway.openapi import Operation
from sparring.gateway.prometheus import counter, gauge
from sparring.stream.stream_store import StreamedStore

if TYPE_CHECKING:
    from sparring.gateway.parts import Parts

__all__ = ["operations"]

HEALTH_TIMEOUT = 2.0


class Health(msgspec.Struct, frozen=True):
    status: str


def operations(parts: "Parts") -> list[Operation]:
    state = _State(parts)
    return [
        Operation("GET", "/healthz", state.health, "Whether uploads can be stored", {JSON: Health}),
        Operation("GET", "/metrics", state.get_metrics, "Prometheus metrics", {"text/plain": str}),
    ]


class _State:
    def __init__(self, parts: "Parts") -> None:
        self._parts = parts

    async def health(self, request: Request) -> Response:
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT):
                await self._parts.games.all()
        except (TimeoutError, OSError, SparringError) as error:
            raise HTTPProblem(503, f"the store does not answer: {error or 'it takes too long'}") from error
        if (why := self._parts.uploads.failing) is not None:
            raise HTTPProblem(503, f"the newest upload could not be written: {why}", headers={"retry-after": "10"})
        return answer(Health("ok"))

    async def get_metrics(self, request: Request) -> Response:
        rows = [(game.name, await self._parts.live.snapshot(game.name)) for game in await self._parts.games.all()]
        totals = {
            "fragments": "Fragments in the store.",
            "steps": "Steps in the store.",
            "players": "Players in the store.",
            "bytes": "Bytes of columns in the store.",
            "rejected": "Fragments ever put into quarantine.",
        }
        latest = [({"game": game}, s.latest) for game, s in rows if s.latest is not None]
        lags = [({"game": game}, s.trainer.lag) for game, s in rows if s.trainer is not None]
        taken = [
            *(
                gauge(f"sparring_store_{name}", about, [({"game": game}, getattr(s.stats, name)) for game, s in rows])
                for name, about in totals.items()
            ),
            gauge("sparring_ingest_in_flight_bytes", "Bytes of request bodies in memory.", self._parts.budget.used),
            gauge("sparring_watchers", "Open event streams.", self._parts.live.watchers),
            gauge("sparring_latest_version", "The version that players get (stable).", latest),
            gauge("sparring_trainer_lag_fragments", "Fragments stored that the trainer has not taken in.", lags),
            *_play_metrics(rows),
            *self._stream_metrics(),
        ]
        return Response(self._parts.metrics.text(taken), media_type="text/plain; version=0.0.4")

    def _stream_metrics(self) -> Iterator[Metric]:
        """Of the way over a stream, if there is one: what this gateway put there, and the job behind it."""
        counts: dict[str, tuple[str, float]] = {}
        if isinstance(self._parts.store, StreamedStore):
            put = self._parts.store.producer.counts
            counts |= {
                "put_fragments": ("Fragments that this gateway put onto the stream.", put.fragments),
                "put_records": ("Records that they made.", put.records),
                "put_bytes": ("Bytes of these records.", put.bytes),
                "put_retries": ("Times that the stream did not take a record at once.", put.retried),
            }
        if (job := self._parts.live.stream()) is not None:
            behind = job.behind(time.time())
            yield gauge("sparring_stream_lag_seconds", "How far the ingest job is behind the stream's writers.", behind)
            about = "How long the stream keeps a record, read or not."
            yield gauge("sparring_stream_retention_seconds", about, job.retention)
            counts |= {
                "missing_seconds": ("Play that the stream forgot before it was read, in time.", job.missing),
                "batches": ("Batches of the ingest job since it began.", job.batches),
                "records": ("Records that it read.", job.records),
                "bytes": ("Bytes of these records.", job.bytes),
                "steps": ("Steps that it brought into the store.", job.steps),
                "duplicates": ("Fragments that were there already.", job.duplicates),
                "rejected": ("Fragments and records that it rejected.", job.rejected),
            }
        for name, (about, value) in counts.items():
            yield counter(f"sparring_stream_{name}", about, value)
            # The name up to the release 0.1.0, which had them as gauges: alerts and charts go on.
            yield gauge(f"sparring_stream_{name}", f"{about} (Use sparring_stream_{name}_total.)", value)


def _play_metrics(rows: list[tuple[str, Snapshot]]) -> Iterator[Metric]:
    """How people and bots do in each game, and whether it is learned."""
    whose = [({"game": game, "who": who}, getattr(s, who)) for game, s in rows for who in ("people", "bots")]
    yield gauge("sparring_steps", "Steps in the store, by who acted.", [(labels, p.steps) for labels, p in whose])
    means = [(labels, p.return_mean) for labels, p in whose if p.return_mean is not None]
    yield gauge("sparring_return_mean", "Mean return of the newest 20 finished episodes, by who acted.", means)
    active = [({"game": game}, s.active_players) for game, s in rows]
    yield gauge("sparring_active_players", "Players seen within the last 30 s.", active)
    failed = [({"game": game}, s.trainer.state.startswith("failed")) for game, s in rows if s.trainer is not None]
    yield gauge("sparring_trainer_failed", "1 while the trainer cannot learn the game, else 0.", failed)
