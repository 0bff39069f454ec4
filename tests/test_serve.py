"""The server over a real socket: who is let in, and what is said to requests that cannot be answered."""

import json
import socket

import pytest
from serving import NEST, raw_request, served, talk, wait_until

from nestling.engine.engine import Engine
from nestling.serve.run import listen
from nestling.serve.settings import ServeSettings

HANG_UP = "Connection: close"
WITHOUT_KEY = (
    (),
    ("Authorization: Bearer secre",),
    ("Authorization: Basic secret",),
    ("Authorization: Bearer secret\xe9",),
    ("Authorization: Bearer x", "Authorization: Bearer secret"),
)


@pytest.fixture(scope="module")
def engine():
    with Engine(NEST) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine):
    with served(engine, max_body=10_000, read_timeout=0.5) as server:
        yield server


def get(server, path, *headers, method="GET"):
    return talk(server.place, raw_request(path, b"", HANG_UP, *headers, method=method))


def post(server, body, *headers, path="/v1/chat/completions"):
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    status, told = talk(server.place, raw_request(path, raw, HANG_UP, *headers))
    return status, json.loads(told)


def test_the_models_are_the_nest_its_members_and_every_pair(server):
    status, body = get(server, "/v1/models")
    ids = [one["id"] for one in json.loads(body)["data"]]
    assert status == 200
    assert ids[0] == "nest"
    assert {"nest:100", "nest:25", "nest:25->100", "nest:100->25"} <= set(ids)
    assert len(ids) == len(set(ids)) == 1 + 4 + 4 * 3


def test_one_model_is_described_and_an_unknown_one_is_not_there(server):
    status, body = get(server, "/v1/models/nest:25->100")
    assert status == 200
    assert json.loads(body)["nestling"]["policy"]["think"] == "25"
    status, body = get(server, "/v1/models/gpt")
    assert status == 404
    assert json.loads(body)["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(("path", "method", "status"), [
    ("/v1/nothing", "GET", 404), ("/v2", "POST", 404), ("/%00/..%2f..%2fetc/passwd", "GET", 404), ("/docs", "GET", 404),
    ("/health", "DELETE", 405), ("/v1/models", "POST", 405), ("/", "PUT", 405),
])  # fmt: skip
def test_what_is_not_there_is_refused_in_json(server, path, method, status):
    found, body = get(server, path, method=method)
    assert found == status
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


def test_health_page_and_metrics_answer(server):
    assert json.loads(get(server, "/health")[1]) == {"status": "ok"}
    assert b"<title>Nestling</title>" in get(server, "/")[1]
    assert b'vllm:num_requests_running{model_name="nest"} 0.0' in get(server, "/metrics")[1]


def test_a_key_is_asked_for_everywhere_but_at_health_and_the_page(engine, tmp_path):
    (tmp_path / "key").write_text("secret\n")
    with served(engine, api_key=f"@{tmp_path / 'key'}") as server:
        assert [get(server, path)[0] for path in ("/health", "/")] == [200, 200]
        for path in ("/v1/models", "/metrics", "/openapi.json", "/v1/nothing"):
            for headers in WITHOUT_KEY:
                status, body = get(server, path, *headers)
                assert status == 401, (path, headers)
                assert json.loads(body)["error"]["code"] == "invalid_api_key"
        assert get(server, "/v1/models", "Authorization: Bearer secret")[0] == 200


def test_a_body_that_is_too_large_is_refused_before_it_is_read(server):
    head = raw_request("/v1/chat/completions", b"", HANG_UP).replace(b"Content-Length: 0", b"Content-Length: 99999999")
    status, body = talk(server.place, head)
    assert status == 413
    assert "10,000" in json.loads(body)["error"]["message"]


def test_a_body_in_pieces_is_refused_where_it_gets_too_large(server):
    head = raw_request("/v1/chat/completions", b"", HANG_UP)
    head = head.replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    status, _ = talk(server.place, head + (b"1000\r\n" + b" " * 4096 + b"\r\n") * 4)
    assert status == 413


def test_a_body_that_does_not_come_is_not_waited_for(server):
    head = raw_request("/v1/chat/completions", b"", HANG_UP).replace(b"Content-Length: 0", b"Content-Length: 99")
    status, body = talk(server.place, head)
    assert status == 408
    assert json.loads(body)["error"]["code"] == "timeout"


def test_what_no_page_of_another_origin_may_send_is_refused(server):
    raw = raw_request("/v1/chat/completions", b"{}", HANG_UP).replace(b"application/json", b"text/plain")
    assert talk(server.place, raw)[0] == 415


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"a": NaN}', b"\xff", b"[" * 9_000, b'{"a":"\\ud800"}'])
def test_what_is_no_json_object_is_refused(server, body):
    status, told = post(server, body)
    assert status == 400
    assert told["error"]["type"] == "invalid_request_error"


def test_more_requests_at_once_than_are_admitted_are_refused_and_health_is_not(engine):
    with served(engine, max_requests=2, read_timeout=20.0) as server:
        head = raw_request("/v1/chat/completions", b"{", HANG_UP).replace(b"Content-Length: 1", b"Content-Length: 9")
        with socket.create_connection(server.place) as first, socket.create_connection(server.place) as second:
            first.sendall(head)
            second.sendall(head)
            wait_until(lambda: server.app.guard.num_requests == 2)
            with socket.create_connection(server.place) as third:
                third.sendall(raw_request("/v1/models", b"", HANG_UP, method="GET"))
                told = third.makefile("rb").read()
            assert told.startswith(b"HTTP/1.1 429 ")
            assert b"retry-after: 1" in told.lower()
            assert get(server, "/health")[0] == 200
        wait_until(lambda: server.app.guard.num_requests == 0)
        assert get(server, "/v1/models")[0] == 200


def test_a_port_that_is_taken_and_settings_that_cannot_be_are_refused(server):
    with pytest.raises(ValueError, match="cannot listen"):
        listen(ServeSettings(port=server.place[1]))
    with pytest.raises(ValueError, match="max_body"):
        ServeSettings(max_body=0).check()


def test_only_loopback_counts_as_closed_to_others():
    closed = [ServeSettings(host=host).is_loopback for host in ("127.0.0.1", "127.1.2.3", "localhost", "::1", "[::1]")]
    assert all(closed)
    assert not any(ServeSettings(host=host).is_loopback for host in ("0.0.0.0", "::", "10.0.0.1", "example.org", ""))
