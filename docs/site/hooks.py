"""mkdocs hooks: generated tables, pages that lie outside `docs/`, and links to source files.

Pages are written for the repository. On the site a link to a file that is no page becomes its name.
"""

import importlib.util
import posixpath
import re
from pathlib import Path
from types import ModuleType

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
PLOTS = "bench/results"
KERNELS = max((ROOT / PLOTS).glob("kernels_*.md"), key=lambda path: path.stem[-10:])  # by date
# Pages and plots outside of docs/, and where they are on the site.
OUTSIDE = {
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "bench/README.md": "benchmarks.md",
    f"{PLOTS}/{KERNELS.name}": "benchmarks-kernels.md",
}
GENERATED = re.compile(r"<!-- generated: (\w+) -->")
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)


def _reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "reference", Path(__file__).parent / "reference.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def on_files(files, config):
    """Add the pages and plots that lie outside of docs/."""
    for source, uri in OUTSIDE.items():
        files.append(File.generated(config, uri, content=(ROOT / source).read_text()))
    for plot in sorted((ROOT / PLOTS).glob("*.png")):
        uri = f"{PLOTS}/{plot.name}"
        files.append(File.generated(config, uri, abs_src_path=str(plot)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Fill in generated tables and lead links to where their targets are on the site."""
    markdown = GENERATED.sub(lambda m: _reference().PAGES[m[1]](), markdown)
    here = page.file.src_uri
    source = next((s for s, uri in OUTSIDE.items() if uri == here), f"docs/{here}")
    parts = FENCE.split(markdown)
    parts[::2] = [LINK.sub(lambda m: _link(m, source, here), text) for text in parts[::2]]
    return "".join(parts)


def _link(match: re.Match, source: str, here: str) -> str:
    image, text, link = match.groups()
    if re.match(r"[a-z]+:|#", link):
        return match[0]
    name, _, anchor = link.partition("#")
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), name))
    uri = _on_site(target)
    if uri is None:
        return text if text.strip("`") == target else f"{text} (`{target}`)"
    relative = posixpath.relpath(uri, posixpath.dirname(here) or ".")
    return f"{image}[{text}]({relative}{'#' + anchor if anchor else ''})"


def _on_site(target: str) -> str | None:
    """Return the site's path of a file of the repository, or None if it is not on the site."""
    if target in OUTSIDE:
        return OUTSIDE[target]
    if target == "README.md":
        return "index.md"
    if target.startswith("docs/") and target.endswith(".md"):
        return target.removeprefix("docs/")
    return target if target.startswith(f"{PLOTS}/") and target.endswith(".png") else None
