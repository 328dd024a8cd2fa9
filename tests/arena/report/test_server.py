"""The live view over HTTP."""

import http.client
import json

import pytest

from trapline.arena.errors import ArenaError
from trapline.arena.record import CellKey
from trapline.arena.report.runview import RunView
from trapline.arena.report.server import LiveRun


def get(server, path, host=None):
    connection = http.client.HTTPConnection(*server.server_address, timeout=60)
    connection.request("GET", path, headers={"Host": host} if host else {})
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer, body


def test_pages_files_and_state_are_served(serve, small_run):
    server = serve(lambda: small_run)
    for path, kind in (
        ("/", "text/html"),
        ("/traps.html", "text/html"),
        ("/cells.csv", "text/csv"),
        ("/live.json", "application/json"),
    ):
        answer, body = get(server, path)
        assert (answer.status, answer.headers["Content-Type"].split(";")[0]) == (200, kind)
        assert body


def test_only_our_scripts_may_run(serve, small_run):
    answer, _ = get(serve(lambda: small_run), "/methodology.html")
    policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    scripts = policy.split("script-src ")[1].split(";")[0]
    assert "unsafe" not in scripts
    assert scripts.count("sha256-") == 2


@pytest.mark.parametrize(
    "path", ["/nothing.html", "/../../etc/passwd", "/cells/..%2f..%2fx", "/bundles/"]
)
def test_what_is_not_in_the_report_is_not_found(serve, small_run, path):
    assert get(serve(lambda: small_run), path)[0].status == 404


def test_other_names_for_this_machine_are_refused(serve, small_run):
    assert get(serve(lambda: small_run), "/", host="evil.example:80")[0].status == 403


def test_listens_on_loopback_only(serve, small_run):
    assert serve(lambda: small_run).server_address[0] == "127.0.0.1"


def test_state_follows_the_run(make_run, told):
    run = make_run(["heron", "otter"], ["rows"])
    planned = CellKey("otter", "rows", "cpu", 1)
    states = [
        RunView(cells=run.cells[:1], waiting={planned: "waiting"}),
        RunView(cells=run.cells[:1], waiting={planned: "running"}),
        RunView(cells=run.cells),
    ]
    seen, versions = [], []
    for state in states:
        now = LiveRun(lambda state=state: state, told=told).state()
        seen.append(now["squares"]["square--otter--rows--cpu"]["state"])
        versions.append(now["version"])
    assert seen[:2] == ["waiting", "running"]
    assert seen[2] in ("pass", "fail")
    assert versions[0] == versions[1] != versions[2]
    json.dumps(now, allow_nan=False)


def test_internal_error_is_reported(serve):
    def broken():
        raise ArenaError("the run cannot be read")

    answer, body = get(serve(broken), "/")
    assert (answer.status, body) == (500, "the run cannot be read")
