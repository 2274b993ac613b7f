"""States of functions as numbers."""

from types import SimpleNamespace

from serving.cluster.function_metrics import FunctionMetrics


def test_each_function_is_in_one_state():
    metrics = FunctionMetrics()
    metrics.started("law", 0.3)
    metrics.head("law", 0.4)
    metrics.answered("law", 200)
    running = SimpleNamespace(about={"private_bytes": 5})
    functions = {
        "law": SimpleNamespace(running=running, state="running"),
        "other": SimpleNamespace(running=None, state="off"),
    }
    lines = metrics.text(functions).splitlines()
    on = [line for line in lines if line.startswith("lora_jax:function_state{") and " 1.0" in line]
    assert on == [
        'lora_jax:function_state{function="law",state="running"} 1.0',
        'lora_jax:function_state{function="other",state="off"} 1.0',
    ]
    assert 'lora_jax:function_private_bytes{function="law"} 5.0' in lines
    assert 'lora_jax:function_start_seconds_sum{function="law"} 0.3' in lines
    assert 'lora_jax:function_requests_total{function="law",status="2xx"} 1.0' in lines
