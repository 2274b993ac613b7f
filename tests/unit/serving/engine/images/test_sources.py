"""URLs of images: what is read, what is refused, and that no name or address leaks."""

import base64
import os
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from serving.engine.images import sources
from serving.engine.images.decode import ImageError
from serving.engine.images.sources import FetchFailed, LongUrl, MediaPolicy, is_public, read_source

DATA = b"\x89PNG some bytes"
NONE = MediaPolicy()
OPEN = MediaPolicy(domains=frozenset({"pictures.test"}), timeout_s=60.0, max_bytes=4096)


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def test_data_urls_are_read_without_leave():
    assert read_source(data_url(DATA), NONE) == DATA
    assert read_source(data_url(DATA, "image/svg+xml"), NONE) == DATA  # the decoder refuses it
    url = data_url(DATA)
    assert read_source(url.replace("data:image/png;base64", "DATA:image/PNG;BASE64"), NONE) == DATA


def test_base64_of_many_pieces_is_decoded_and_padding_between_them_is_refused(monkeypatch):
    monkeypatch.setattr(sources, "_BASE64_PIECE", 8)
    for size in range(1, 40):
        assert read_source(data_url(bytes(range(size))), NONE) == bytes(range(size))
    for wrong in ("AAAAAAA=AAAA", "AAAAAA==AAAA", "AAAAAAAAA", "AAAAAAAA=", "AAAAAAAA AAAA"):
        with pytest.raises(ImageError, match="damaged"):
            read_source("data:image/png;base64," + wrong, NONE)


def test_base64_that_lies_in_a_body_is_decoded_with_its_escapes(monkeypatch):
    monkeypatch.setattr(sources, "_BASE64_PIECE", 8)
    head = "data:image/png;base64,"

    def long_url(text: bytes) -> LongUrl:
        return LongUrl.of(head, memoryview(text))

    for size in range(40):
        data = (b"\xff\xef" * size)[:size]
        text = base64.b64encode(data).replace(b"/", b"\\/")
        assert read_source(long_url(text), NONE) == data
    for damaged in (b"AAAA=AAAAAAA", b"AAA=AAAAAAAAAAAA", b"AAAAAAAAAAAAA", b"\xff" * 12):
        with pytest.raises(ImageError, match="damaged"):
            read_source(long_url(damaged), NONE)
    with pytest.raises(ImageError, match="more than 5 bytes"):
        read_source(long_url(b"A" * 8), MediaPolicy(max_bytes=5))


@pytest.mark.parametrize(
    "url",
    [
        "data:image/png,raw",
        "data:text/html;base64,AAAA",
        "data:;base64,AAAA",
        "data:image/png;base64,AA A=",
        "data:image/png;base64,A",
        "http://example.org/a.png",
        "https://pictures.test/a.png",
        "ftp://example.org/a.png",
        "file:///etc/passwd",
        "gopher://x",
        "/etc/passwd",
        "",
        "a" * 100,
    ],
)
def test_all_else_is_refused_by_default(url: str):
    with pytest.raises(ImageError) as caught:
        read_source(url, NONE)
    assert "etc" not in str(caught.value)
    assert "test" not in str(caught.value)


def test_too_many_bytes_are_refused_before_they_are_decoded():
    small = MediaPolicy(max_bytes=8)
    with pytest.raises(ImageError, match="more than 8 bytes"):
        read_source(data_url(DATA), small)


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.215.14", True),
        ("2606:2800:220:1:248:1893:25c8:1946", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.1.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("::1", False),
        ("::ffff:127.0.0.1", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("64:ff9b::7f00:1", False),
        ("2002:7f00:1::", False),
    ],
)
def test_public_addresses(address: str, public: bool):
    assert is_public(address) is public


class Pictures(BaseHTTPRequestHandler):
    """A host with a picture, a redirect, a long and a slow answer."""

    def do_GET(self) -> None:
        if self.path == "/drip":
            self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Long: ")
            while not self.server.stop.wait(0.02):  # type: ignore[attr-defined]
                self.wfile.write(b"x")
            return
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("Location", "http://127.0.0.1/secret")
            self.end_headers()
            return
        self.send_response(200 if self.path in ("/a.png?x=1", "/long", "/slow") else 404)
        self.end_headers()
        if self.path == "/slow":
            self.server.stop.wait(10)  # type: ignore[attr-defined]
        self.wfile.write(DATA if self.path != "/long" else bytes(5000))

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Pictures)
    server.stop = threading.Event()  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_address[1]
    server.stop.set()  # type: ignore[attr-defined]
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch, port: int) -> list[str]:
    """pictures.test is this machine and counts as public; the list says what was resolved."""
    asked: list[str] = []
    real = socket.getaddrinfo

    def resolve(host, *args, **more):
        asked.append(host)
        return real("127.0.0.1" if host == "pictures.test" else host, *args, **more)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(sources, "is_public", lambda address: address == "127.0.0.1")
    return asked


def test_a_listed_host_is_read_and_resolved_once(reached: list[str], port: int):
    assert read_source(f"http://Pictures.test:{port}/a.png?x=1", OPEN) == DATA
    assert reached[0] == "pictures.test"
    assert "pictures.test" not in reached[1:]


@pytest.mark.parametrize("path", ["/moved", "/none", "/long"])
def test_redirects_failures_and_long_answers_are_failed_fetches(reached, port: int, path: str):
    with pytest.raises(FetchFailed) as caught:
        read_source(f"http://pictures.test:{port}{path}", OPEN)
    assert "127" not in str(caught.value)


@pytest.mark.parametrize("path", ["/slow", "/drip"])
def test_a_slow_host_costs_no_more_than_the_time_allowed(reached, port: int, path: str):
    """Before: a head that dripped was read as long as it dripped."""
    quick = MediaPolicy(domains=OPEN.domains, timeout_s=0.2)
    with pytest.raises(FetchFailed):
        read_source(f"http://pictures.test:{port}{path}", quick)


def test_a_listed_host_at_a_private_address_is_not_reached(port: int, monkeypatch):
    real = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *a, **k: real("127.0.0.1", *a, **k))
    monkeypatch.setattr(socket, "create_connection", lambda *a, **k: pytest.fail("connected"))
    with pytest.raises(FetchFailed, match="no public address"):
        read_source(f"http://pictures.test:{port}/a.png?x=1", OPEN)


@pytest.mark.parametrize("addresses", [("8.8.8.8", "10.0.0.1"), ("10.0.0.1", "8.8.8.8"), ()])
def test_a_host_with_any_address_that_is_not_public_is_not_reached(addresses, monkeypatch):
    entries = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (name, 80)) for name in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: entries)
    monkeypatch.setattr(socket, "create_connection", lambda *a, **k: pytest.fail("connected"))
    with pytest.raises(FetchFailed, match="no public address"):
        read_source("http://pictures.test/a.png", OPEN)


@pytest.mark.parametrize(
    "url",
    [
        "http://other.test/a.png",
        "http://pictures.test@other.test/a.png",
        "http://user:word@pictures.test/a.png",
        "http://pictures.test:99999/a.png",
        "http://127.0.0.1/a.png",
        "http://[::1]/a.png",
        "http://pictures.test/a\r\nHost: x",
    ],
)
def test_other_hosts_are_refused_without_a_look(url: str, monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: pytest.fail("resolved"))
    with pytest.raises(ImageError):
        read_source(url, OPEN)


def test_files_are_read_inside_the_folder_only(tmp_path: Path):
    inside, outside = tmp_path / "in", tmp_path / "out"
    inside.mkdir()
    outside.mkdir()
    (inside / "a b.png").write_bytes(DATA)
    (outside / "secret").write_bytes(b"secret")
    (inside / "link").symlink_to(outside / "secret")
    (inside / "own").symlink_to(inside / "a b.png")
    os.mkfifo(inside / "pipe")
    policy = MediaPolicy(local_path=str(inside), max_bytes=100)
    assert read_source(f"file://{inside}/a%20b.png", policy) == DATA
    assert read_source(f"file://{inside}/own", policy) == DATA
    (tmp_path / "inner").mkdir()  # its name begins like the folder's
    (tmp_path / "inner" / "secret").write_bytes(b"secret")
    names = ("link", "../out/secret", "../inner/secret", "none", ".", "pipe", "a%00b")
    for name in names:
        with pytest.raises(ImageError, match="no file of the allowed folder"):
            read_source(f"file://{inside}/{name}", policy)
    for host in ("host", "[", "\u2100.x"):  # the last two are no hosts at all
        with pytest.raises(ImageError, match="no file"):
            read_source(f"file://{host}{inside}/own", policy)
    (inside / "big").write_bytes(bytes(101))
    with pytest.raises(ImageError, match="more than 100 bytes"):
        read_source(f"file://{inside}/big", policy)
    with pytest.raises(ValueError, match="existing folder"):
        MediaPolicy(local_path=str(tmp_path / "none"))


def test_a_link_that_replaces_a_file_after_the_check_is_not_followed(tmp_path: Path, monkeypatch):
    (tmp_path / "in").mkdir()
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "in" / "a.png").symlink_to(tmp_path / "secret")
    monkeypatch.setattr(sources.os.path, "realpath", lambda path: path)  # what it saw before
    with pytest.raises(ImageError, match="no file of the allowed folder"):
        read_source(f"file://{tmp_path}/in/a.png", MediaPolicy(local_path=str(tmp_path / "in")))


def test_a_url_that_is_none_is_refused(monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: pytest.fail("resolved"))
    with pytest.raises(ImageError, match="URL of an image is not valid"):
        read_source("http://[pictures.test/a.png", OPEN)


def test_https_is_spoken_with_the_host_that_was_asked_for(reached, port: int, monkeypatch):
    """A host without a certificate is a failed fetch."""
    asked, contexts = [], sources.ssl.create_default_context

    def context():
        made = contexts()
        wrap = made.wrap_socket

        def noted(link, **given):
            asked.append(given["server_hostname"])
            return wrap(link, **given)

        made.wrap_socket = noted
        return made

    monkeypatch.setattr(sources.ssl, "create_default_context", context)
    with pytest.raises(FetchFailed, match="could not be fetched"):
        read_source(f"https://pictures.test:{port}/a.png", OPEN)
    assert asked == ["pictures.test"]
