"""One set-up for every test: 4 fake CPU devices, strict dtypes and ranks, shapes checked."""

import gc
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# What one process of the suite has compiled, the others load: workers, servers, ranks. jax's key
# leaves out the CPU's features, so every machine has a folder of its own.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR",
    str(Path(__file__).parents[1] / ".cache" / "jax" / platform.node()),
)
os.environ.setdefault("JAX_COMPILATION_CACHE_MAX_SIZE", str(1 << 30))  # bounded, hence locked
# Only what is slow: bounded, every write looks at all files, 0.1 ms each.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# `make test` compiles for speed of the compiler: a quarter of the time for the same program. Tests
# marked as_shipped, `make test-all` and `make test-avx2` compile what a user's process does.
sys.path.insert(0, str(Path(__file__).parent))  # for the shared modules beside this file
if os.environ.get("FAST_COMPILE"):
    from support.processes.compiler import compile_fast

    compile_fast(os.environ)

import jax
import pytest
from support.checks import array_checks
from support.kept_logging import kept_logging
from support.late_files import LateFile, late_file
from support.processes import left_behind

ROOT = Path(__file__).parents[1]

# Of this process alone: servers and ranks of tests have one, and share their programs.
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

# Annotated shapes are contracts: every call in a test checks them.
CHECKED = [
    "lora_jax",
    "serving.steps.device_state",
    "serving.steps.sampling.sampler",
    "serving.steps.model_runner",
]
array_checks.install(CHECKED)
if os.environ.get("FAST_COMPILE"):
    from support.processes import eager

    eager.install()

# Traces allocate much and leave few cycles: at Python's own thresholds, collecting garbage takes a
# tenth to a quarter of a worker's time.
gc.set_threshold(50_000, 20, 20)


# A worker takes a file at a time: were a long one the last, the others would wait for it.
# The first ones compile what later ones load: a server of the shipped model, of a LoRA Server.
# In a new clone the first server compiles the C++ kernels too: the next five files need none. The
# unit tests compile them for test_weight_tensor.py.
LONGEST = (
    "1_quick_start.ipynb",
    "test_keeper.py",
    "test_bounds.py",
    "test_python_parsers.py",
    "test_schema.py",
    "test_scheduler_tenants.py",
    "test_weight_tensor.py",
    "test_as_shipped.py",
    "test_exactness.py",
    "test_devices.py",
    "test_front_faults.py",
    "test_front.py",
    "test_image_requests.py",
    "test_compiled_step.py",
    "test_commands.py",
    "test_split_step.py",
    "test_lora.py",
    "test_esft_serving.py",
    "test_processes.py",
    "test_merging.py",
    "test_engine.py",
    "test_esft_results.py",
    "test_agent.py",
    "test_launch.py",
    "test_forward.py",
    "test_split.py",
    "test_lora_server.py",
    "test_kernels.py",
    "test_expert_tensors.py",
)
FURTHER_NOTEBOOKS = (
    "2_vision.ipynb",
    "3_thousand_adapters.ipynb",
    "4_functions.ipynb",
    "5_agents.ipynb",
)
# Files that share what one worker makes once: a server of the shipped model, an engine, torch.
TOGETHER = (
    (
        "tests/model/models/",
        "tests/model/finetune/test_peft_export.py",
        "tests/model/test_quantize.py",
        "tests/model/nn/test_rope.py",
        "tests/model/nn/test_vision.py",
        "tests/unit/vision/",
        "tests/unit/adapters/test_combine.py",
        "tests/unit/test_config.py",
        "tests/kernels/npu_backend/",
        "tests/system/bench/test_kernels.py",
        "tests/system/serving/test_brought_adapters.py",
        "tests/system/serving/test_families.py",
        "tests/system/serving/test_esft_with_images.py",
        "tests/system/serving/test_image_families.py",
        "tests/system/serving/test_image_requests.py",
        "tests/system/serving/engine/test_feature_pairs.py",
    ),
    ("tests/system/docs/test_commands.py", "tests/system/clients/"),
    (
        "tests/system/serving/http/",
        "tests/system/serving/engine/test_engine_answers.py",
        "tests/system/serving/engine/test_async_engine.py",
        "tests/system/serving/test_speculation.py",
    ),
)
# Tiers whose parametrised tests have a long tail: sizes, seeds, schedules of one promise.
SAMPLED = ("tests/kernels/", "tests/model/")
# Cases that differ in one of these are promises of their own: each reason to refuse is one.
KINDS = ("implementation", "op", "name", "model_type", "kind", "schema", "why", "reason", "message")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the long tail, and begin with the longest files."""
    seen: set[tuple] = set()
    for item in items:
        if item.path.name in FURTHER_NOTEBOOKS or _is_further_case(item, seen):
            item.add_marker("long")
    if os.environ.get("FAST_COMPILE"):
        _draw_less(items)
        # test_as_shipped.py has them
        items[:] = [item for item in items if item.get_closest_marker("as_shipped") is None]
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))


@pytest.fixture(autouse=True)
def _kept_logging() -> Iterator[None]:
    with kept_logging():
        yield


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave what was imported and collected out of each later collection of garbage."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker how tests are dealt out: pytest-xdist does not."""
    node.workerinput["dist"] = node.config.getvalue("dist")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Deal out files, and those of TOGETHER to one worker."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return next((group[0] for group in TOGETHER if file.startswith(group)), file)

        def _reschedule(self, node: Any) -> None:
            """Give a worker its next file when it has one left: it may wait behind a long one."""
            if self._pending_of(self.assigned_work[node]) < 2:
                super()._reschedule(node)

    return Scheduling(config, log)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> LateFile | None:
    """Let a worker collect a file when it runs it."""
    return late_file(module_path, parent)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run the tests of a file that is collected late."""
    if not isinstance(item, LateFile):
        return None
    item.run_tests(nextitem)
    return True


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the tests of compilers where none is asked for: to list them lays out programs."""
    others = config.option.markexpr.startswith("not (gpu or multigpu or aot")
    return True if others and collection_path == ROOT / "tests/kernels/aot" else None


def _draw_less(items: list[pytest.Item]) -> None:
    """Let hypothesis draw a third of the examples: `make test` draws the same ones in each run."""
    for item in items:
        test = getattr(getattr(item, "obj", None), "__func__", getattr(item, "obj", None))
        drawn = getattr(test, "_hypothesis_internal_use_settings", None)
        if drawn is not None and not getattr(test, "draws_less", False):
            from hypothesis import settings

            fewer = settings(drawn, max_examples=max(10, drawn.max_examples // 3))
            test._hypothesis_internal_use_settings, test.draws_less = fewer, True


def _is_further_case(item: pytest.Item, seen: set[tuple]) -> bool:
    """Return whether a case of the same test, of the same kind, comes before this one.

    Of a contract that several model families keep, some promises are of the code that they
    share: one family's tests stand for them.
    """
    place = item.path.relative_to(ROOT).as_posix()
    if isinstance(item, LateFile) or not place.startswith(SAMPLED):
        return False
    of_each = getattr(item.cls, "of_each_family", None)
    if of_each is not None and not item.cls.stands_for_others and item.originalname not in of_each:
        return True
    params = getattr(getattr(item, "callspec", None), "params", {})
    # The reference is what the others are compared with; its own test is that against float64.
    if params.get("implementation") == "reference" and "float64" not in item.name:
        return True
    kinds = tuple(repr(params[kind]) for kind in KINDS if kind in params)
    key = (place, item.nodeid.partition("[")[0], kinds)
    further = key in seen
    seen.add(key)
    return further


def pytest_configure(config: pytest.Config) -> None:
    """Set what plugins and the compiler of tests need.

    A case's time is no promise, and machines are busy. `make test` draws the same cases in each
    run, `make test-all` draws others. Where tests read what the compiler dumps, let it compile:
    jax's key leaves dumping out. What tests start ends with this process.
    """
    if config.pluginmanager.hasplugin("hypothesispytest"):
        from hypothesis import HealthCheck, settings

        drawn = {"derandomize": True, "database": None} if os.environ.get("FAST_COMPILE") else {}
        slow = [HealthCheck.too_slow]
        settings.register_profile("suite", deadline=None, suppress_health_check=slow, **drawn)
        settings.load_profile("suite")
    left_behind.watch()
    if config.option.markexpr == "aot":
        jax.config.update("jax_enable_compilation_cache", False)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of files that others published; its README names their sources."""
    return ROOT / "tests" / "data"
