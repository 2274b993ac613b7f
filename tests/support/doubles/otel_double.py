"""OpenTelemetry's SDK and OTLP exporters, as far as the engine calls them: spans go into a list.

The API, which propagates the caller's context, is the real one; fastapi brings it.
"""

import dataclasses
import types
from typing import Any

from opentelemetry import trace

_SDK = "opentelemetry.sdk"
_OTLP = "opentelemetry.exporter.otlp.proto"


class Resource:
    """Attributes of the process; the name is what OTEL_SERVICE_NAME would say."""

    service = "unknown_service:python"

    def __init__(self, attributes: dict[str, str]):
        self.attributes = attributes

    @classmethod
    def create(cls) -> "Resource":
        return cls({"service.name": cls.service, "telemetry.sdk.language": "python"})

    def merge(self, other: "Resource") -> "Resource":
        return Resource(self.attributes | other.attributes)


@dataclasses.dataclass
class Span:
    """A span with what it was given."""

    name: str
    context: Any
    kind: trace.SpanKind
    attributes: dict[str, Any]
    start_time: int
    status: trace.Status | None = None
    end_time: int | None = None
    finish: Any = None

    def set_status(self, status: trace.Status) -> None:
        self.status = status

    def end(self, end_time: int) -> None:
        self.end_time = end_time
        self.finish(self)

    @property
    def parent(self) -> trace.SpanContext:
        return trace.get_current_span(self.context).get_span_context()


class OtelDouble:
    """The modules by name, what was made of them, and the spans that a collector would have."""

    def __init__(self) -> None:
        self.exporters: list[dict[str, Any]] = []
        self.spans: list[Span] = []
        self.resource: Resource | None = None
        self.is_shut_down = False

    def modules(self) -> dict[str, types.ModuleType]:
        """Return the modules that stand for the SDK's and the exporters'."""
        return {
            f"{_SDK}.trace": _module(TracerProvider=self._provider),
            f"{_SDK}.trace.export": _module(BatchSpanProcessor=lambda exporter: exporter),
            f"{_SDK}.resources": _module(Resource=Resource),
            f"{_OTLP}.http.trace_exporter": _module(OTLPSpanExporter=self._exporter("http")),
            f"{_OTLP}.grpc.trace_exporter": _module(OTLPSpanExporter=self._exporter("grpc")),
        }

    def _exporter(self, protocol: str) -> Any:
        def make(**given: Any) -> list[Span]:
            self.exporters.append({"protocol": protocol, **given})
            return self.spans

        return make

    def _provider(self, *, resource: Resource, shutdown_on_exit: bool) -> Any:
        assert not shutdown_on_exit, "the engine ends it"
        self.resource, ends = resource, []

        def start_span(name: str, **given: Any) -> Span:
            return Span(name, **given, finish=lambda span: [end.append(span) for end in ends])

        return types.SimpleNamespace(
            add_span_processor=ends.append,
            get_tracer=lambda name: types.SimpleNamespace(start_span=start_span),
            shutdown=self.shut_down,
        )

    def shut_down(self) -> None:
        """Send what waits."""
        self.is_shut_down = True


def _module(**parts: Any) -> types.ModuleType:
    module = types.ModuleType("double")
    vars(module).update(parts)
    return module
