"""A local stand-in for the issue API: real HTTP, issues in memory."""

import json
from http.server import BaseHTTPRequestHandler
from typing import Any, Self

from tests.support.http_server import ClosingServer


class IssueApi:
    """Serves ``/repos/OWNER/NAME/issues`` while it is entered, from ``issues``."""

    def __init__(self) -> None:
        self.issues: list[dict[str, Any]] = []
        self.tokens: set[str] = set()
        self.broken = False
        api = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

            def do_GET(self) -> None:
                self._reply(200, [] if "page=1" not in self.path.replace("per_page", "") else api.issues)

            def do_POST(self) -> None:
                issue = {"number": len(api.issues) + 1, "state": "open", **self._payload()}
                api.issues.append(issue)
                self._reply(201, issue)

            def do_PATCH(self) -> None:
                number = int(self.path.rpartition("/")[2])
                issue = next(item for item in api.issues if item["number"] == number)
                issue.update(self._payload())
                self._reply(200, issue)

            def _payload(self) -> dict[str, Any]:
                api.tokens.add(self.headers.get("Authorization", ""))
                payload: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                return payload

            def _reply(self, status: int, value: Any) -> None:
                body = json.dumps(value).encode()
                self.send_response(500 if api.broken else status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        self._server = ClosingServer(Handler)

    @property
    def url(self) -> str:
        return self._server.url

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()
