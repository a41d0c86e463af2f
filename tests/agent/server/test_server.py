"""What the HTTP server promises: exact HTTP, and limits that no client can use against another."""

from __future__ import annotations

import contextlib
import errno
import grp
import logging
import os
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.address import TcpAddress, parse_listen
from agent.server import Server
from agent.server.exchange import Limits, Request, Response
from agent.server.links import Phase
from tests.agent.server.serving import GET, Pages, becomes_true, connect, connect_unix, serving

_DATA_SEGMENTS_IN = 152  # offset of tcpi_data_segs_in in struct tcp_info, include/uapi/linux/tcp.h


def _get(path: str, *headers: str, version: str = "1.1") -> bytes:
    lines = [f"GET {path} HTTP/{version}", "Host: localhost", *headers, "", ""]
    return "\r\n".join(lines).encode()


def _phases(server: Server) -> set[Phase]:
    return {link.phase for link in tuple(server._links._links)}


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: a unix socket's address holds 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="hw") as path:
        yield Path(path)


# HTTP


def test_an_answer_carries_the_applications_bytes_and_headers() -> None:
    with serving(Pages(b"a 1\n")) as server, connect(server) as client:
        answer = client.ask()
    assert (answer.status, answer.body) == (200, b"a 1\n")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4"
    assert answer.headers["content-length"] == "4"
    assert answer.headers["vary"] == "Accept"
    assert answer.headers["server"] == "hpcwatch"
    assert answer.headers["date"].endswith(" GMT")


def test_a_connection_is_kept_for_the_next_request() -> None:
    with serving(Pages()) as server, connect(server) as client:
        assert [client.ask().status for _ in range(3)] == [200, 200, 200]
        assert server.connections == 1


def test_pipelined_requests_are_answered_in_order_however_they_are_cut() -> None:
    stream = b"".join(_get(f"/{number}") for number in range(4))
    with serving(Pages()) as server:
        for cut in (1, 30, len(stream) // 2, len(stream) - 1):
            with connect(server) as client:
                client.send(stream[:cut])
                client.send(stream[cut:])
                assert [client.read().body.strip() for _ in range(4)] == [b"/0", b"/1", b"/2", b"/3"]


def test_empty_lines_before_a_request_and_bare_newlines_are_forgiven() -> None:
    with serving(Pages()) as server, connect(server) as client:
        assert client.ask(b"\r\n\r\nGET /metrics HTTP/1.1\nHost: x\n\n").status == 200
        assert client.ask().status == 200


def test_head_has_the_headers_of_get_and_no_body() -> None:
    with serving(Pages()) as server, connect(server) as client:
        head = client.ask(GET.replace(b"GET", b"HEAD"))
        full = client.ask()
    assert head.body == b""
    assert {**head.headers, "date": ""} == {**full.headers, "date": ""}


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "BREW"])
def test_other_methods_are_405_on_tcp(method: str) -> None:
    app = Pages()
    with serving(app) as server, connect(server) as client:
        answer = client.ask(f"{method} /metrics HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD")
        assert client.is_ended()
    assert app.requests == []


def test_a_refused_body_is_not_taken_for_a_request_and_does_not_destroy_the_answer() -> None:
    app = Pages()
    body = GET * 15_000  # more than socket buffers hold, less than is drained
    with serving(app) as server, connect(server) as client:
        client.send(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        assert client.read().status == 405
        assert client.sock.recv(1) == b""  # an end, not a reset
    assert app.requests == []


@pytest.mark.parametrize("framing", [f"Content-Length: {len(GET)}", "Transfer-Encoding: chunked"])
def test_a_get_with_a_body_is_answered_once(framing: str) -> None:
    app = Pages()
    with serving(app) as server, connect(server) as client:
        answer = client.ask(_get("/metrics", framing) + GET)
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert client.is_ended()
    assert len(app.requests) == 1


def test_http_1_0_gets_one_answer_unless_it_asks_for_more() -> None:
    with serving(Pages()) as server, connect(server) as client:
        answer = client.ask(_get("/metrics", "Connection: keep-alive", version="1.0"))
        assert answer.headers["connection"] == "keep-alive"
        answer = client.ask(_get("/metrics", version="1.0"))
        assert answer.headers["connection"] == "close"
        assert client.is_ended()


def test_connection_close_is_obeyed() -> None:
    with serving(Pages()) as server, connect(server) as client:
        assert client.ask(_get("/metrics", "Connection: close")).headers["connection"] == "close"
        assert client.is_ended()


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"<script>\r\n\r\n", 400),
        (b"GET /metrics\r\nHost: x\r\n\r\n", 400),
        (b"GET /metrics HTTP/x.y\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\n\r\n", 400),
        (b"GET /metrics HTTP/2.0\r\n\r\n", 505),
        (b"\x16\x03\x01 \x00 \n\n", 400),
        (_get("/metrics?" + "&".join(f"a={number}" for number in range(65))), 400),
    ],
)
def test_nonsense_is_refused_without_repeating_it(request_bytes: bytes, status: int) -> None:
    with serving(Pages()) as server, connect(server) as client:
        answer = client.ask(request_bytes)
        assert answer.status == status
        assert len(answer.body) < 40
        assert b"script" not in answer.body
        assert client.is_ended()


def test_path_and_query_are_decoded_for_the_application() -> None:
    app = Pages()
    with serving(app) as server, connect(server) as client:
        client.ask(_get("/a%20b?since=5&name=x&name=y&empty="))
        client.ask(_get("http://node1:9753/api?x=/1"))
    assert [request.path for request in app.requests] == ["/a b", "/api"]
    assert app.requests[0].query == {"since": ["5"], "name": ["x", "y"], "empty": [""]}
    assert app.requests[1].query == {"x": ["/1"]}


def test_headers_are_found_in_any_case_and_absent_ones_are_none() -> None:
    app = Pages()
    with serving(app) as server, connect(server) as client:
        client.ask(_get("/metrics", "ACCEPT: text/plain"))
    assert app.requests[0].headers.get("accept") == "text/plain"
    assert app.requests[0].headers.get("Accept-Encoding") is None


def test_an_answer_leaves_in_one_segment_without_delay() -> None:
    with serving(Pages()) as server, connect(server) as client:
        client.ask()
        client.ask()
        info = client.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _DATA_SEGMENTS_IN + 4)
        link = next(iter(server._links._links))
        assert link.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    assert struct.unpack_from("I", info, _DATA_SEGMENTS_IN) == (2,)


def test_an_answer_larger_than_every_socket_buffer_arrives_whole() -> None:
    body = os.urandom(1 << 16) * 200
    with serving(Pages(body)) as server, connect(server) as client:
        assert client.ask().body == body
        assert client.ask().body == body


# Trust


@pytest.mark.parametrize(
    ("headers", "trusted"),
    [
        (["Host: 127.0.0.1:9753"], True),
        (["Host: [::1]:9753"], True),
        (["Host: localhost"], True),
        (["Host: LOCALHOST:80"], True),
        ([f"Host: {socket.gethostname()}:9753"], True),
        (["Host: rebound.example.org:9753"], False),
        (["Host: localhost", "X-Forwarded-For: 10.0.0.1"], False),
        (["Host: localhost", "Via: 1.1 proxy"], False),
        (["Host: localhost", "Forwarded: for=10.0.0.1"], False),
    ],
)
def test_a_loopback_client_is_trusted_unless_it_speaks_for_others(headers: list[str], *, trusted: bool) -> None:
    app = Pages()
    with serving(app) as server, connect(server) as client:
        client.ask("\r\n".join(["GET / HTTP/1.1", *headers, "", ""]).encode())
    assert app.requests[0].trusted is trusted


# Failures of the application


def test_an_exception_is_a_500_without_details_logged_when_it_changes(caplog: pytest.LogCaptureFixture) -> None:
    app = Pages()
    app.error = lambda: ValueError(f"secret {len(app.requests)}")
    with serving(app) as server, connect(server) as client:
        answers = [client.ask(_get("/fail")) for _ in range(3)]
        assert len(caplog.records) == 1
        app.error = lambda: TypeError("other")
        client.ask(_get("/fail"))
        assert len(caplog.records) == 2
        app.error = None
        with caplog.at_level(logging.INFO):
            assert client.ask(_get("/fail")).status == 200
        assert "again" in caplog.records[-1].message
        app.error = lambda: TypeError("other")
        client.ask(_get("/fail"))
        assert len(caplog.records) == 4
    assert {answer.status for answer in answers} == {500}
    assert all(b"secret" not in answer.body and b"Traceback" not in answer.body for answer in answers)
    assert "secret" in caplog.text


def test_requests_and_vanishing_clients_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG), serving(Pages(b"x" * 1_000_000)) as server:
        for data in (b"", GET[:10], GET):
            with connect(server) as client:
                client.send(data)
                client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with connect(server) as client:
            assert client.ask().status == 200
        assert becomes_true(lambda: server.connections == 0)
    assert caplog.text == ""


def test_a_header_cannot_smuggle_another_one() -> None:
    with pytest.raises(ValueError, match="not a header"):
        Response(302, headers=(("Location", "/x\r\nSet-Cookie: a"),))
    with pytest.raises(ValueError, match="not a header"):
        Response(200, content_type="text/plain\n")


# Limits


def test_the_longest_idle_connection_makes_room() -> None:
    with serving(Pages(), limits=Limits(connections=3)) as server, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connect(server)) for _ in range(3)]
        for client in (*clients, clients[0]):  # so the second is the longest idle in the end
            assert client.ask().status == 200
            assert becomes_true(lambda: _phases(server) == {Phase.IDLE})
        newcomer = stack.enter_context(connect(server))
        assert newcomer.ask().status == 200
        assert clients[1].is_ended()
        assert [client.ask().status for client in (clients[0], clients[2], newcomer)] == [200, 200, 200]


def test_metrics_are_answered_while_hundreds_of_connections_idle() -> None:
    with serving(Pages(), limits=Limits(connections=16)) as server, contextlib.ExitStack() as stack:
        for _ in range(150):
            stack.enter_context(connect(server))
        assert stack.enter_context(connect(server)).ask().status == 200
        assert server.connections <= 16


def test_an_incomplete_request_makes_room_when_nothing_is_idle() -> None:
    with serving(Pages(), limits=Limits(connections=2)) as server, contextlib.ExitStack() as stack:
        slow = [stack.enter_context(connect(server)) for _ in range(2)]
        for client in slow:
            client.send(GET[:20])
        assert becomes_true(lambda: server.connections == 2 and _phases(server) == {Phase.READING})
        assert stack.enter_context(connect(server)).ask().status == 200


def test_a_full_server_says_503_and_ends_the_connection() -> None:
    app = Pages()
    with serving(app, limits=Limits(connections=1)) as server, connect(server) as busy:
        busy.send(_get("/hold"))
        assert app.held.acquire(timeout=5)
        with connect(server) as client:
            answer = client.read()
            assert (answer.status, answer.headers["connection"]) == (503, "close")
            assert client.is_ended()
        app.release.set()
        assert busy.read().status == 200


def test_a_head_that_drips_in_is_cut_off_in_total_time() -> None:
    with serving(Pages(), limits=Limits(head_timeout_s=0.2)) as server, connect(server) as client:
        client.sock.settimeout(0.02)
        start_s = time.monotonic()
        sent = 0
        for byte in _get("/metrics", "X: " + "y" * 1000):
            with contextlib.suppress(TimeoutError):
                client.send(bytes([byte]))
                sent += 1
                client._more()
                break
        assert client.read().status == 408
        assert sent > 3
        assert time.monotonic() - start_s < 3
        assert client.is_ended()


def test_a_connection_that_never_asks_is_ended_silently() -> None:
    with serving(Pages(), limits=Limits(head_timeout_s=0.05)) as server, connect(server) as client:
        assert client.is_ended()


def test_a_kept_connection_is_ended_after_the_idle_time_and_not_by_the_head_time() -> None:
    limits = Limits(head_timeout_s=0.1, idle_timeout_s=0.4)
    with serving(Pages(), limits=limits) as server, connect(server) as client:
        client.ask()
        start_s = time.monotonic()
        assert client.is_ended()
        assert 0.3 < time.monotonic() - start_s < 5


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET /" + b"a" * 300, 414),
        (_get("/" + "a" * 300), 414),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 1100, 431),
        (_get("/metrics", *["X: yyyyyyyyyy"] * 90), 431),
        (_get("/metrics", "X: " + "a" * 1100), 431),
    ],
)
def test_a_long_head_is_refused_however_much_of_it_is_here(data: bytes, status: int) -> None:
    limits = Limits(request_line_bytes=256, head_bytes=1024)
    with serving(Pages(), limits=limits) as server, connect(server) as client:
        assert client.ask(data).status == status
        assert client.is_ended()


def test_a_head_of_the_default_limits_is_accepted_and_a_larger_one_is_not() -> None:
    for length, status in ((15_000, 200), (17_000, 431)):
        with serving(Pages()) as server, connect(server) as client:
            assert client.ask(_get("/metrics", "X: " + "a" * length)).status == status


def test_a_client_that_does_not_read_loses_its_thread_and_its_buffers() -> None:
    limits = Limits(write_timeout_s=0.1)
    with serving(Pages(b"x" * 30_000_000), limits=limits) as server, connect(server) as client:
        client.send(GET)
        assert becomes_true(lambda: server.connections == 1)
        assert becomes_true(lambda: server.connections == 0)
        with pytest.raises((ConnectionResetError, EOFError)):
            client.read()


def test_a_refused_client_that_keeps_sending_is_not_listened_to_for_long() -> None:
    with serving(Pages(), limits=Limits(linger_s=0.1)) as server, connect(server) as client:
        client.send(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
        assert client.read().status == 405
        assert becomes_true(lambda: server.connections == 0)


WITHOUT_DESCRIPTORS = """
import logging, os, resource, select, socket, threading
from agent.address import parse_listen
from agent.server import Response, Server

class Pages:
    def answer(self, request):
        return Response(200, b"page")

def connect():
    return socket.create_connection(server.address, timeout=5)

told = []
logging.getLogger("http").error = lambda *arguments: told.append(arguments)
server = Server(parse_listen("127.0.0.1:0"), Pages())
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
first, second = connect(), connect()
lowest_free = os.dup(0)
os.close(lowest_free)
resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
server.accept()
server.accept()
print("shed:", first.recv(1), second.recv(1))
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
print("waiting:", select.select([server], [], [], 0)[0], "told:", len(told))
client = connect()
server.accept()
client.sendall(b"GET / HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n")
print("again:", client.recv(12), flush=True)
os._exit(0)
"""


def test_without_descriptors_a_connection_is_shed_instead_of_waking_the_loop_for_ever() -> None:
    # In a process of its own: other tests' threads must not free a descriptor at the wrong moment.
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_DESCRIPTORS], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout.splitlines() == ["shed: b'' b''", "waiting: [] told: 1", "again: b'HTTP/1.1 200'"]


def test_accept_without_a_waiting_connection_returns() -> None:
    server = Server(parse_listen("127.0.0.1:0"), Pages())
    server.accept()
    server.close()
    server.accept()


# Listening


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("0.0.0.0:9753", ("0.0.0.0", 9753)),  # noqa: S104 - only read
        ("[::]:9753", ("::", 9753)),
        ("[fe80::1%eth0]:1", ("fe80::1%eth0", 1)),
        (":9753", ("", 9753)),
        (" localhost:0 ", ("localhost", 0)),
    ],
)
def test_listen_addresses_are_read_as_people_write_them(text: str, address: tuple[str, int]) -> None:
    assert parse_listen(text) == address
    assert parse_listen(str(parse_listen(text))) == address


@pytest.mark.parametrize(
    "text", ["", "9753", "::1:9753", "host:", "host:http", "host:70000", "host:-1", "a b:1", "[x]:1"]
)
def test_a_wrong_listen_address_is_refused_with_what_was_expected(text: str) -> None:
    with pytest.raises(ValueError, match="expected a"):
        parse_listen(text)


def test_the_empty_host_takes_ipv4_clients_and_trusts_loopback() -> None:
    app = Pages()
    with (
        serving(app, parse_listen(":0")) as server,
        socket.create_connection(("127.0.0.1", server.address[1]), 5) as sock,
    ):
        sock.sendall(_get("/metrics", "Connection: close"))
        assert sock.recv(12) == b"HTTP/1.1 200"
    assert app.requests[0].trusted


def test_a_port_in_use_is_told_with_the_address() -> None:
    with serving(Pages()) as server:
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{server.address[1]}: ") as raised:
            Server(TcpAddress(*server.address), Pages())
        assert raised.value.errno == errno.EADDRINUSE


def test_close_frees_the_port_for_a_successor_though_clients_are_connected() -> None:
    first = Server(parse_listen("127.0.0.1:0"), Pages())
    address = TcpAddress(*first.address)
    with connect(first) as client:
        first.accept()
        client.ask()
        first.close()
        with serving(Pages(), address) as successor, connect(successor) as other:
            assert other.ask().status == 200
        assert client.is_ended()


def test_closing_ends_an_idle_and_a_busy_connection_at_once() -> None:
    app = Pages()
    server = Server(parse_listen("127.0.0.1:0"), app)
    with connect(server) as idle, connect(server) as busy:
        server.accept()
        server.accept()
        idle.ask()
        busy.send(_get("/hold"))
        assert app.held.acquire(timeout=5)
        server.close()
        server.close()
        assert idle.is_ended()
        assert busy.is_ended()
        app.release.set()
        assert server.connections == 0


# The control socket


def test_the_control_socket_answers_trusted_and_takes_post(folder: Path) -> None:
    app = Pages()
    path = folder / "made" / "agent.sock"
    with serving(app, path), connect_unix(path) as client:
        assert client.ask().status == 200
        answer = client.ask(b"POST /api/reload HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nbody" + GET)
        assert answer.body == b"/api/reload body"
        assert client.read().status == 200
        assert client.ask(b"PUT / HTTP/1.1\r\nHost: x\r\n\r\n").headers["allow"] == "GET, HEAD, POST"
    assert all(request.trusted and request.control for request in app.requests)
    assert not path.exists()


def test_a_body_is_waited_for_with_100_continue(folder: Path) -> None:
    path = folder / "s"
    with serving(Pages(), path), connect_unix(path) as client:
        client.send(b"POST /x HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n")
        assert client.read().status == 100
        client.send(b"ab")
        assert client.read().body == b"/x ab"


def test_a_request_that_announces_no_body_has_none(folder: Path) -> None:
    """As `curl -X POST` asks."""
    with serving(Pages(), folder / "s"), connect_unix(folder / "s") as client:
        assert client.ask(b"POST /x HTTP/1.1\r\nHost: x\r\n\r\n").body == b"/x "
        assert client.ask(b"GET /y HTTP/1.1\r\nHost: x\r\n\r\n").status == 200


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("Content-Length: 11", 413),
        ("Content-Length: 99999999999999999999999999", 413),
        ("Content-Length: -1", 400),
        ("Content-Length: 0x5", 400),
        ("Transfer-Encoding: chunked", 501),
        ("Content-Length: 5", 408),
    ],
)
def test_a_body_out_of_bounds_is_refused(folder: Path, header: str, status: int) -> None:
    app = Pages()
    limits = Limits(body_bytes=10, head_timeout_s=0.2)
    with serving(app, folder / "s", limits=limits), connect_unix(folder / "s") as client:
        assert client.ask(f"POST / HTTP/1.1\r\nHost: x\r\n{header}\r\n\r\n".encode()).status == status
        assert client.is_ended()
    assert app.requests == []


def test_the_control_socket_is_for_owner_and_group(folder: Path) -> None:
    path = folder / "s"
    old_mask = os.umask(0)
    try:
        server = Server(path, Pages())
    finally:
        os.umask(old_mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    with contextlib.suppress(KeyError):
        assert os.geteuid() != 0 or path.stat().st_gid == grp.getgrnam("hpcwatch").gr_gid
    with pytest.raises(ValueError, match="no port"):
        _ = server.address
    server.close()


def test_a_dead_agents_socket_is_replaced(folder: Path) -> None:
    path = folder / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
        dead.listen()
    with serving(Pages(), path), connect_unix(path) as client:
        assert client.ask().status == 200


def test_a_living_agents_socket_is_left_alone(folder: Path) -> None:
    path = folder / "s"
    with serving(Pages(), path):
        with pytest.raises(OSError, match="another agent answers there") as raised:
            Server(path, Pages())
        assert raised.value.errno == errno.EADDRINUSE
        with connect_unix(path) as client:
            assert client.ask().status == 200


def test_a_file_in_the_sockets_place_is_left_alone(folder: Path) -> None:
    path = folder / "s"
    path.write_text("precious")
    with pytest.raises(OSError, match="is no socket") as raised:
        Server(path, Pages())
    assert raised.value.errno == errno.EEXIST
    assert path.read_text() == "precious"


def test_closing_leaves_a_successors_socket(folder: Path) -> None:
    path = folder / "s"
    old = Server(path, Pages())
    path.unlink()
    with serving(Pages(), path):
        old.close()
        with connect_unix(path) as client:
            assert client.ask().status == 200


def test_an_application_needs_nothing_but_answer() -> None:
    class Hello:
        def answer(self, request: Request) -> Response:
            return Response(404, b"no such page: " + request.method.encode())

    with serving(Hello()) as server, connect(server) as client:
        answer = client.ask()
    assert (answer.status, answer.body) == (404, b"no such page: GET")
