"""Merges the metrics of several instances: each sample gets its instance as a label. No jax."""

from collections.abc import Mapping, Sequence

from prometheus_client.parser import text_string_to_metric_families


def merge(text_of: Mapping[str, str]) -> str:
    """Return the exposition texts of the instances as one, with the label `engine`.

    A label `engine` that a sample has is replaced where it is an instance's own, "0", and goes
    behind where it is a function's: "0/law".
    vLLM labels the engines of its data parallel so; `instance` is a label of Prometheus' own.
    Families come in the order of their first sight, with all samples together, as the format asks.
    """
    heads: dict[str, list[str]] = {}
    lines: dict[str, list[str]] = {}
    for instance, text in text_of.items():
        for family in text_string_to_metric_families(text):
            name = family.name
            if name not in heads:
                suffix = "_total" if family.type == "counter" else ""
                shown = family.documentation.replace("\\", "\\\\").replace("\n", "\\n")
                heads[name] = [
                    f"# HELP {name}{suffix} {shown}",
                    f"# TYPE {name}{suffix} {family.type}",
                ]
                lines[name] = []
            for sample in family.samples:
                inner = sample.labels.get("engine")
                whose = instance if inner in (None, "0") else f"{instance}/{inner}"
                labels = {**sample.labels, "engine": whose}
                shown = ",".join(f'{key}="{_escaped(value)}"' for key, value in labels.items())
                lines[name].append(f"{sample.name}{{{shown}}} {_number(sample.value)}")
    return "".join(line + "\n" for name in heads for line in (*heads[name], *lines[name]))


def role_lines(roles: Mapping[str, Sequence[bool]]) -> str:
    """Return a gauge of which roles are up, by kind ("instances", "ranks") and number."""
    lines = ["# HELP lora_jax:role_up Whether a role of the cluster answers.\n"]
    lines.append("# TYPE lora_jax:role_up gauge\n")
    for kind, up in roles.items():
        role = kind.removesuffix("s")
        lines += [
            f'lora_jax:role_up{{role="{role}",number="{n}"}} {float(one)}\n'
            for n, one in enumerate(up)
        ]
    return "".join(lines)


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float) -> str:
    return {"inf": "+Inf", "-inf": "-Inf", "nan": "NaN"}.get(repr(value), repr(value))
