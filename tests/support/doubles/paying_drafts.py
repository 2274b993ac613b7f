"""Draft times by which every draft pays, so that how often there are some follows from tokens."""

from serving import Engine
from serving.scheduling.draft_times import DraftTimes


class Paying(DraftTimes):
    def best(self, rows, choices):
        return 0

    def rest(self, rows):
        return False


def send_all_drafts(engine: Engine) -> None:
    """Have an engine that has begun nothing send every draft."""
    speculation = engine._loop._parts.scheduler._speculation
    assert speculation is not None, "no speculative_config"
    speculation._times = Paying()


def num_drafts(engine: Engine) -> list[float]:
    """Return drafts, their tokens, and accepted ones, as /metrics says."""
    labels = {"model_name": engine.model_info.name, "engine": "0"}
    names = ("drafts", "draft_tokens", "accepted_tokens")
    get = engine.metrics.registry.get_sample_value
    return [get(f"vllm:spec_decode_num_{name}_total", labels) or 0.0 for name in names]
