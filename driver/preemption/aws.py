"""Source of Amazon EC2 spot instance interruption notices, which arrive two minutes in advance.

The notices are read from the instance metadata service v2. See "Spot Instance interruption notices" and "EC2 instance
rebalance recommendations" in docs.aws.amazon.com/AWSEC2/latest/UserGuide. Recommendations are only logged.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import datetime, timezone

from elastic.driver.preemption.metadata import Answer, MetadataServer
from elastic.driver.preemption.source import PreemptionNotice, SourceError

ENDPOINT = "http://169.254.169.254"
# environment variable that Amazon's own tools also read
ENDPOINT_VARIABLE = "AWS_EC2_METADATA_SERVICE_ENDPOINT"
OFF_VARIABLE = "AWS_EC2_METADATA_DISABLED"
TOKEN_S = 21600


class Aws:
    name = "AWS"
    pause_s = 1.0

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._off = environ.get(OFF_VARIABLE, "").lower() == "true"
        self._server = MetadataServer(environ.get(ENDPOINT_VARIABLE) or ENDPOINT)
        self._token = ""
        self._renew_at = 0.0
        self._hint = ""
        self._hinted = False

    def here(self) -> bool:
        try:
            return not self._off and self._ask("/latest/meta-data/", within_s=1.0).status == 200
        except SourceError:
            return False

    def look(self) -> PreemptionNotice | None:
        self._look_for_a_hint()
        answer = self._ask("/latest/meta-data/spot/instance-action")
        if answer.status == 404:
            return None
        if answer.status != 200:
            raise SourceError(
                f"the metadata service returned status {answer.status}: check that it is enabled for this instance"
            )
        content = answer.json()
        try:
            action, end = str(content["action"]), str(content["time"])
            moment = datetime.strptime(end, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc)
        except (KeyError, TypeError, ValueError) as error:
            raise SourceError(
                f"the metadata service sent an unexpected response: {answer.text[:80]!r}. Outside AWS, pass"
                " --preemption off"
            ) from error
        text = f"AWS will {action} this spot instance"
        return PreemptionNotice(text, answer.ends_at(moment.timestamp()))

    def released(self) -> None:
        pass

    def hint(self) -> str:
        hint, self._hint = self._hint, ""
        return hint

    def _look_for_a_hint(self) -> None:
        if not self._hinted:
            answer = self._ask("/latest/meta-data/events/recommendations/rebalance")
            if answer.status == 200:
                self._hinted = True
                self._hint = "AWS recommends leaving this spot instance: it may be interrupted soon"

    def _ask(self, path: str, *, within_s: float = 2.0) -> Answer:
        if time.monotonic() >= self._renew_at:
            self._renew(within_s)
        answer = self._ask_with_token(path, within_s)
        if answer.status == 401:  # The token expired earlier than expected.
            self._renew(within_s)
            answer = self._ask_with_token(path, within_s)
        return answer

    def _ask_with_token(self, path: str, within_s: float) -> Answer:
        headers = {"X-aws-ec2-metadata-token": self._token}
        return self._server.ask(path, headers, within_s=within_s)

    def _renew(self, within_s: float) -> None:
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_S)}
        answer = self._server.ask(
            "/latest/api/token", headers, method="PUT", body=b"", within_s=within_s
        )
        if answer.status != 200 or not answer.text:
            raise SourceError(
                f"the metadata service returned status {answer.status} instead of a token: enable IMDSv2 for this"
                " instance"
            )
        self._token = answer.text
        self._renew_at = time.monotonic() + TOKEN_S / 2
