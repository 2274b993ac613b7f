"""The supervisor's own work: plan, start every role, answer in front of them."""

import dataclasses
import logging
import signal
import socket
from contextlib import ExitStack

from starlette.types import ASGIApp

from serving.cli.options import Options
from serving.cli.serve import (
    StartError,
    examples_of,
    front_server,
    has_template,
    journal_of,
    only_server,
    run_server,
    tell_unused_state,
    url_of,
)
from serving.cluster.abstract_front import BodyLimits
from serving.cluster.local import LocalCluster
from serving.cluster.proxy import Proxy
from serving.cluster.server_place import server_spec
from serving.engine.metrics import logs
from serving.http.access.audit import AuditLog
from serving.http.access.auth import Authenticate
from serving.http.access.key_watch import KeyWatch
from serving.http.access.keys import KeyRing
from serving.http.access.observe import HttpMetrics, Observe
from serving.http.errors import CatchAll
from serving.http.requests.body import OneLength
from serving.http.requests.model_names import folder_adapters
from serving.lora_server.spec import ServerSpec, design
from serving.runtime.leaving import leave
from serving.runtime.role_host import AbstractRoleHosts, OneHost

logger = logging.getLogger(__name__)

_ROLES_SHARE = 0.3  # of the time after SIGTERM, for the roles to end


def serve_cluster(
    options: Options, sock: socket.socket, nodes: AbstractRoleHosts | None = None
) -> None:
    """Start every role, answer on the bound socket until SIGTERM or SIGINT, end them.

    `nodes` are the hosts of --nnodes, which the caller closes.

    Raises StartError for what is impossible, before any process is started, and for a role that
    cannot start.
    """
    try:
        spec = server_spec(options.engine, options.cluster)
    except (ValueError, OSError) as error:
        raise StartError(f"Cannot serve {options.engine.model}: {error}") from error
    _log_plan(options, spec)
    with ExitStack() as stack:
        # Until the server answers: then it handles the signal itself.
        before = signal.signal(signal.SIGTERM, leave)
        stack.callback(signal.signal, signal.SIGTERM, before)
        tell_unused_state(options)
        journal = journal_of(options)
        if journal is not None:
            stack.enter_context(only_server(journal))
        options, hosts = _hosts_of(options, nodes)
        stack.callback(hosts.close)
        try:
            # What the front does itself.
            http = dataclasses.replace(options.http, cors=None, root_path="", is_behind_front=True)
            http = dataclasses.replace(http, num_instances=options.cluster.instances)
            inner = dataclasses.replace(options, http=http, uds=None, uvicorn={}, access_log=False)
            cluster = LocalCluster(inner, spec, hosts)
        except (ConnectionError, RuntimeError) as error:
            raise StartError(str(error)) from error
        stack.callback(cluster.close)
        base = options.engine.model_name
        keys, audit = KeyRing(options.http), AuditLog(options.http.audit_log)
        if options.http.keys_file is not None:
            stack.enter_context(KeyWatch(options.http.keys_file, keys, audit))
        app = front_app(cluster, options, keys, audit)
        names = [module.name for module in options.adapters]
        names += sorted(folder_adapters(options.engine.lora_dir))
        names += sorted(folder_adapters(options.functions.functions))
        examples, chats = examples_of(options), has_template(options.engine)
        url = url_of(options, sock)
        asked = options.http.has_api_keys, names, examples, chats, options.http.demo
        lines = logs.ready_lines(url, base, *asked)

        def ready() -> None:
            logs.log_all(lines)

        end_s = options.shutdown_timeout * _ROLES_SHARE
        ending = cluster.replace_no_more
        server = front_server(app, options, sock, ready, 2, end_s, ending)
        run_server(server, sock)
        cluster.close(end_s)


def _hosts_of(
    options: Options, nodes: AbstractRoleHosts | None
) -> tuple[Options, AbstractRoleHosts]:
    """Return the hosts of all roles, and the options as they are on them. Raises StartError."""
    if nodes is not None:
        from serving.cluster.nodes.hosts import options_of_roles  # here: others have one host

        return options_of_roles(options), nodes
    if not options.cluster.uses_ray:
        return options, OneHost()
    from serving.cluster.ray.joining import ray_hosts  # here: others have no ray

    return ray_hosts(options)


def front_app(cluster: LocalCluster, options: Options, keys: KeyRing, audit: AuditLog) -> ASGIApp:
    """Return the application in front of the instances.

    It checks keys, lengths and sizes as an instance does, before a body is read or a name is kept,
    and writes the access log and refusals.
    """
    http, metrics = options.http, HttpMetrics()
    proxy = Proxy(
        cluster.paths,
        cluster.router,
        (options.engine.model_name, options.engine.model, *http.served_names),
        BodyLimits(cluster.body_bytes, http.body_timeout_s),
        cluster.roles,
        cluster.changes,
        lambda: metrics.failed_keys_text() + cluster.metrics_text(),
    )
    guarded = CatchAll(OneLength(Authenticate(proxy, keys, metrics, http.demo)))
    return Observe(guarded, metrics, audit, options.access_log)


def _log_plan(options: Options, spec: ServerSpec | None) -> None:
    from lora_jax.placement.picture import picture

    logger.info("%s", logs.version_line())
    if spec is not None:
        logs.log_all(["LoRA Server: " + picture(design(spec).layout.placement)])
    logger.info("LLM instances: %d.", options.cluster.instances)
