"""Client of a cloud's metadata server, which is reachable at a link-local address on every machine.

The client never uses a proxy.
"""

from __future__ import annotations

import email.utils
import http.client
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from elastic.driver.preemption.source import SourceError

ANSWER_S = 2.0
LIMIT = 1 << 20  # maximum size of a response, in bytes
PIECE = 1 << 16


@dataclass(frozen=True)
class Answer:
    """Response of a metadata server.

    Args:
        skew_s: seconds by which the server's clock is ahead of the clock of this machine.
    """

    status: int
    headers: Mapping[str, str]  # header names are in lower case
    body: bytes
    skew_s: float

    @property
    def text(self) -> str:
        return self.body.decode(errors="replace").strip()

    def json(self) -> Any:
        """Return the body, decoded from JSON.

        Raises:
            SourceError: the body is not JSON.
        """
        try:
            return json.loads(self.body)
        except ValueError as error:
            raise SourceError(
                f"the metadata service sent invalid JSON: {self.text[:80]!r}. Check for a proxy in front of it"
            ) from error

    def ends_at(self, moment: float) -> float:
        """Convert a time on the server's clock to this machine's clock. Both are in seconds since 1970."""
        return moment - self.skew_s


class MetadataServer:
    """Client of the metadata server at ``endpoint``, for example http://169.254.169.254."""

    def __init__(self, endpoint: str) -> None:
        try:
            parts = urlsplit(endpoint if "://" in endpoint else f"http://{endpoint}")
            host, port = parts.hostname, parts.port or 80
        except ValueError:
            host = None
        if host is None or parts.scheme != "http":
            raise SourceError(
                f"{endpoint!r} is not an address of a metadata server: pass http://HOST[:PORT]"
            )
        self._host, self._port = host, port
        self._prefix = parts.path.rstrip("/")

    def ask(
        self,
        path: str,
        headers: Mapping[str, str],
        *,
        method: str = "GET",
        body: bytes | None = None,
        within_s: float = ANSWER_S,
    ) -> Answer:
        """Send one request on a new connection, and return the response.

        Raises:
            SourceError: no complete response arrived within ``within_s`` seconds.
        """
        deadline = time.monotonic() + within_s
        connection = http.client.HTTPConnection(self._host, self._port, timeout=within_s)
        try:
            connection.request(method, self._prefix + path, body=body, headers=dict(headers))
            response = connection.getresponse()
            pieces: list[bytes] = []
            while piece := response.read1(PIECE):
                pieces.append(piece)
                if time.monotonic() > deadline or sum(map(len, pieces)) > LIMIT:
                    raise SourceError(
                        "the metadata service closed the connection before its response was complete: check the"
                        " network of this machine"
                    )
            named = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, named, b"".join(pieces), _skew_s(named))
        except (OSError, http.client.HTTPException, ValueError) as error:
            # A ValueError is raised if part of an earlier response, such as a token, is not valid in a request.
            raise SourceError(str(error) or type(error).__name__) from error
        finally:
            connection.close()


def _skew_s(headers: Mapping[str, str]) -> float:
    """Return the seconds by which the server's clock, as given in the Date header, is ahead of this machine's clock.

    A difference of less than two seconds is treated as 0, because the header contains whole seconds.
    """
    try:
        skew = email.utils.parsedate_to_datetime(headers["date"]).timestamp() - time.time()
    except (KeyError, ValueError):
        return 0.0
    return skew if abs(skew) >= 2.0 else 0.0
