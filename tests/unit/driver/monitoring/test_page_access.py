"""Authorization of requests to the live page: from the head of a request to an answer or a rejection."""

from __future__ import annotations

import pytest

from elastic.driver.monitoring.page_access import PageRefusal, RequestGuard

TOKEN = "0123456789abcdef0123456789abcdef"


def answer_to(
    path: str = "/events", *, host: str = "10.0.0.5:8080", method: str = "GET", **headers: str
):
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return RequestGuard(TOKEN, {"localhost", "node7"}).answer("\r\n".join(lines).encode())


def test_request_with_the_token_gets_the_events():
    assert answer_to(Authorization=f"Bearer {TOKEN}") == "events"
    assert answer_to(Authorization=f"Bearer {TOKEN}", Origin="http://10.0.0.5:8080") == "events"
    assert answer_to(Authorization=f"Bearer {TOKEN}", Sec_Fetch_Site="same-origin") == "events"


@pytest.mark.parametrize("given", ["", "Bearer ", "Bearer 0123", TOKEN[:-1] + "x", "Basic eA=="])
def test_request_without_the_token_is_rejected(given):
    refusal = answer_to(Authorization=given)
    assert isinstance(refusal, PageRefusal) and refusal.status.startswith("403")
    assert TOKEN not in refusal.why


@pytest.mark.parametrize("token", [TOKEN, ""])
def test_request_without_the_token_is_rejected_beyond_loopback(token):
    head = b"GET /events HTTP/1.1\r\nHost: 127.0.0.1:8080\r\nAuthorization: Bearer "
    assert isinstance(RequestGuard(token).answer(head), PageRefusal)


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8080", "", "127.0.0.1.evil.example", "[::1", "localhost."],
)
def test_foreign_host_name_is_rejected_as_dns_rebinding(host):
    for path in ("/", "/events"):
        refusal = answer_to(path, host=host, Authorization=f"Bearer {TOKEN}")
        assert isinstance(refusal, PageRefusal), (host, path)


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]:8080", "localhost:8080", "NODE7:1"])
def test_addresses_and_own_host_names_are_accepted(host):
    assert answer_to(host=host, Authorization=f"Bearer {TOKEN}") == "events"


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "https://10.0.0.5:8080"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
        {"Sec_Fetch_Site": "none"},  # entered in the address bar, which the page itself never does
    ],
)
def test_cross_site_request_is_rejected_even_with_the_token(headers):
    assert isinstance(answer_to(Authorization=f"Bearer {TOKEN}", **headers), PageRefusal)


def test_page_without_data_may_be_linked_to():
    assert answer_to("/", Sec_Fetch_Site="cross-site") == "page"


@pytest.mark.parametrize(
    "path", ["/events?x=1", "/../etc/passwd", "//", "http://10.0.0.5/", "/%2e"]
)
def test_unknown_path_is_rejected(path):
    assert isinstance(answer_to(path, Authorization=f"Bearer {TOKEN}"), PageRefusal)


@pytest.mark.parametrize("method", ["POST", "PUT", "OPTIONS", "HEAD", "CONNECT"])
def test_method_other_than_get_is_rejected(method):
    assert isinstance(answer_to(method=method, Authorization=f"Bearer {TOKEN}"), PageRefusal)


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"GET",
        b"GET /events",
        b"GET  /events HTTP/1.1",
        b"\x16\x03\x01\x02\x00",
        b"GET /events HTTP/2.0\r\nHost: 127.0.0.1",
        b"GET /events HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil.example",
        b"GET /events HTTP/1.1\r\nno header",
        "GET /événements HTTP/1.1\r\nHost: 127.0.0.1".encode(),
    ],
)
def test_malformed_head_is_rejected(head):
    assert isinstance(RequestGuard(TOKEN).answer(head), PageRefusal)
