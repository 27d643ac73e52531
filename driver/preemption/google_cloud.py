"""Source of Google Compute Engine notices: preemption, 30 seconds in advance, and maintenance that ends the machine.

See "Query metadata server for maintenance event notices" and "Spot VMs" in cloud.google.com/compute/docs. The server
answers a request when the value has changed. Live migration is ignored, because it does not end the machine.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from urllib.parse import quote

from elastic.driver.preemption.metadata import Answer, MetadataServer
from elastic.driver.preemption.source import PreemptionNotice, SourceError

# address of metadata.google.internal, used directly to avoid name resolution
HOST = "169.254.169.254"
HOST_VARIABLE = "GCE_METADATA_HOST"  # environment variable that Google's libraries also read
HEADERS = {"Metadata-Flavor": "Google"}
WAIT_S = 20  # maximum number of seconds that the server waits for a change
PREEMPTED_S = 30.0  # seconds from the preemption notice to the end of the machine
# Seconds from a maintenance notice to the end of the machine. On machines with GPUs it is an hour, but the server does
# not report this.
MAINTENANCE_S = 60.0


class GoogleCloud:
    name = "Google Cloud"
    pause_s = 0.1

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._server = MetadataServer(environ.get(HOST_VARIABLE) or HOST)
        self._etag = ""
        self._known: PreemptionNotice | None = None

    def here(self) -> bool:
        try:
            answer = self._server.ask("/computeMetadata/v1/", HEADERS, within_s=1.0)
        except SourceError:
            return False
        return answer.status == 200 and answer.headers.get("metadata-flavor") == "Google"

    def look(self) -> PreemptionNotice | None:
        """Return the current notice, or None.

        The first call returns immediately. Later calls return after a change, or after WAIT_S seconds without one.
        """
        query = "recursive=true"
        if self._etag:
            query += f"&wait_for_change=true&timeout_sec={WAIT_S}&last_etag={quote(self._etag)}"
        path = f"/computeMetadata/v1/instance/?{query}"
        try:
            answer = self._server.ask(path, HEADERS, within_s=WAIT_S + 5.0)
        except SourceError:
            self._etag = ""
            raise
        if answer.status != 200:
            self._etag = ""
            raise SourceError(
                f"the metadata service returned status {answer.status}: allow this instance to access"
                " its metadata server"
            )
        self._etag = answer.headers.get("etag", "")
        self._known = self._read(answer)
        if not self._etag:
            # without an entity tag, the server cannot wait for a change, so this thread waits
            time.sleep(1.0)
        return self._known

    def released(self) -> None:
        pass

    def hint(self) -> str:
        return ""

    def _read(self, answer: Answer) -> PreemptionNotice | None:
        content = answer.json()
        if not isinstance(content, dict):
            raise SourceError(
                f"the metadata service sent an unexpected response: {answer.text[:80]!r}. Outside Google Cloud, pass"
                " --preemption off"
            )
        if content.get("preempted") == "TRUE":
            return self._since("Google Cloud will preempt this machine", PREEMPTED_S)
        if str(content.get("maintenanceEvent", "")).startswith("TERMINATE"):
            return self._since(
                "Google Cloud will terminate this machine for maintenance", MAINTENANCE_S
            )
        return None

    def _since(self, text: str, within_s: float) -> PreemptionNotice:
        if self._known is not None and self._known.text == text:
            return self._known
        return PreemptionNotice(text, time.time() + within_s)
