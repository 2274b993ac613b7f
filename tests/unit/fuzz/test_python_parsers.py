"""Every Python parser of foreign bytes gives a value or the error that it documents."""

import contextlib
import json
import socket
import struct

import json_cases
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.cases.transport_cases import open_client, open_servers, terms_of

from lora_jax.adapters.formats import esft_config, peft_config, safetensors_file
from serving.http.access.key_file import read_keys_file
from serving.http.access.keys import KeyRing
from serving.http.settings import HttpSettings
from serving.lora_server.transport import header, socket_messages
from serving.lora_server.transport.base import TransportError
from serving.lora_server.transport.compatibility import mismatch
from serving.lora_server.transport.hosts import tcp

QUICK = settings(max_examples=150, deadline=None)
RIGHT_PEFT = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 8,
    "use_rslora": False,
    "target_modules": ["q_proj"],
    "rank_pattern": {"q_proj": 2},
    "alpha_pattern": {"v.*proj": 4},
    "target_parameters": ["experts.down_proj"],
    "base_model_name_or_path": "some/model",
    "bias": "none",
    "peft_version": "0.21",
}
RIGHT_ESFT = {"experts": {"0": [1, 2], "3": []}, "shared_experts": False}
RIGHT_TENSORS = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
}


@QUICK
@given(json_cases.texts(json_cases.almost(RIGHT_PEFT)))
def test_adapter_config(data):
    with contextlib.suppress(ValueError):
        config = peft_config.parse(data)
        assert config.rank > 0
        assert config.scaling_of("model.layers.0.q_proj", config.rank_of("q_proj")) == (
            config.scaling_of("model.layers.0.q_proj", config.rank_of("q_proj"))
        )


def test_a_right_adapter_config_is_taken():
    assert peft_config.parse(json.dumps(RIGHT_PEFT).encode()).rank == 4


@QUICK
@given(json_cases.texts(json_cases.almost(RIGHT_ESFT)))
def test_expert_cfg(data):
    with contextlib.suppress(ValueError):
        for layer, experts in esft_config.parse(data).items():
            assert layer >= 0
            assert experts == tuple(sorted(set(experts)))


def tensor_files():
    """Files whose header is almost right, with a length that may be a lie."""
    header_bytes = json_cases.texts(json_cases.almost(RIGHT_TENSORS))
    lengths = st.sampled_from([0, 0, 0, 0, 1, -1, 8, 2**40, 2**63])

    def build(head: bytes, lie: int, data: int) -> bytes:
        length = max(0, len(head) + lie) % 2**64
        return struct.pack("<Q", length) + head + bytes(data)

    return st.builds(build, header_bytes, lengths, st.sampled_from([32, 32, 31, 33, 0]))


@QUICK
@given(tensor_files())
def test_safetensors(data):
    with contextlib.suppress(ValueError):
        tensors = safetensors_file.parse(data, "adapter_model.safetensors", FILE_LIMITS)
        for tensor in tensors.values():
            assert tensor.read().nbytes == tensor.num_bytes
        assert sum(tensor.num_bytes for tensor in tensors.values()) <= len(data)


FILE_LIMITS = safetensors_file.FileLimits()


def test_a_right_safetensors_file_is_taken():
    head = json.dumps(RIGHT_TENSORS).encode()
    data = struct.pack("<Q", len(head)) + head + bytes(32)
    assert set(safetensors_file.parse(data, "f", FILE_LIMITS)) == {"a", "b"}


@QUICK
@given(st.binary(min_size=62, max_size=66) | st.binary(min_size=64, max_size=64), st.data())
def test_header(data, draw):
    whole = header.Header(1, 2, 0, 1, 3, 1, 7, 96).pack()
    place, bit = draw.draw(st.integers(0, 511)), draw.draw(st.booleans())
    turned = bytearray(whole)
    turned[place // 8] ^= bit << (place % 8)
    for given_bytes in (data, bytes(turned)):
        found = header.parse(given_bytes)
        assert found is None or found.pack() == given_bytes
    assert (header.parse(bytes(turned)) is None) == bit


@QUICK
@given(st.text(max_size=60) | json_cases.almost({"key": {"rate": 1, "adapters": ["a"]}}))
@example("{a: [}")
@example("? [a, b]: c")
@example({"": None})
@example({"\ud800": None})
def test_keys_file(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "keys.yaml"
    text = content if isinstance(content, str) else json.dumps(content)
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with contextlib.suppress(ValueError):
        tenants = read_keys_file(path)
        ring = KeyRing(HttpSettings(tenants=tenants))
        assert all(tenant.key and ring.find(tenant.key) is not None for tenant in tenants)


def messages():
    """Messages between processes: a length, which may be a lie, and JSON."""
    body = json_cases.texts(json_cases.almost({"facts": terms_of().facts(0), "last_epoch": 0}))
    lies = st.sampled_from([0, 0, 0, 1, -1, 2**31])

    def build(data: bytes, lie: int) -> bytes:
        return max(0, len(data) + lie).to_bytes(4, "little") + data

    return st.builds(build, body, lies)


@contextlib.contextmanager
def heard(*parts: bytes):
    """A connection whose other side has said these bytes and no more."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(2)
        theirs.sendall(b"".join(parts))
        theirs.shutdown(socket.SHUT_WR)
        yield ours


@QUICK
@given(messages())
def test_message_of_a_peer(message):
    with heard(message) as connection, contextlib.suppress(OSError, ValueError):
        said, fds = socket_messages.receive(connection)
        assert isinstance(said, dict)
        assert not fds


@QUICK
@given(st.lists(messages(), max_size=2))
def test_proof_of_a_peer(spoken):
    for admit in (tcp._admit_client, tcp._admit_server):
        with heard(*spoken) as connection, pytest.raises((OSError, ValueError, TransportError)):
            admit(b"0123456789abcdef", connection)


@QUICK
@given(json_cases.almost(terms_of().facts(0)))
def test_facts_of_a_peer(facts):
    ours = terms_of().facts(0)
    agree = all(facts.get(name) == value for name, value in ours.items())
    assert (mismatch(ours, facts) is None) == agree


def test_a_rank_outlives_greetings_of_strangers(tmp_path):
    with open_servers("shared_memory", terms_of(ep=1), tmp_path) as servers:
        path = str(tmp_path / "rank-0.sock")

        @settings(max_examples=60, deadline=None)
        @given(messages())
        def greet(message):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
                stranger.settimeout(10)
                stranger.connect(path)
                with contextlib.suppress(OSError):
                    stranger.sendall(message)
                    stranger.shutdown(socket.SHUT_WR)
                    while stranger.recv(4096):
                        pass

        greet()
        open_client("shared_memory", terms_of(ep=1), servers, tmp_path).close()
