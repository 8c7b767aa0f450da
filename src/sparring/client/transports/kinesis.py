"""Play straight onto a Kinesis stream, without a gateway in between. A stream answers no questions: bots and actions
come from the gateway that `Client(…, models=…)` names."""

from concurrent.futures import TimeoutError

from sparring.api import Uploaded
from sparring.aws.kinesis import Kinesis, StreamBusy
from sparring.client.transports.base import Transport, Unavailable, Upload, UploadTooLarge
from sparring.experience import wire
from sparring.games import Game
from sparring.stream.producer import Producer

__all__ = ["KinesisTransport"]


class KinesisTransport(Transport):
    def __init__(self, address: str, timeout: float = 10.0) -> None:
        self.address, self.timeout = address, timeout
        self._producer = Producer(Kinesis(address, timeout), patience=timeout)

    def register(self, game: Game, timeout: float | None = None) -> Game:
        """Nothing to do: a record carries the declarations of its games."""
        return game

    def upload(self, game: Game, upload: Upload, timeout: float | None = None) -> Uploaded:
        seconds = self.timeout if timeout is None else timeout
        try:
            outcomes = self._producer.submit(game, upload.fragments, upload.encoded).result(seconds)
        except TimeoutError:
            raise Unavailable(f"{self.address} did not take it within {seconds:g} s") from None
        except StreamBusy as error:
            raise Unavailable(str(error)) from error
        except wire.TooLarge as error:  # a single step of it; the rest is found by halving
            raise UploadTooLarge(str(error), status=413) from error
        return Uploaded(len(outcomes), 0)

    def close(self) -> None:
        self._producer.close(timeout=1.0)  # the uploader has waited for what it sent
