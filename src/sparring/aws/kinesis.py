"""The Kinesis API, as much of it as we use: one stream by its address, signed JSON requests over urllib3.

What comes back is an answer, InputError (the request is wrong, and would be again), or StreamBusy (try again).
"""

import email.utils
import hashlib
import itertools
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlsplit

import msgspec
import urllib3

from sparring.aws import credentials as chain
from sparring.aws.sign import Credentials, endpoint, sign
from sparring.errors import Busy, InputError

__all__ = [
    "IteratorExpired",
    "Kinesis",
    "PositionUnknown",
    "Put",
    "PutResult",
    "Record",
    "RecordPage",
    "Shard",
    "StreamBusy",
    "StreamSummary",
    "TooLargeRequest",
    "default_directory",
]

T = TypeVar("T")
HASHES = 1 << 128  # hash keys run from 0 to this, exclusive
KIND = "application/x-amz-json-1.1"
BUSY = (
    "ProvisionedThroughputExceededException",
    "LimitExceededException",
    "ThrottlingException",
    "KMSThrottlingException",
    "ResourceInUseException",
    "InternalFailure",
    "InternalFailureException",
    "ServiceUnavailable",
    "RequestTimeout",
    "ExpiredTokenException",  # the source has new ones soon
)
CLOCK = ("InvalidSignatureException", "SignatureDoesNotMatch", "RequestExpired", "RequestTimeTooSkewed")
SKEW = 60.0  # seconds of difference from which on a refused signature is put down to our clock
LOOPBACK = ("127.0.0.1", "::1", "localhost")
FIRST_DELAY, MAX_DELAY = 0.1, 5.0
PATIENCE = 60.0  # seconds of tries


def default_directory(data: Path, stream: str, store: str) -> Path:
    """A place of its own for each pair: the checkpoint of another stream or store would skip records."""
    return data / "ingest" / f"{urlsplit(stream).netloc}-{hashlib.sha256(f'{stream} {store}'.encode()).hexdigest()[:8]}"


class StreamBusy(Busy):
    """The stream did not take or give it now. It may be asked again."""


class TooLargeRequest(InputError):
    """More than this server takes in one request."""


class IteratorExpired(InputError):
    """It lives for five minutes: ask for another one."""


class PositionUnknown(InputError):
    """The sequence number is none of this stream's."""


class Range(msgspec.Struct, frozen=True, rename="pascal"):
    starting_hash_key: str
    ending_hash_key: str

    @property
    def width(self) -> int:
        return int(self.ending_hash_key) - int(self.starting_hash_key) + 1


class Sequences(msgspec.Struct, frozen=True, rename="pascal"):
    starting_sequence_number: str
    ending_sequence_number: str | None = None


class Shard(msgspec.Struct, frozen=True, rename="pascal"):
    shard_id: str
    hash_key_range: Range
    sequence_number_range: Sequences
    parent_shard_id: str | None = None
    adjacent_parent_shard_id: str | None = None

    @property
    def open(self) -> bool:
        return self.sequence_number_range.ending_sequence_number is None

    @property
    def parents(self) -> list[str]:
        return [shard for shard in (self.parent_shard_id, self.adjacent_parent_shard_id) if shard is not None]


class Put(msgspec.Struct, frozen=True, rename="pascal"):
    data: bytes
    partition_key: str
    explicit_hash_key: str


class PutResult(msgspec.Struct, frozen=True, rename="pascal"):
    sequence_number: str | None = None
    shard_id: str | None = None
    error_code: str | None = None
    error_message: str | None = None


class Record(msgspec.Struct, frozen=True, rename="pascal"):
    sequence_number: str
    approximate_arrival_timestamp: float
    data: bytes
    partition_key: str


class RecordPage(msgspec.Struct, frozen=True, rename="pascal"):
    """Records, and where to go on; no iterator: the shard is closed and this was its end."""

    records: list[Record]
    next_shard_iterator: str | None = None
    millis_behind_latest: int = 0


class StreamSummary(msgspec.Struct, frozen=True, rename="pascal"):
    stream_name: str
    stream_status: str
    retention_period_hours: int
    open_shard_count: int


class _Fault(msgspec.Struct):
    type: str = msgspec.field(default="", name="__type")
    message: str = ""
    Message: str = ""


class _Puts(msgspec.Struct, frozen=True, rename="pascal"):
    records: list[PutResult]


class _Shards(msgspec.Struct, frozen=True, rename="pascal"):
    shards: list[Shard]
    next_token: str | None = None


class _Iterator(msgspec.Struct, frozen=True, rename="pascal"):
    shard_iterator: str


class _Description(msgspec.Struct, frozen=True, rename="pascal"):
    stream_description_summary: StreamSummary


class Kinesis:
    """`kinesis://NAME?region=eu-central-1`, optionally with `&endpoint=` (another
    server that speaks the API) and `&lanes=` (see the producer). `credentials`: where they come from. A game has the
    small chain; servers pass `sdk.credentials`."""

    def __init__(
        self, address: str, timeout: float = 20.0, credentials: Callable[[], Credentials | None] = chain.credentials
    ) -> None:
        self.address, self.timeout, self._source = address, timeout, credentials
        parts = urlsplit(address)
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        unknown = options.keys() - {"region", "endpoint", "lanes"}
        if parts.scheme != "kinesis" or not parts.netloc or parts.path.strip("/") or unknown:
            wrong = f"; {', '.join(sorted(unknown))} is unknown" if unknown else ""
            raise InputError(f"{address!r} is not a stream's address{wrong}: write kinesis://NAME?region=eu-central-1")
        if "@" in parts.netloc:
            raise InputError("credentials do not belong into an address: use the environment or AWS_PROFILE")
        self.stream = parts.netloc
        region = options.get("region") or chain.region()
        if region is None and "endpoint" not in options:
            raise InputError(f"{address}: in which region? Write kinesis://{self.stream}?region=eu-central-1")
        self.region = region or "us-east-1"
        self.endpoint = options.get("endpoint", endpoint("kinesis", self.region)).rstrip("/")
        if urlsplit(self.endpoint).scheme not in ("http", "https") or not urlsplit(self.endpoint).hostname:
            raise InputError(f"{address}: the endpoint is {self.endpoint!r}, write it like http://127.0.0.1:4567")
        lanes = options.get("lanes", "64")
        if not (lanes.isdecimal() and 1 <= int(lanes) <= 500):
            raise InputError(f"{address}: lanes must be 1..500, got {lanes!r}")
        self.lanes = int(lanes)
        self._local = urlsplit(self.endpoint).hostname in LOOPBACK
        self._skew = 0.0  # seconds that the server's clock is ahead of ours
        self._pool = urllib3.PoolManager(maxsize=4, retries=False)

    def close(self) -> None:
        self._pool.clear()

    def put(self, records: list[Put]) -> list[PutResult]:
        """One try; a result per record, some of which may be errors."""
        results = self._decode(self._call("PutRecords", {"Records": records}), _Puts).records
        if len(results) != len(records):  # which of them landed is not known: all are sent again
            message = f"{len(results)} results for {len(records)} records"
            raise StreamBusy(f"{self.endpoint} did not answer like Kinesis: {message}")
        return results

    def iterator(self, shard: str, after: str | None) -> str:
        """After this sequence number; none: from the oldest record there is."""
        asked = {"ShardId": shard, "ShardIteratorType": "TRIM_HORIZON"}
        if after is not None:
            asked |= {"ShardIteratorType": "AFTER_SEQUENCE_NUMBER", "StartingSequenceNumber": after}
        return self._ask("GetShardIterator", asked, _Iterator).shard_iterator

    def page(self, iterator: str, limit: int) -> RecordPage:
        return self._ask("GetRecords", {"ShardIterator": iterator, "Limit": limit}, RecordPage, stream=False)

    def shards(self) -> list[Shard]:
        """All that may still hold records, closed ones too."""
        found = self._ask("ListShards", {}, _Shards)
        shards = list(found.shards)
        while found.next_token is not None:
            found = self._ask("ListShards", {"NextToken": found.next_token}, _Shards, stream=False)
            shards += found.shards
        return shards

    def summary(self, patience: float = PATIENCE) -> StreamSummary:
        return self._ask("DescribeStreamSummary", {}, _Description, patience=patience).stream_description_summary

    def create(self, shards: int, retention: int) -> None:
        """Active when it returns."""
        self._ask("CreateStream", {"ShardCount": shards}, None)
        self.wait_active()
        self.retain(retention)

    def retain(self, hours: int) -> None:
        now = self.summary().retention_period_hours
        if hours != now:
            action = "IncreaseStreamRetentionPeriod" if hours > now else "DecreaseStreamRetentionPeriod"
            self._ask(action, {"RetentionPeriodHours": hours}, None)
            self.wait_active()

    def wait_active(self, seconds: float = 300.0) -> None:
        until = time.monotonic() + seconds
        while (status := self.summary().stream_status) != "ACTIVE":
            if time.monotonic() > until:
                raise StreamBusy(f"the stream {self.stream} is {status} since {seconds:g} s")
            time.sleep(0.2)

    def reshard(self, count: int, on_progress: Callable[[int], None] = lambda shards: None) -> None:
        """Splits the widest shards, or merges the narrowest neighbours, until there are `count`.
        `on_progress` hears each step.

        One at a time, as the service wants it; unlike its UpdateShardCount any number can be reached.
        """
        while len(now := sorted(filter(lambda s: s.open, self.shards()), key=_start)) != count:
            on_progress(len(now))
            if len(now) < count:
                widest = max(now, key=lambda s: s.hash_key_range.width)
                middle = _start(widest) + widest.hash_key_range.width // 2
                asked = {"ShardToSplit": widest.shard_id, "NewStartingHashKey": str(middle)}
                self._ask("SplitShard", asked, None)
            else:
                pairs = itertools.pairwise(now)
                one, two = min(pairs, key=lambda p: p[0].hash_key_range.width + p[1].hash_key_range.width)
                self._ask("MergeShards", {"ShardToMerge": one.shard_id, "AdjacentShardToMerge": two.shard_id}, None)
            self.wait_active()
        on_progress(count)

    def _ask(
        self, action: str, asked: dict[str, Any], kind: type[T] | None, stream: bool = True, patience: float = PATIENCE
    ) -> T:
        """With patience: tried again while the stream is busy."""
        delay, until = FIRST_DELAY, time.monotonic() + patience
        while True:
            try:
                body = self._call(action, asked, stream)
                return self._decode(body, kind) if kind is not None else None  # type: ignore[return-value]
            except StreamBusy:
                if time.monotonic() + delay > until:
                    raise
                time.sleep(delay * random.uniform(0.5, 1.0))
                delay = min(2 * delay, MAX_DELAY)

    def _call(self, action: str, asked: dict[str, Any], stream: bool = True) -> bytes:
        body = msgspec.json.encode({"StreamName": self.stream, **asked} if stream else asked)
        headers = {"Content-Type": KIND, "X-Amz-Target": f"Kinesis_20131202.{action}"}
        url, now = f"{self.endpoint}/", time.time() + self._skew
        signed = sign("POST", url, headers, body, "kinesis", self.region, self._credentials(), now=now)
        timeout = urllib3.Timeout(connect=min(5.0, self.timeout), read=self.timeout)
        try:
            answer = self._pool.request("POST", url, body=body, headers=signed, timeout=timeout, redirect=False)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            reason = error.__cause__ if isinstance(error.__cause__, OSError) else type(error).__name__
            raise StreamBusy(f"{self.endpoint} is not reachable: {reason}") from None  # causes quote signed headers
        if answer.status == 200:
            return answer.data
        raise self._fault(action, answer.status, answer.data, answer.headers.get("date"))

    def _credentials(self) -> Credentials:
        if self._local and "AWS_ACCESS_KEY_ID" not in os.environ:
            return Credentials("local", "local")  # a server on this machine, for tests: it takes any
        try:
            found = self._source()
        except chain.CredentialsError as error:
            raise StreamBusy(str(error)) from error
        if found is None:
            raise InputError(chain.NO_CREDENTIALS)
        return found

    def _fault(self, action: str, status: int, body: bytes, date: str | None) -> Exception:
        try:
            fault = msgspec.json.decode(body, type=_Fault)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            fault = _Fault()
        code, text = fault.type.rpartition("#")[2], (fault.message or fault.Message)[:500]
        message = f"{action} of {self.stream}: {code or status} {text}".rstrip()
        there = _server_time(date)
        if code in CLOCK and there is not None and abs(there - time.time() - self._skew) > SKEW:
            self._skew = there - time.time()  # our clock jumped: its own Date makes the next try good
            return StreamBusy(f"{message} (this machine's clock is {-self._skew:+.0f} s off)")
        if code == "ResourceInUseException" and action == "CreateStream":
            return InputError(f"the stream {self.stream!r} is there already: `sparring stream status` shows it")
        if status >= 500 or status == 429 or code in BUSY:
            return StreamBusy(message)
        if code == "ExpiredIteratorException":
            return IteratorExpired(message)
        if action == "GetShardIterator" and code == "InvalidArgumentException":
            return PositionUnknown(message)
        if code == "ResourceNotFoundException":
            create = f"`sparring stream create '{self.address}'` makes it"
            return InputError(f"there is no stream {self.stream!r} at {self.endpoint}: {create}. ({text})")
        if status == 413 or (action == "PutRecords" and code in ("InvalidArgumentException", "ValidationException")):
            return TooLargeRequest(message)
        return InputError(message)

    def _decode(self, body: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise StreamBusy(f"{self.endpoint} did not answer like Kinesis: {error}") from error


def _start(shard: Shard) -> int:
    return int(shard.hash_key_range.starting_hash_key)


def _server_time(date: str | None) -> float | None:
    """What the answer's Date header says."""
    try:
        return None if date is None else email.utils.parsedate_to_datetime(date).timestamp()
    except ValueError:
        return None
