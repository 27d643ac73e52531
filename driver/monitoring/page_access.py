"""Access control for the live page, based on the head of each HTTP request. Pure: no I/O, no clock.

A connection to the page's port is not trusted: it may come from a browser that another site redirected, from a scanner,
or from another user of this machine. Requests are refused as follows:

    a Host header with a foreign name      DNS rebinding: another site's name that now resolves to this address
    an Origin or fetch from another site   another site that reads this page through the user's browser
    a missing or wrong token               also on loopback, because other users of this machine are not trusted.
                                           The page itself contains no data and needs no token
    another method or path                 the page is read-only

The page reads the token from the fragment of its link, the part after ``#``, which browsers do not transmit, and sends
it in a header.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Collection, Mapping
from dataclasses import dataclass

HEAD_LIMIT = 8 * 1024  # maximum size of the request line and headers, in bytes
# Accepted values of Sec-Fetch-Site. The empty value stands for a missing header, as in older browsers.
SAME_SITE = ("same-origin", "")


@dataclass(frozen=True)
class PageRefusal:
    """Refusal of an HTTP request, with the reason.

    Args:
        status: HTTP status code and phrase.
    """

    status: str
    why: str


@dataclass(frozen=True)
class RequestGuard:
    """Access control for HTTP requests to the live page.

    Args:
        token: access token, never empty.
        names: names of this machine, in lower case, that are accepted in addition to its addresses.
    """

    token: str
    names: Collection[str] = ("localhost",)

    def answer(self, head: bytes) -> str | PageRefusal:
        """Decide how to answer a request: ``page``, ``events``, or a refusal.

        Args:
            head: the request line and headers, without the empty line that ends them.
        """
        try:
            first, *lines = head.decode("ascii").split("\r\n")
            method, target, version = first.split(" ")
        except (UnicodeDecodeError, ValueError):
            return PageRefusal("400 Bad Request", "not a request of a browser")
        if not version.startswith("HTTP/1."):
            return PageRefusal("505 HTTP Version Not Supported", "use HTTP/1.1")
        headers: dict[str, str] = {}
        for line in filter(None, lines):
            name, colon, value = line.partition(":")
            if not colon or name.lower() in headers:
                return PageRefusal("400 Bad Request", "a header is missing or repeated")
            headers[name.lower()] = value.strip()
        if not is_ours(headers.get("host", ""), self.names):
            why = "open the page by its address, or as localhost; other names are rejected for security"
            return PageRefusal("403 Forbidden", why)
        if method != "GET":
            return PageRefusal("405 Method Not Allowed", "this page is read-only")
        match target:
            case "/":
                # The page itself contains no data, so it is also served to users who followed a link from another site.
                return "page"
            case "/events" if _foreign(headers):
                return PageRefusal("403 Forbidden", "the request came from another site")
            case "/events":
                given = headers.get("authorization", "").removeprefix("Bearer ")
                if not self.token or not hmac.compare_digest(given.encode(), self.token.encode()):
                    why = "use the link in the driver's log, including the part after #; elasticrun logs shows it"
                    return PageRefusal("403 Forbidden", why)
                return "events"
            case _:
                return PageRefusal("404 Not Found", "no such page: open /")


def is_ours(host: str, names: Collection[str]) -> bool:
    """Return whether the Host header of a request names this machine.

    IP addresses are always accepted. A host name must be one of ``names``, because DNS rebinding can make any name
    resolve to this machine.
    """
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
    if name.lower() in names:
        return True
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def _foreign(headers: Mapping[str, str]) -> bool:
    origin = headers.get("origin", "").lower()
    other = bool(origin) and origin != f"http://{headers['host']}".lower()
    return other or headers.get("sec-fetch-site", "") not in SAME_SITE
