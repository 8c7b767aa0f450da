"""What the gateway counts of itself, for Prometheus. prometheus_client writes the text; the counters are ours. Its own
are locked, for threads, and would cost each upload 4.4 µs where these cost 0.8."""

import bisect
import itertools
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import psutil
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

__all__ = ["Histogram", "PrometheusMetrics", "Samples", "counter", "gauge", "rss"]

Samples = Iterable[tuple[Mapping[str, str], float]]  # labels and a value

ACK_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class Histogram:
    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """Each bound and how many values are not above it."""
        names = (*map(str, self.bounds), "+Inf")
        return list(zip(names, map(float, itertools.accumulate(self.counts)), strict=True))


class PrometheusMetrics:
    """Counters of this process. All are changed in the event loop's thread only."""

    def __init__(self) -> None:
        self.started = time.time()
        self.requests: Counter[tuple[str, str, int]] = Counter()
        self.fragments: Counter[str] = Counter({"accepted": 0, "duplicate": 0, "rejected": 0})
        self.steps = 0
        self.bytes = 0
        self.received = 0
        self.ack = Histogram(ACK_BUCKETS)

    def request(self, route: str, method: str, status: int) -> None:
        self.requests[route, method, status] += 1

    def accepted(self, stored: int, duplicates: int, rejected: int, steps: int, size: int) -> None:
        self.fragments["accepted"] += stored
        self.fragments["duplicate"] += duplicates
        self.fragments["rejected"] += rejected
        self.steps += steps
        self.bytes += size

    def text(self, taken: Iterable[Metric]) -> bytes:
        """All counters, and what the caller has `taken` at this moment."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Families([*self._families(), *taken]))
        return generate_latest(registry)

    def _families(self) -> Iterator[Metric]:
        requests = [
            ({"route": route, "method": method, "status": str(status)}, n)
            for (route, method, status), n in sorted(self.requests.items())
        ]
        fragments = [({"outcome": outcome}, n) for outcome, n in self.fragments.items()]
        yield counter("sparring_requests", "Requests by route, method and status.", requests)
        yield counter("sparring_ingest_fragments", "Fragments uploaded, by outcome.", fragments)
        yield counter("sparring_ingest_steps", "Steps of the accepted fragments.", self.steps)
        about = "Bytes of uploads with an accepted fragment, decompressed."
        yield counter("sparring_ingest_bytes", about, self.bytes)
        yield counter("sparring_ingest_received_bytes", "Bytes of upload bodies as they came.", self.received)
        about = "From an upload's first byte to its acknowledgement."
        yield HistogramMetricFamily("sparring_ingest_ack_seconds", about, self.ack.buckets(), self.ack.sum)
        yield gauge("process_start_time_seconds", "When the process started.", self.started)
        yield gauge("process_resident_memory_bytes", "Resident memory.", rss())


class _Families(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


def counter(name: str, about: str, samples: Samples | float) -> Metric:
    """Of what only grows while the process lives. Its samples are called `name_total`."""
    return _family(Metric(name, about, "counter"), f"{name}_total", samples)


def gauge(name: str, about: str, samples: Samples | float) -> Metric:
    return _family(Metric(name, about, "gauge"), name, samples)


def _family(family: Metric, name: str, samples: Samples | float) -> Metric:
    for labels, value in [({}, samples)] if isinstance(samples, int | float) else samples:
        family.add_sample(name, dict(labels), float(value))
    return family


def rss() -> int:
    """Resident bytes of this process."""
    return int(psutil.Process().memory_info().rss)
