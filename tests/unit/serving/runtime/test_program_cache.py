import logging

import jax
import jax.numpy as jnp
import pytest
from jax._src import compilation_cache as jax_cache

from serving.runtime import program_cache

SETTINGS = (
    "jax_enable_compilation_cache",
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
)
HIT = "/jax/compilation_cache/cache_hits"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A folder of its own for this test, and jax's settings as they were afterwards."""
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    monkeypatch.setattr(jax_cache, "get_file_cache", jax_cache.get_file_cache)
    monkeypatch.setenv("LORA_JAX_CACHE", str(tmp_path / "cache"))
    jax.config.update("jax_compilation_cache_dir", None)
    yield tmp_path / "cache"
    for name, value in before.items():
        jax.config.update(name, value)
    jax_cache.reset_cache()


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
    assert list(cache.rglob("*.compiled"))
    assert compile_anew(301) == 1
    assert compile_anew(302) == 0


@pytest.mark.parametrize("damage", [lambda d: d[: len(d) // 2], lambda d: b"", lambda d: bytes(9)])
def test_a_damaged_program_is_compiled_again_and_kept(cache, monkeypatch, damage):
    monkeypatch.setattr(program_cache, "_MIN_COMPILE_S", 0.0)
    program_cache.keep_programs()
    compile_anew(303)
    for file in cache.rglob("*.compiled"):
        file.write_bytes(damage(file.read_bytes()))
    assert compile_anew(303) == 0
    assert compile_anew(303) == 1


def test_a_folder_that_others_may_write_is_not_used(cache, caplog):
    cache.mkdir()
    cache.chmod(0o777)
    program_cache.keep_programs()
    assert jax.config.jax_compilation_cache_dir is None
    said = f"other users may write {cache} (mode 0777): run chmod go-w {cache}, or name another"
    assert said in caplog.text
    assert not list(cache.iterdir())


def test_neither_is_one_that_is_set_in_jax(cache, tmp_path, caplog):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine").chmod(0o777)
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "mine"))
    program_cache.keep_programs()
    assert jax.config.jax_compilation_cache_dir is None
    assert "compiled anew at each start" in caplog.text


def test_a_folder_set_in_jax_is_left_alone(cache, tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "mine"))
    program_cache.keep_programs()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "mine")
    assert not cache.exists()


def test_without_room_programs_are_compiled_anew(cache, caplog):
    cache.write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        program_cache.keep_programs()
    assert "compiled anew" in caplog.text
    assert jax.config.jax_compilation_cache_dir is None


def test_steps_are_kept_beside_programs_unless_that_is_off(cache):
    program_cache.keep_programs()
    steps, programs = program_cache.step_files()
    steps.put("key", b"step")
    assert programs.get("key") is None
    assert [p.parent.parent.name for p in cache.rglob("key.compiled")] == ["steps"]
    jax.config.update("jax_enable_compilation_cache", False)
    assert program_cache.step_files() is None


def test_steps_are_not_kept_in_a_cache_of_jax_itself(cache, tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
    program_cache.keep_programs()
    assert program_cache.step_files() is None


def test_functions_have_folders_apart_and_read_alone(cache, monkeypatch):
    """What a function's process compiles is not kept, and a server finds nothing of theirs."""
    folders = program_cache.keep_programs_apart("functions", writes=False)
    assert [folder.relative_to(cache).parts[:2] for folder in folders] == 2 * [
        ("programs", "functions")
    ]
    program_cache.keep_programs()  # as an engine does, in the same process
    assert jax.config.jax_compilation_cache_dir == str(folders[0])
    assert [compile_anew(304), compile_anew(304)] == [0, 0]
    steps, programs = program_cache.step_files()
    steps.put("key", b"step")
    programs.put("key", b"program")
    assert not list(cache.rglob("*.compiled"))
    program_cache.keep_programs_apart("functions", writes=True)
    assert [compile_anew(304), compile_anew(304)] == [0, 1]
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setattr(program_cache, "_MIN_COMPILE_S", 0.0)
    program_cache.keep_programs()
    assert compile_anew(304) == 0


def test_functions_of_a_folder_set_in_jax_have_a_folder_in_it(cache, tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "mine"))
    folders = program_cache.keep_programs_apart("functions", writes=True)
    assert [folder.relative_to(tmp_path).parts[:2] for folder in folders] == 2 * [
        ("mine", "functions")
    ]
    compile_anew(305)
    assert not list((tmp_path / "mine").glob("*.*"))
    assert list(folders[0].glob("*.compiled"))


def test_a_folder_of_another_machine_is_left_to_jax(cache):
    jax.config.update("jax_compilation_cache_dir", "gs://bucket/programs")
    program_cache.keep_programs()
    assert program_cache.keep_programs_apart("functions", writes=True) == []
    assert program_cache.step_files() is None
    assert jax.config.jax_compilation_cache_dir == "gs://bucket/programs"
    assert not cache.exists()


def test_functions_without_a_folder_compile_anew_and_steps_without_one_are_traced(cache, caplog):
    program_cache.keep_programs()
    (cache / "programs" / "functions").write_text("a file where the folder should be")
    (cache / "programs" / "steps").write_text("a file where the folder should be")
    assert program_cache.step_files() is None
    assert "Steps are traced anew at each start" in caplog.text
    jax.config.update("jax_compilation_cache_dir", None)
    assert program_cache.keep_programs_apart("functions", writes=True) == []
    assert jax.config.jax_compilation_cache_dir is None
    assert "Programs are compiled anew at each start" in caplog.text
