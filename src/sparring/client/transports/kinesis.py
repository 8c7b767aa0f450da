"""A client that writes to a stream itself: to the uploader it looks like a server. There is nobody to ask on a stream,
so bots and actions come from `models`, the address of a gateway, if there is one."""

from concurrent.futures import TimeoutError

import msgspec

from sparring.api import Problem, Uploaded
from sparring.aws.kinesis import Kinesis, StreamBusy
from sparring.client.transports.http import MAX_ANSWER, Answer, Refused, Server, Unavailable
from sparring.errors import InputError
from sparring.experience import wire
from sparring.games import Game
from sparring.stream.producer import Producer

__all__ = ["StreamServer"]

MAX_BODY = 1 << 30  # an upload of our own


class StreamServer(Server):
    def __init__(self, address: str, timeout: float = 10.0, models: str | None = None) -> None:
        self.url, self.timeout = address, timeout
        self._models = None if models is None else Server(models, timeout)
        self._producer = Producer(Kinesis(address, timeout), patience=timeout)

    def request(
        self,
        method: str,
        *path: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        limit: int = MAX_ANSWER,
        timeout: float | None = None,
        query: str = "",
    ) -> Answer:
        match method, *path:
            case "PUT", "games", _ if body is not None:
                self.game = Game.from_json(body)
                return self._answer(self.game)
            case "POST", "games", _, "fragments" if body is not None:
                return self._upload(body, self.timeout if timeout is None else timeout)
        if self._models is not None:
            return self._models.request(
                method, *path, body=body, headers=headers, limit=limit, timeout=timeout, query=query
            )
        detail = f"{self.url} is a stream, which only takes play: pass models='http://…', a gateway, for the rest"
        raise Refused(Problem("Not Implemented", 501, detail))

    def close(self) -> None:
        self._producer.close(timeout=1.0)  # the uploader has waited for what it sent
        if self._models is not None:
            self._models.close()

    def _upload(self, body: bytes, timeout: float) -> Answer:
        assert self.game is not None  # the client says which; its declaration travels with the play
        try:
            fragments = wire.decode(wire.decompress(body, "gzip", MAX_BODY))
        except InputError as error:  # as a gateway would say it: the body comes from a disk
            raise Refused(Problem("Unprocessable Content", 422, str(error))) from error
        try:
            outcomes = self._producer.submit(self.game, fragments).result(timeout)
        except TimeoutError:
            raise Unavailable(f"{self.url} did not take it within {timeout:g} s") from None
        except StreamBusy as error:
            raise Unavailable(str(error)) from error
        except InputError as error:
            raise Refused(Problem("Content Too Large", 413, str(error))) from error
        return self._answer(Uploaded(len(outcomes), 0))

    def _answer(self, message: object) -> Answer:
        return Answer(200, {"content-type": "application/json"}, msgspec.json.encode(message), self.url)
