"""The supervisor's own work: plan, start every role, answer in front of them."""

import dataclasses
import logging
import socket
from contextlib import ExitStack

from serving import logs
from serving.cluster.local import LocalCluster
from serving.cluster.proxy import Proxy
from serving.cluster.server_place import server_spec
from serving.http.model_names import folder_adapters
from serving.http.uvicorn_server import AnnouncingServer, uvicorn_config
from serving.lora_server.spec import ServerSpec, design
from serving.options import Options
from serving.serve import StartError, examples_of, guarded, has_template, run_server, url_of

logger = logging.getLogger(__name__)


def serve_cluster(options: Options, sock: socket.socket) -> None:
    """Start every role, answer on the bound socket until SIGTERM or SIGINT, end them.

    Raises StartError for what is impossible, before any process is started, and for a role that
    cannot start.
    """
    try:
        spec = server_spec(options.engine, options.cluster)
    except (ValueError, OSError) as error:
        raise StartError(f"Cannot serve {options.engine.model}: {error}") from error
    _log_plan(options, spec)
    with ExitStack() as stack:
        try:
            http = dataclasses.replace(options.http, cors=None, root_path="")  # both are here
            inner = dataclasses.replace(options, http=http, uds=None, uvicorn={}, access_log=False)
            cluster = LocalCluster(inner, spec)
        except (ConnectionError, RuntimeError) as error:
            raise StartError(str(error)) from error
        stack.callback(cluster.close)
        base = options.engine.model_name
        proxy = Proxy(cluster.paths, cluster.router, (base, *options.http.served_names))
        names = [module.name for module in options.adapters]
        names += sorted(folder_adapters(options.engine.lora_dir))
        examples, chats = examples_of(options), has_template(options.engine)
        url = url_of(options, sock)
        lines = logs.ready_lines(url, base, options.http.has_api_keys, names, examples, chats)
        config = uvicorn_config(
            guarded(proxy, options, sock), access_log=options.access_log, **options.uvicorn
        )
        run_server(AnnouncingServer(config, lambda: logs.log_all(lines)), sock)


def _log_plan(options: Options, spec: ServerSpec | None) -> None:
    from lora_jax.placement.picture import picture

    logger.info("%s", logs.version_line())
    if spec is not None:
        logs.log_all(["LoRA Server: " + picture(design(spec).plan.placement)])
    logger.info("LLM instances: %d.", options.cluster.instances)
