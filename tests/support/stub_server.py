"""A stand-in for the W&B server on loopback, as much of it as a sweep and its agent use.

The server hands out the jobs that it was built with, one after the other, and keeps what agent and
runs report. Searching (grid, Bayes) is the real server's business and is not imitated.
"""

import base64
import gzip
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ENTITY, PROJECT, SWEEP = "me", "toy", "sweep1"


def _id(kind: str, name: str) -> str:
    return base64.b64encode(f"{kind}:v1:{name}".encode()).decode()


_PROJECT = {
    "id": _id("Project", PROJECT),
    "name": PROJECT,
    "entity": {"id": _id("Entity", ENTITY), "name": ENTITY},
}


@dataclass
class StubRun:
    """What one run reported.

    Attributes:
        args: parameters that the sweep gave it.
        upserts: number of times it registered itself.
        sweep: sweep that it said it belonged to.
        config: W&B configuration of the run, as sent.
        history: logged rows.
        exit_code: code that it sent at its end, ``None`` if it sent none.
    """

    args: dict[str, Any]
    upserts: int = 0
    sweep: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    exit_code: int | None = None

    def column(self, key: str) -> list[Any]:
        """All logged values of one key."""
        return [row[key] for row in self.history if key in row]


class StubServer:
    """Serves until the ``with`` block ends.

    Args:
        jobs: for every run of the sweep, parameter -> value.

    Attributes:
        url: address for ``WANDB_BASE_URL``.
        runs: runs by id, in the order that they were handed out.
        sweep_config: text of the sweep as ``wandb sweep`` sent it.
        operations: names of all GraphQL operations, in order.
    """

    def __init__(self, jobs: list[dict[str, Any]]) -> None:
        self.jobs = list(jobs)
        self.runs: dict[str, StubRun] = {}
        self.sweep_config = ""
        self.operations: list[str] = []
        self._lock = threading.Lock()
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _body(self) -> bytes:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                compressed = self.headers.get("Content-Encoding") == "gzip"
                return gzip.decompress(body) if compressed else body

            def _answer(self, answer: dict[str, Any]) -> None:
                text = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def do_POST(self) -> None:
                body = self._body()
                with stub._lock:
                    if self.path == "/graphql":
                        answer = {"data": stub._graphql(json.loads(body))}
                    elif self.path.endswith("/file_stream"):
                        answer = stub._file_stream(self.path.split("/")[-2], json.loads(body))
                    else:
                        answer = {}
                self._answer(answer)

            def do_PUT(self) -> None:
                self._body()
                self._answer({})

            def do_GET(self) -> None:
                self._answer({})

            def log_message(self, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # a killed client breaks its connection

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "StubServer":
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _graphql(self, body: dict[str, Any]) -> dict[str, Any]:
        query, variables = body["query"], body.get("variables") or {}
        self.operations.append(query.split("(")[0].split("{")[0].strip())
        if "agentHeartbeat" in query:
            states = json.loads(variables["runState"])
            commands = self._next_commands(any(states.values()))
            agent = {"id": _id("Agent", "1")}
            return {"agentHeartbeat": {"agent": agent, "commands": json.dumps(commands)}}
        if "createAgent" in query:
            return {"createAgent": {"agent": {"id": _id("Agent", "1")}}}
        if "upsertSweep" in query:
            self.sweep_config = variables.get("config") or self.sweep_config
            sweep = {"id": _id("Sweep", SWEEP), "name": SWEEP, "project": _PROJECT}
            return {"upsertSweep": {"sweep": sweep, "configValidationWarnings": []}}
        if "upsertBucket" in query:
            return self._upsert_run(variables)
        if "createRunFiles" in query:
            # An empty answer makes W&B's process crash, and the history of the run is lost.
            names = variables.get("files") or []
            files = [{"name": n, "uploadUrl": f"{self.url}/upload/{n}"} for n in names]
            run_id = _id("Run", variables.get("run", ""))
            return {"createRunFiles": {"runID": run_id, "uploadHeaders": [], "files": files}}
        if "sweep(" in query:
            return {"project": {**_PROJECT, "sweep": self._sweep()}}
        if "serverInfo" in query:
            limits = {"max_cli_version": "99.0.0"}
            info = {"cliVersionInfo": limits, "latestLocalVersionInfo": None, "features": []}
            return {"serverInfo": info}
        if "viewer" in query:
            viewer = {"entity": ENTITY, "username": ENTITY, "flags": "{}", "teams": {"edges": []}}
            return {"viewer": {"id": _id("User", ENTITY), **viewer}}
        return {}

    def _next_commands(self, busy: bool) -> list[dict[str, Any]]:
        if busy:
            return []
        if not self.jobs:
            return [{"type": "exit"}]
        args = self.jobs.pop(0)
        run_id = f"run{len(self.runs) + 1:05d}"
        self.runs[run_id] = StubRun(args)
        values = {name: {"value": value} for name, value in args.items()}
        return [{"type": "run", "run_id": run_id, "program": None, "args": values}]

    def _sweep(self) -> dict[str, Any]:
        moment = "2024-05-07T00:00:00"
        return {
            "id": _id("Sweep", SWEEP),
            "name": SWEEP,
            "displayName": SWEEP,
            "description": "",
            "state": "RUNNING",
            "method": "grid",
            "config": self.sweep_config,
            "createdAt": moment,
            "updatedAt": moment,
            "heartbeatAt": moment,
            "runCount": len(self.runs),
            "runCountExpected": len(self.runs) + len(self.jobs),
            "bestLoss": None,
            "controller": None,
            "scheduler": None,
            "priorRuns": {"edges": []},
            "runs": {"edges": [], "pageInfo": {"hasNextPage": False, "endCursor": None}},
        }

    def _upsert_run(self, variables: dict[str, Any]) -> dict[str, Any]:
        name = variables.get("name") or variables.get("id") or "unnamed"
        run = self.runs.setdefault(name, StubRun({}))
        run.upserts += 1
        run.sweep = variables.get("sweep") or run.sweep
        config = variables.get("config")
        if config:
            run.config = json.loads(config)
        bucket = {
            "id": _id("Run", name),
            "name": name,
            "displayName": name,
            "description": "",
            "config": "{}",
            "sweepName": SWEEP,
            "project": _PROJECT,
            "historyLineCount": len(run.history),
        }
        return {"upsertBucket": {"bucket": bucket, "inserted": run.upserts == 1}}

    def _file_stream(self, run_id: str, body: dict[str, Any]) -> dict[str, Any]:
        run = self.runs.setdefault(run_id, StubRun({}))
        rows = (body.get("files") or {}).get("wandb-history.jsonl") or {}
        run.history += [json.loads(line) for line in rows.get("content") or []]
        if body.get("complete"):
            run.exit_code = body.get("exitcode")
        return {"limits": {}}
