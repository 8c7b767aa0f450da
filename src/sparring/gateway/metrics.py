"""What the gateway counts of itself, in Prometheus' text format. Small enough to be written by hand."""

import bisect
import time
from collections import Counter
from collections.abc import Iterable, Mapping

import psutil

__all__ = ["Histogram", "Metrics", "rss"]

ACK_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class Histogram:
    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value


class Metrics:
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

    def text(self, gauges: Mapping[str, tuple[str, Iterable[tuple[Mapping[str, str], float]]]]) -> str:
        """All counters, and `gauges`: name → (help, samples), taken at this moment by the caller."""
        lines: list[str] = []
        requests = [
            ({"route": route, "method": method, "status": str(status)}, float(n))
            for (route, method, status), n in sorted(self.requests.items())
        ]
        _family(lines, "sparring_requests_total", "counter", "Requests by route, method and status.", requests)
        fragments = [({"outcome": outcome}, float(n)) for outcome, n in self.fragments.items()]
        _family(lines, "sparring_ingest_fragments_total", "counter", "Fragments uploaded, by outcome.", fragments)
        for name, about, value in (
            ("sparring_ingest_steps_total", "Steps of the accepted fragments.", self.steps),
            ("sparring_ingest_bytes_total", "Bytes of uploads with an accepted fragment, decompressed.", self.bytes),
            ("sparring_ingest_received_bytes_total", "Bytes of upload bodies as they came.", self.received),
        ):
            _family(lines, name, "counter", about, [({}, float(value))])
        _histogram(
            lines, "sparring_ingest_ack_seconds", "From an upload's first byte to its acknowledgement.", self.ack
        )
        _family(lines, "process_start_time_seconds", "gauge", "When the process started.", [({}, self.started)])
        _family(lines, "process_resident_memory_bytes", "gauge", "Resident memory.", [({}, float(rss()))])
        for name, (about, samples) in gauges.items():
            _family(lines, name, "gauge", about, samples)
        return "\n".join(lines) + "\n"


def rss() -> int:
    """Resident bytes of this process."""
    return int(psutil.Process().memory_info().rss)


def _family(
    lines: list[str], name: str, kind: str, about: str, samples: Iterable[tuple[Mapping[str, str], float]]
) -> None:
    lines += [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]
    lines += [f"{name}{_labels(labels)} {_number(value)}" for labels, value in samples]


def _histogram(lines: list[str], name: str, about: str, histogram: Histogram) -> None:
    lines += [f"# HELP {name} {about}", f"# TYPE {name} histogram"]
    total = 0
    for bound, count in zip((*map(str, histogram.bounds), "+Inf"), histogram.counts, strict=True):
        total += count
        lines.append(f'{name}_bucket{{le="{bound}"}} {total}')
    lines += [f"{name}_sum {histogram.sum:.6f}", f"{name}_count {total}"]


def _labels(labels: Mapping[str, str]) -> str:
    """Label values here are routes, methods and checked names: nothing in them needs escaping."""
    return "{" + ",".join(f'{key}="{value}"' for key, value in labels.items()) + "}" if labels else ""


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)
