import logging

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from serving import program_cache

SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_compilation_cache_max_size",
    "jax_persistent_cache_min_compile_time_secs",
)
HIT = "/jax/compilation_cache/cache_hits"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A folder of its own for this test, and jax's settings as they were afterwards."""
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    monkeypatch.setenv("LORA_JAX_CACHE", str(tmp_path / "cache"))
    jax.config.update("jax_compilation_cache_dir", None)
    yield tmp_path / "cache"
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def compile_anew(size: int) -> int:
    """Compile a program as a new process would; return how many were read from disk."""
    hits = []
    listen = lambda event, **_: hits.append(event) if event == HIT else None  # noqa: E731
    jax.monitoring.register_event_listener(listen)
    try:
        jax.jit(lambda x: x * size + 1).lower(jnp.ones(size)).compile()
    finally:
        jax.monitoring.unregister_event_listener(listen)
    return len(hits)


def test_a_program_is_compiled_once_for_all_processes(cache, monkeypatch):
    monkeypatch.setattr(program_cache, "_MIN_COMPILE_S", 0.0)
    program_cache.keep_programs()
    assert compile_anew(301) == 0
    assert list(cache.rglob("*-cache"))
    assert compile_anew(301) == 1
    assert compile_anew(302) == 0


def test_a_folder_set_in_jax_is_left_alone(cache, tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "mine"))
    program_cache.keep_programs()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "mine")
    assert not cache.exists()


def test_without_room_programs_are_compiled_anew(cache, caplog):
    cache.write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        program_cache.keep_programs()
    assert "not cached" in caplog.text
    assert jax.config.jax_compilation_cache_dir is None
