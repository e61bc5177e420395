"""One issue for all drift, kept up to date: found by a mark in its text, changed only when the drift changes."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from provisioner.counts import count_text
from provisioner.digests import digest_of
from provisioner.errors import NetworkError

if TYPE_CHECKING:
    import requests

MARK = "<!-- provision-drift:"
TITLE = "Patches drift on newer builds"
_TIMEOUT_SECONDS = 30
_SHOWN_BUILDS = 6


class Deed(StrEnum):
    """What was done to the issue."""

    OPENED = "opened"
    UPDATED = "updated"
    REOPENED = "reopened"
    CLOSED = "closed"
    UNCHANGED = "unchanged"
    NONE = "none"


@dataclass(frozen=True, kw_only=True)
class Tracker:
    """Where issues live: the API's address, the repository as ``owner/name``, and a token that is never shown."""

    api: str
    repository: str
    token: str


def state_key(report: Mapping[str, Any]) -> str:
    """A name for all failing drifts together, which a new build with the same drifts does not change."""
    return digest_of("\n".join(sorted({item["key"] for item in report["failing"]})).encode())[:12]


def print_body(report: Mapping[str, Any]) -> str:
    """The issue text of a report (schema ``provision/drift/1``): one section a drift, with the builds that have it."""
    drifts: dict[str, list[tuple[Mapping[str, Any], Mapping[str, Any]]]] = {}
    for build in report["builds"]:
        for patch in build["patches"]:
            if patch["response"] == "fail":
                drifts.setdefault(patch["key"], []).append((build, patch))
    lines = [
        f"{MARK}{state_key(report)} -->",
        count_text(len(drifts), "drift fails by its recipe's policy.", "drifts fail by their recipes' policies."),
        "",
    ]
    for key, found in drifts.items():
        patch = found[0][1]
        labels = [build["label"] for build, _ in found]
        newest = found[-1][0]
        onto = f"commit:{newest['commit']}" if newest["commit"] else f"pypi:{newest['version']}"
        more = f" and {len(labels) - _SHOWN_BUILDS} more" if len(labels) > _SHOWN_BUILDS else ""
        lines += [f"### {patch['recipe']}: {patch['id']}: {patch['verdict']}", ""]
        lines += [f"On {', '.join(labels[:_SHOWN_BUILDS])}{more}. Key `{key}`.", ""]
        lines += [f"* {line}" for line in patch["account"]]
        lines += ["", f"Next: `provision patch refresh {patch['id']} --onto {onto}`", ""]
    return "\n".join(lines)


def update_issue(report: Mapping[str, Any], tracker: Tracker, session: "requests.Session") -> Deed:
    """Open, change, reopen or close the one issue, so that it says what the report says.

    It is closed only by a report that knows all: what could not be read may still drift.
    Raises NetworkError where the tracker does not answer as it should.
    """
    known = _find(tracker, session)
    if not report["failing"]:
        if known is None or known["state"] == "closed":
            return Deed.NONE
        if any(build["failure"] for build in report["builds"]) or report["not_judged"]:
            return Deed.UNCHANGED
        _send(session, tracker, "PATCH", f"issues/{known['number']}", {"state": "closed"})
        return Deed.CLOSED
    body = print_body(report)
    if known is None:
        _send(session, tracker, "POST", "issues", {"title": TITLE, "body": body})
        return Deed.OPENED
    if known["state"] == "open" and f"{MARK}{state_key(report)} -->" in known["body"]:
        return Deed.UNCHANGED
    _send(session, tracker, "PATCH", f"issues/{known['number']}", {"body": body, "state": "open"})
    return Deed.UPDATED if known["state"] == "open" else Deed.REOPENED


def _find(tracker: Tracker, session: "requests.Session") -> Mapping[str, Any] | None:
    """Our issue, open or closed: a job that looks only for open ones opens a new one a day."""
    for page in range(1, 11):
        issues = _send(session, tracker, "GET", f"issues?state=all&per_page=100&page={page}", None)
        for issue in issues:
            if MARK in (issue.get("body") or "") and "pull_request" not in issue:
                found: Mapping[str, Any] = issue
                return found
        if len(issues) < 100:
            return None
    return None


def _send(
    session: "requests.Session", tracker: Tracker, method: str, path: str, payload: Mapping[str, Any] | None
) -> Any:
    import requests

    url = f"{tracker.api}/repos/{tracker.repository}/{path}"
    headers = {"Authorization": f"Bearer {tracker.token}", "Accept": "application/vnd.github+json"}
    try:
        reply = session.request(method, url, json=payload, headers=headers, timeout=_TIMEOUT_SECONDS)
        reply.raise_for_status()
        return reply.json()
    except (requests.RequestException, ValueError) as error:
        raise NetworkError("the issue tracker did not answer as it should", where=url, found=str(error)) from error
