"""Texts of --help: one per field, none too many."""

import dataclasses

from serving.api.cluster_config import ClusterConfig
from serving.api.config import EngineConfig
from serving.api.functions_config import FunctionsConfig
from serving.cli.flag_help import CLUSTER_HELP, ENGINE_HELP, FUNCTIONS_HELP, METAVARS


def test_every_field_has_a_text_and_every_text_a_field():
    engine = {f.name for f in dataclasses.fields(EngineConfig)} - {"model", "served_model_name"}
    cluster = {f.name for f in dataclasses.fields(ClusterConfig)}
    assert set(ENGINE_HELP) == engine
    assert set(CLUSTER_HELP) == cluster
    assert set(FUNCTIONS_HELP) == {f.name for f in dataclasses.fields(FunctionsConfig)}
    assert set(METAVARS) <= engine | cluster | set(FUNCTIONS_HELP)
