"""The tree stays a house: a test file per module, short files, imports that point down."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes.server_process import ROOT

# Nothing to run in them: names of types, and a dataclass that every model test fills.
WITHOUT_TEST = {
    "src/lora_jax/typing.py",
    "src/lora_jax/adapters/added_tokens.py",
    "src/lora_jax/batch.py",
    "serving/engine/loop/loop_parts.py",
    "serving/steps/operands.py",
}
# Tests of what only shows when the rooms work together.
WITHOUT_MODULE = {
    "test_array_checks.py",  # of the checks that tests run under
    "test_as_shipped.py",  # of the compiler
    "test_eager.py",  # of the operations of tests outside jit
    "test_left_behind.py",  # of the processes that tests start
    "test_layout.py",
    "placement/test_algorithm_1.py",  # an oracle
    "test_requirements.py",
    "clients/test_golden_text.py",
    "clients/test_lm_eval_client.py",
    "clients/test_openai_client.py",
    "clients/test_other_clients.py",
    "clients/test_vllm_rs_client.py",
    "serving/lora_server/test_exactness.py",
    "serving/lora_server/test_processes.py",
    "serving/http/test_bad_input.py",
    "serving/test_brought_adapters.py",
    "serving/test_composition_serving.py",
    "serving/test_esft_serving.py",
    "serving/test_esft_with_images.py",
    "serving/test_merged_serving.py",
    "serving/test_speculation.py",
    "serving/test_schema_corpus.py",
    "serving/test_structured_outputs.py",
    "serving/test_families.py",
    "serving/test_int8_adapters.py",
    "serving/test_quantised_base.py",
    "serving/test_image_families.py",
    "serving/test_image_requests.py",
    "serving/test_tiny_vl.py",
    "serving/http/test_end_to_end.py",
    "serving/http/test_fair_shares.py",
    "serving/http/test_security.py",
}
# A concern of a module whose own test file would be long.
PARTS = {
    "adapters/test_registry_eviction.py",
    "adapters/test_registry_room.py",
    "memory/test_host_sharing.py",
    "memory/test_weight_tensor_walks.py",
    "ops/test_grouped_matmul_pallas_gpu_tiles.py",
    "serving/adapters/test_rollouts_file.py",
    "serving/cluster/test_front_faults.py",
    "serving/cluster/test_proxy_faults.py",
    "serving/cluster/test_world_launch.py",  # of NVSHMEM
    "serving/engine/loop/test_loop_turns.py",
    "serving/engine/test_closed_engine.py",  # in whose process it was
    "serving/engine/test_engine_adapters.py",
    "serving/engine/test_engine_answers.py",
    "serving/engine/test_feature_pairs.py",  # of all features of an engine
    "serving/functions/test_function_process_programs.py",
    "serving/loading/test_adapter_loader_failures.py",
    "serving/scheduling/test_scheduler_adapters.py",
    "serving/scheduling/test_scheduler_tenants.py",
    "serving/scheduling/test_scheduler_walks.py",
    "serving/test_launch_flags.py",
    "serving/test_launch_roles.py",
    "test_config_quantization.py",
}
LONGEST_FILE = 400


def modules() -> list[Path]:
    """Every module of the product, relative to the root."""
    files = [*ROOT.glob("src/lora_jax/**/*.py"), *ROOT.glob("serving/**/*.py")]
    return [f.relative_to(ROOT) for f in files if f.name != "__init__.py"]


OF_OTHERS = ("bench/", "docs/", "faults/", "fuzz/", "cuda_backend/", "npu_backend/", "aot/")
TIERS = ("unit", "model", "kernels", "system", "hardware")


def home_of_test(module: Path) -> Path:
    """Return the test of a module in its tier: the mirror of its place.

    A private part is tested with its package.

    The implementations of an op share the op's test; one may have its own besides.
    """
    parts = module.parts[2:] if module.parts[0] == "src" else module.parts
    if parts[-1].startswith("_"):
        return Path(*parts[:-2], f"test_{parts[-2]}.py")
    if parts[0] == "ops" and len(parts) == 3 and parts[1] != "cpu":
        return Path("ops", f"test_{parts[1]}.py")
    return Path(*parts[:-1], f"test_{parts[-1]}")


def files_of_tests() -> set[Path]:
    """Every test file, relative to its tier."""
    tiers = [ROOT / "tests" / tier for tier in TIERS]
    return {file.relative_to(tier) for tier in tiers for file in tier.glob("**/test_*.py")}


def test_every_module_has_its_test_file():
    there = files_of_tests()
    missing = [
        f"{module} wants {home_of_test(module)}"
        for module in modules()
        if str(module) not in WITHOUT_TEST and home_of_test(module) not in there
    ]
    assert not missing, "\n".join(missing)


def test_every_test_file_has_its_module():
    homes = {str(home_of_test(module)) for module in modules()} | WITHOUT_MODULE | PARTS
    ops = (ROOT / "src/lora_jax/ops").glob("*/*.py")
    homes |= {f"ops/test_{path.parent.name}_{path.stem}.py" for path in ops}
    strays = {str(file) for file in files_of_tests()} - homes
    strays = {file for file in strays if not file.startswith(OF_OTHERS)}
    assert not strays, "\n".join(sorted(strays))


def test_files_are_short():
    long = [
        f"{module}: {lines} lines"
        for module in modules()
        if (lines := len((ROOT / module).read_text().splitlines())) > LONGEST_FILE
    ]
    assert not long, "\n".join(long)


def test_imports_point_down():
    linter = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([linter], cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:]


LINK = re.compile(r"\]\(([^)\s]+)\)|<img [^>]*src=\"([^\"]+)\"")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def pages() -> list[Path]:
    """Every page of the repository, and the notebooks; not what tools have written beside them."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md", "*.ipynb"]
    done = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:  # an archive without its history
        return [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "bench").glob("*.md")]
    return [ROOT / name for name in done.stdout.splitlines() if (ROOT / name).exists()]


def text_of(page: Path) -> str:
    if page.suffix == ".md":
        return page.read_text()
    cells = json.loads(page.read_text())["cells"]
    return "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")


def anchors(page: Path) -> set[str]:
    """What a page's headings are called in links, as GitHub has it."""
    heads = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_links_of_pages_lead_somewhere():
    lost = []
    for page in pages():
        for found in LINK.findall(FENCE.sub("", text_of(page))):
            link = found[0] or found[1]
            if re.match(r"[a-z]+:", link):
                continue
            name, _, anchor = link.partition("#")
            target = page.parent / name if name else page
            known = not anchor or target.suffix != ".md" or anchor in anchors(target)
            if not target.exists() or not known:
                lost.append(f"{page.relative_to(ROOT)}: {link}")
    assert not lost, "\n".join(lost)


FILE = re.compile(r"`([\w./-]+/[\w.-]+|[\w-]+\.(?:py|cuh|cu|cc|h|md|json|ipynb))`")
ELSEWHERE = {
    "config.json",
    "adapter_config.json",
    "expert_cfg.json",
    "task_head.json",
    "DIR/X",
}  # the user's
ELSEWHERE |= {"dist/sbom.json"}  # written by a command


def test_files_that_pages_name_are_there():
    """By a path's end, its suffix left out or not.

    A CHANGELOG may name what was there once, and the assets say from where others' files come.
    """
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a checkout")
    there = {f"/{name}" for name in listed.stdout.splitlines()}
    there |= {f"/{parent}" for name in listed.stdout.splitlines() for parent in Path(name).parents}
    ends = {end[i:] for end in there for i, c in enumerate(end) if c == "/"}
    ends |= {end.removesuffix(".py") for end in ends}
    named = {
        (page.name, path)
        for page in pages()
        if page.name != "CHANGELOG.md" and page.relative_to(ROOT).parts[0] != "assets"
        for path in FILE.findall(text_of(page))
        if path not in ELSEWHERE and not path.startswith("/")
    }
    lost = sorted(f"{page}: {path}" for page, path in named if f"/{path.rstrip('/')}" not in ends)
    assert named
    assert not lost, "\n".join(lost)


def folders_of_map() -> list[str]:
    """The first column of the table of folders in ARCHITECTURE.md."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    return re.findall(r"^\| `([\w./]+)/` \|", text, re.MULTILINE)


def test_the_map_names_each_folder_once():
    """Folders of code at any depth, others at the top; an op's folder is one of `ops/`."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a checkout")
    files = [Path(name) for name in listed.stdout.splitlines()]
    rooms = {file.parent for file in files if file.suffix == ".py"}
    rooms = {room for room in rooms if room.parts[:1] in (("src",), ("serving",))}
    ops = Path("src/lora_jax/ops")
    rooms = {r for r in rooms if r.parent != ops or r.name == "cpu"}
    tops = {Path(file.parts[0]) for file in files if len(file.parts) > 1} - {Path("src")}
    assert sorted(folders_of_map()) == sorted(map(str, rooms | tops))
