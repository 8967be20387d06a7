"""Requests to an OpenAI-compatible endpoint: repeated where that helps, paced as the server asks, refused in one
line.

Only the standard library is used. One client may be used by several threads: when the server says that it is busy,
all of them wait.
"""

from __future__ import annotations

import email.utils
import http.client
import json
import os
import threading
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from trace_jax.config import ConfigError

FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0  # seconds before a request is repeated; each time twice as long
_PASSING = (408, 409, 425, 429, 500, 502, 503, 504, 529)  # states of a server that pass
_SHOWN = 2000  # characters of a refusal that are kept

Read = TypeVar("Read")


class Unreadable(ValueError):
    """A reply that does not hold what was asked for."""


class Refused(ConfigError):
    """The endpoint will not answer this request, however often it is asked.

    Attributes:
        code: HTTP status. body: what the server said, the beginning of it.
    """

    def __init__(self, message: str, code: int, body: str):
        super().__init__(message)
        self.code, self.body = code, body


class Closed(Exception):
    """Replies are no longer wanted."""


@dataclass(frozen=True)
class Server:
    """Where requests go.

    Attributes:
        url: base URL, such as http://localhost:8000/v1.
        key_variable: environment variable that holds the key; unset: requests carry none.
        timeout: seconds of one request. retries: of a request that failed or whose reply cannot be read.
        section, url_field: where the configuration has the URL, for messages.
        kept: what is not lost when the endpoint cannot be reached, for messages; empty: nothing is kept.
    """

    url: str
    key_variable: str
    timeout: float
    retries: int
    section: str
    url_field: str
    kept: str


class Client:
    """Chat completions of one server.

    Attributes:
        closing: set when replies are no longer wanted; ends waits between tries.
    """

    def __init__(
        self,
        server: Server,
        *,
        sleep: Callable[[float], Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.closing = threading.Event()
        self._server, self._sleep, self._clock = server, sleep or self.closing.wait, clock
        self._key = os.environ.get(server.key_variable, "")
        self._url = server.url.rstrip("/") + "/chat/completions"
        self._lock, self._open_at = threading.Lock(), -1.0

    def ask(self, request: Callable[[int], dict[str, Any]], read: Callable[[Any], Read]) -> Read:
        """What `read` makes of the reply.

        Args:
            request: body of try number 0, 1, ...; a reply that could not be read is best asked for with another seed.
            read: raises `Unreadable` for a reply without what was asked for; it gets the parsed JSON.

        Raises:
            Unreadable: no reply could be read. Refused: the endpoint refuses. Closed: see `closing`.
            ConfigError: it could not be reached however often it was tried.
        """
        server = self._server
        last: Exception | None = None
        waited = -1.0  # until when this thread has waited already
        for attempt in range(server.retries + 1):
            self._wait_until_open(waited)
            wait = None
            try:
                return read(self._post(request(attempt)))
            except Unreadable as error:
                last = error
                continue
            except urllib.error.HTTPError as error:
                if error.code not in _PASSING:
                    raise self._refusal(error) from None
                last, wait = error, asked_to_wait(error.headers.get("Retry-After"))
            except (OSError, http.client.HTTPException) as error:  # refused, reset, timed out, half a reply
                last = error
            if self.closing.is_set():
                break
            if attempt < server.retries:
                if wait is None:  # minutes may pass; a server that asks for time is at work
                    tries = f"up to {server.retries} more tries"
                    warnings.warn(f"{server.url} does not answer ({_reason(last)}): {tries}", stacklevel=2)
                waited = max(waited, self._pause(attempt, wait))
        if isinstance(last, Unreadable):
            raise last
        if self.closing.is_set():
            raise Closed
        raise ConfigError(
            f"`{server.section}.{server.url_field}` {server.url} did not answer after {server.retries + 1} tries "
            f"({_reason(last)}): mend that and give the command again"
            + (f", {server.kept} so far are kept" if server.kept else "")
        )

    def _pause(self, attempt: int, asked: float | None) -> float:
        """Waits before the next try, and says until when. A time that the server names holds for every thread."""
        seconds = min(LONGEST_WAIT, asked if asked is not None else FIRST_WAIT * 2**attempt)
        until = self._clock() + seconds
        if asked is not None:
            with self._lock:
                self._open_at = max(self._open_at, until)
        self._sleep(seconds)
        return until

    def _wait_until_open(self, waited: float) -> None:
        with self._lock:
            left = self._open_at - max(self._clock(), waited)
        if left > 0 and not self.closing.is_set():
            self._sleep(left)
        if self.closing.is_set():
            raise Closed

    def _post(self, body: dict[str, Any]) -> Any:
        headers = {"Content-Type": "application/json", "User-Agent": "trace-jax"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(self._url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=self._server.timeout) as reply:
            raw = reply.read()
        try:
            return json.loads(raw)
        except ValueError as error:
            raise Unreadable(f"no JSON: {raw[:80]!r}") from error

    def _refusal(self, error: urllib.error.HTTPError) -> Refused:
        server = self._server
        mends = {
            401: f"put a valid key into ${server.key_variable}, or its name into `{server.section}.key_variable`",
            403: f"put a key that may use the model into ${server.key_variable}",
            404: f"check `{server.section}.{server.url_field}` (it ends in /v1 as a rule) and `{server.section}.model`",
        }
        mend = mends.get(error.code, f"check `{server.section}.{server.url_field}` and `{server.section}.model`")
        where = f"`{server.section}.{server.url_field}` {server.url}"
        body = error.read(_SHOWN).decode(errors="replace")
        return Refused(f"{where} refuses ({error.code} {error.reason}): {mend}", error.code, body)


def _reason(error: Exception | None) -> object:
    return getattr(error, "reason", None) or error


def message_of(reply: Any) -> dict[str, Any]:
    """The message of a chat completion. Unreadable if there is none."""
    try:
        message = reply["choices"][0]["message"]
    except (KeyError, IndexError, TypeError) as error:
        raise Unreadable(f"no chat completion: {str(reply)[:80]!r}") from error
    if not isinstance(message, dict):
        raise Unreadable(f"no message: {str(message)[:80]!r}")
    return message


def asked_to_wait(header: str | None) -> float | None:
    """Seconds that a Retry-After header asks for, given as a number or as a date."""
    if header is None:
        return None
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(header).timestamp() - time.time())
    except (ValueError, TypeError):
        return None
