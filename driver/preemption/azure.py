"""Source of Microsoft Azure Scheduled Events, which arrive at least 30 seconds in advance.

See learn.microsoft.com/azure/virtual-machines/linux/scheduled-events. An event is acknowledged when the machine is no
longer needed. Freezes are ignored, because they do not end the machine. Every machine of a scale set receives the
events of all its machines; events of other machines are ignored.
"""

from __future__ import annotations

import email.utils
import json
from collections.abc import Mapping
from typing import Any

from elastic.driver.preemption.metadata import Answer, MetadataServer
from elastic.driver.preemption.source import PreemptionNotice, SourceError

ENDPOINT = "http://169.254.169.254"
ENDPOINT_VARIABLE = "ELASTIC_AZURE_METADATA_ENDPOINT"
HEADERS = {"Metadata": "true"}
EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
ENDING = {
    "Preempt": "Azure will reclaim this spot machine",
    "Terminate": "Azure will delete this machine",
    "Reboot": "Azure will restart this machine",
    "Redeploy": "Azure will move this machine without its memory and local disks",
}
# Timeout for the first answer, in seconds. The first request enables the service, which may take two minutes.
FIRST_ANSWER_S = 150.0


class Azure:
    name = "Azure"
    pause_s = 1.0

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._server = MetadataServer(environ.get(ENDPOINT_VARIABLE) or ENDPOINT)
        self._own_name = ""
        self._answered = False
        self._announced: list[str] = []  # IDs of the events in the current notice

    def here(self) -> bool:
        try:
            return self._ask(NAME, within_s=1.0).status == 200
        except SourceError:
            return False

    def look(self) -> PreemptionNotice | None:
        if not self._own_name:
            answer = self._ask(NAME)
            if answer.status != 200:
                raise SourceError(
                    f"the metadata service returned status {answer.status}: check that Scheduled Events are enabled"
                    " for this machine"
                )
            self._own_name = answer.text
        answer = self._ask(EVENTS, within_s=2.0 if self._answered else FIRST_ANSWER_S)
        if answer.status != 200:
            raise SourceError(
                f"the metadata service returned status {answer.status}: check that Scheduled Events are enabled for"
                " this machine"
            )
        self._answered = True
        content = answer.json()
        try:
            own = [event for event in content["Events"] if self._is_mine(event)]
            self._announced = [str(event["EventId"]) for event in own]
            ends = [self._ends(event, answer) for event in own]
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise SourceError(
                f"the metadata service sent an unexpected response: {answer.text[:80]!r}. Outside Azure, pass"
                " --preemption off"
            ) from error
        return min(ends, key=lambda each: each.at or 0.0, default=None)

    def released(self) -> None:
        if self._announced:
            requests = [{"EventId": each} for each in self._announced]
            body = json.dumps({"StartRequests": requests}).encode()
            answer = self._ask(EVENTS, method="POST", body=body)
            if answer.status >= 300:
                raise SourceError(
                    f"the metadata service rejected the acknowledgement with status {answer.status}, so Azure waits"
                    " until the announced time"
                )

    def hint(self) -> str:
        return ""

    def _is_mine(self, event: Any) -> bool:
        return event["EventType"] in ENDING and self._own_name in event["Resources"]

    def _ends(self, event: Any, answer: Answer) -> PreemptionNotice:
        text, moment = ENDING[event["EventType"]], event.get("NotBefore")
        at = email.utils.parsedate_to_datetime(moment).timestamp() if moment else 0.0
        return PreemptionNotice(text, answer.ends_at(at))

    def _ask(
        self, path: str, *, method: str = "GET", body: bytes | None = None, within_s: float = 2.0
    ) -> Answer:
        return self._server.ask(path, HEADERS, method=method, body=body, within_s=within_s)
