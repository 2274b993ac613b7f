"""Bytes of an image by its URL, within what the operator allows; data: URLs alone by default.

An http(s) address is resolved once, every address it has must be a public one, and the connection
goes to that very address; redirects are not followed. Messages are fixed text: they name neither
addresses nor paths.
"""

import binascii
import contextlib
import dataclasses
import http.client
import ipaddress
import os
import re
import socket
import ssl
import stat
import threading
import time
from urllib.parse import unquote, urlsplit

from serving.engine.images.decode import ImageError

_DATA = re.compile(r"data:image/[a-z0-9.+-]{1,32};base64,", re.ASCII | re.IGNORECASE)
_PIECE = 1 << 16  # bytes read at a time
_BASE64_PIECE = 1 << 20  # characters decoded at a time, a multiple of 4
_PORTS = {"http": 80, "https": 443}
_ONLY = "Only data:image/...;base64 URLs are read by this server"


class FetchFailed(ImageError):
    """An allowed address did not give an image."""


class LongUrl(str):
    """The part of a data: URL before its base64, which is in `data`: it may be large."""

    data: memoryview  # JSON's escapes of slashes may be in it

    @classmethod
    def of(cls, head: str, data: memoryview) -> "LongUrl":
        """Return the URL of a head, which ends in a comma, and of the base64 behind it."""
        url = cls(head)
        url.data = data
        return url


@dataclasses.dataclass(frozen=True)
class MediaPolicy:
    """The places that URLs of images may name: hosts, and a folder for file: URLs."""

    domains: frozenset[str] = frozenset()  # of http(s) URLs, lower case
    local_path: str | None = None
    timeout_s: float = 5.0
    max_bytes: int = 32 << 20  # of one file

    def __post_init__(self) -> None:
        if self.local_path is not None and not os.path.isdir(self.local_path):
            raise ValueError("--allowed-local-media-path must be an existing folder.")


def read_source(url: str, policy: MediaPolicy) -> bytes:
    """Return the bytes of an image. ImageError when it is not allowed, FetchFailed when it fails.

    Blocks for `timeout_s` at most, besides the time that the system takes to resolve a host.
    """
    scheme = url[:8].partition(":")[0].lower()
    if scheme == "data":
        return _of_data(url, policy)
    if scheme in _PORTS:
        return _of_http(url, policy)
    if scheme == "file":
        return _of_file(url, policy)
    raise ImageError(f"{_ONLY}.")


def _of_data(url: str, policy: MediaPolicy) -> bytes:
    head = _DATA.match(url)
    if head is None:
        raise ImageError("A data: URL of an image must be like data:image/png;base64,....")
    data = url.data if isinstance(url, LongUrl) else url[head.end() :]
    if len(data) * 3 // 4 > policy.max_bytes:
        raise ImageError(f"The image's file has more than {policy.max_bytes} bytes.")
    try:
        return _decoded(data)
    except (binascii.Error, ValueError):
        raise ImageError("The image's base64 is damaged.") from None


def _decoded(data: str | memoryview) -> bytes:
    """Return the bytes of base64; binascii.Error or ValueError for damaged one.

    Other threads run between pieces: one call for all would hold them up.
    """
    pieces, left = [], b""
    for at in range(0, len(data), _BASE64_PIECE):
        piece = data[at : at + _BASE64_PIECE]
        text = piece.encode("ascii") if isinstance(piece, str) else _unescaped(piece)
        text = left + text
        is_last = at + _BASE64_PIECE >= len(data)
        size = len(text) if is_last else len(text) // 4 * 4
        pieces.append(binascii.a2b_base64(text[:size], strict_mode=True))
        left = text[size:]
        if not is_last and len(pieces[-1]) < size // 4 * 3:
            raise binascii.Error("padding before the end")
    return b"".join(pieces)


def _unescaped(piece: memoryview) -> bytes:
    return bytes(piece).translate(None, b"\\")


def _of_file(url: str, policy: MediaPolicy) -> bytes:
    if policy.local_path is None:
        raise ImageError(f"{_ONLY}; files need --allowed-local-media-path.")
    outside = ImageError("The file: URL names no file of the allowed folder.")
    try:
        parts = urlsplit(url)
    except ValueError:
        raise outside from None
    if parts.netloc not in ("", "localhost") or "\x00" in unquote(parts.path):
        raise outside
    root, path = os.path.realpath(policy.local_path), os.path.realpath(unquote(parts.path))
    if os.path.commonpath([root, path]) != root:
        raise outside
    try:
        # Non-blocking: a named pipe must not be waited for.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        raise outside from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise outside
    with os.fdopen(handle, "rb") as file:
        data = file.read(policy.max_bytes + 1)
    if len(data) > policy.max_bytes:
        raise ImageError(f"The image's file has more than {policy.max_bytes} bytes.")
    return data


def _of_http(url: str, policy: MediaPolicy) -> bytes:
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").lower(), parts.port
    except ValueError:
        raise ImageError("The URL of an image is not valid.") from None
    if host not in policy.domains or parts.username or parts.password:
        raise ImageError(f"{_ONLY}; hosts need --allowed-media-domains.")
    if re.search(r"[\x00-\x20\x7f]", url):
        raise ImageError("The URL of an image is not valid.")
    deadline = time.monotonic() + policy.timeout_s
    try:
        address = _public_address(host, port or _PORTS[parts.scheme])
        return _fetch(parts, host, address, deadline, policy)
    except (OSError, http.client.HTTPException, ValueError) as error:
        if isinstance(error, ImageError):
            raise
        raise FetchFailed("The image could not be fetched.") from None


def _public_address(host: str, port: int) -> tuple[str, int]:
    """Return the address to connect to. FetchFailed when any of the host's is not a public one."""
    entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [str(entry[4][0]) for entry in entries]
    if not addresses or not all(is_public(address) for address in addresses):
        raise FetchFailed("The host of an image has no public address.")
    return addresses[0], port


def is_public(address: str) -> bool:
    """Return whether an address is of the public internet, also one that is wrapped in IPv6."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo or (None, None))[1]
        if inner is not None and not inner.is_global:
            return False
        if ip in ipaddress.ip_network("64:ff9b::/96"):
            return is_public(str(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)))
    return ip.is_global and not ip.is_multicast


def _fetch(parts, host: str, address: tuple[str, int], deadline: float, policy) -> bytes:
    """Return the body of a GET to that address; anything but 200 is FetchFailed."""
    left = max(0.01, deadline - time.monotonic())
    with contextlib.ExitStack() as stack:
        link = stack.enter_context(socket.create_connection(address, timeout=left))
        if parts.scheme == "https":
            context = ssl.create_default_context()
            more = {"server_hostname": host, "do_handshake_on_connect": False}
            link = stack.enter_context(context.wrap_socket(link, **more))
        # A socket's own timeout is for each byte that drips.
        timer = threading.Timer(max(0.01, deadline - time.monotonic()), _cut, (link,))
        stack.callback(timer.cancel)
        timer.start()
        if isinstance(link, ssl.SSLSocket):
            link.do_handshake()
        client = stack.enter_context(
            contextlib.closing(http.client.HTTPConnection(host, address[1]))
        )
        client.sock = link
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        client.request("GET", target, headers={"Accept": "image/*", "Connection": "close"})
        answer = stack.enter_context(contextlib.closing(client.getresponse()))
        if answer.status != 200:
            raise FetchFailed("The image could not be fetched.")
        return _body(answer, link, deadline, policy)


def _cut(link: socket.socket) -> None:
    """End this connection, so that its reader gets an error."""
    with contextlib.suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)


def _body(answer: http.client.HTTPResponse, link: socket.socket, deadline: float, policy) -> bytes:
    data = bytearray()
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise FetchFailed("The image could not be fetched.")
        link.settimeout(left)
        piece = answer.read1(_PIECE)
        if not piece and time.monotonic() < deadline:  # later it has been cut
            return bytes(data)
        data += piece
        if len(data) > policy.max_bytes:
            raise FetchFailed(f"The image's file has more than {policy.max_bytes} bytes.")
