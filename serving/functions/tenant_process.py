"""Process of one adapter for `isolation=server`: its matrices are here and nowhere else.

It has no backbone, no KV pages, no prompt and no engine; it sees the hidden states of its own rows.
"""

import threading
import time
from typing import Any

from lora_jax.memory.wire import close_all, send_fds, send_header
from serving.lora_server.tenant_adapter import open_tenant
from serving.lora_server.transport.socket_messages import wait_for_end


def run(connection: Any, order: dict[str, Any], private_bytes: Any) -> None:
    """Answer an engine's rows until the other side of the connection has gone.

    `order` says name, adapter, model and the engine's sizes; `private_bytes` counts this process's
    own memory.
    """
    start = time.monotonic()
    try:
        sizes = order["max_rank"], order["max_rows"], order["dtype"]
        server, report = open_tenant(order["model"], order["adapter"], *sizes)
        seat = server.join(order["last_epoch"])
    except (ValueError, KeyError, TypeError, OSError, NotImplementedError) as error:
        send_header(connection, {"error": f"Function {order['name']!r} cannot start: {error}"})
        return
    answer = {"report": report.as_json(), "epoch": seat.epoch, "private_bytes": private_bytes()}
    fds = [seat.channel, seat.bell, seat.life]
    try:
        send_header(connection, {"ready": True, "start_s": time.monotonic() - start, **answer})
        send_fds(connection, fds)
    finally:
        close_all(fds)

    def end() -> None:
        wait_for_end(connection)
        server.stop()

    threading.Thread(target=end, name="end", daemon=True).start()
    server.run()
    server.close()
