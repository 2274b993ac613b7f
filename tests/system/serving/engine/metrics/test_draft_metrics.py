from prometheus_client import CollectorRegistry

from serving.engine.metrics.draft_metrics import DraftCollector
from serving.scheduling.speculation import DraftStats


def test_counters_have_vllm_s_names():
    registry, labels = CollectorRegistry(), {"model_name": "m", "engine": "0"}
    registry.register(DraftCollector(labels, lambda: DraftStats(3, 9, 5, (3, 2, 0))))
    for name, value in (("drafts", 3), ("draft_tokens", 9), ("accepted_tokens", 5)):
        assert registry.get_sample_value(f"vllm:spec_decode_num_{name}_total", labels) == value
    by_place = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    for place, count in enumerate((3, 2, 0)):
        assert registry.get_sample_value(by_place, {**labels, "position": str(place)}) == count
