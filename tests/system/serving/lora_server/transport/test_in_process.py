"""The transport within a process keeps the contract."""

import pytest
from support.cases.transport_cases import terms_of
from support.contracts.transport_contract import TransportContract

from serving.lora_server.transport import in_process


class TestInProcess(TransportContract):
    transport = "in_process"


def test_servers_of_other_shapes_are_refused():
    servers = [in_process.open_server(terms_of(dtype).shapes) for dtype in ("float32", "bfloat16")]
    with pytest.raises(ValueError, match="2 shapes"):
        in_process.open_client(servers)
    for server in servers:
        server.close()
