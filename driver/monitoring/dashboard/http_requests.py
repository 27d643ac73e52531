"""Decides what is answered to a request for the live page. Pure: the head of a request goes in, an answer comes out.

Whoever may open a connection to the page's port is a stranger: a browser that some other site has sent here, a scanner,
a user of this machine. What is refused, and why:

    a Host that is a name, and not ours     DNS rebinding: a site's own name that leads to this address now
    an Origin, or a fetch, of another site  a page elsewhere that reads this one with the user's browser
    no token, or a wrong one                on loopback too: other users of this machine are strangers. The page itself,
                                            which holds nothing, needs none
    another method or path                  there is nothing to be done here

The page sends the token in a header, from the part of its link behind ``#``, which browsers send to nobody.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Collection, Mapping
from dataclasses import dataclass

HEAD_LIMIT = 8 * 1024  # bytes
SAME_SITE = ("same-origin", "")  # of a fetch; older browsers do not say


@dataclass(frozen=True)
class PageRefusal:
    """``status`` is one of HTTP's."""

    status: str
    why: str


@dataclass(frozen=True)
class Guard:
    """``token`` is never empty. ``names``: of this machine, in lower case, besides its addresses."""

    token: str
    names: Collection[str] = ("localhost",)

    def answer(self, head: bytes) -> str | PageRefusal:
        """``page`` or ``events``, or why not. ``head``: all up to the empty line."""
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
                return "page"  # also to who follows a link that stands on another site
            case "/events" if _foreign(headers):
                return PageRefusal("403 Forbidden", "the request came from another site")
            case "/events":
                given = headers.get("authorization", "").removeprefix("Bearer ")
                if not self.token or not hmac.compare_digest(given.encode(), self.token.encode()):
                    why = "use the link in the driver's log, including the part after #; elasticrun logs shows it"
                    return PageRefusal("403 Forbidden", why)
                return "events"
            case _:
                return PageRefusal("404 Not Found", "the only page is /")


def is_ours(host: str, names: Collection[str]) -> bool:
    """Of the Host of a request. An address can't be made to lead elsewhere, a name can: it has to be of ``names``."""
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
