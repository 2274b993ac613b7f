"""Checks the built site: links and anchors lead somewhere, nothing is loaded from the network.

`python docs/site/check.py FOLDER` lists what is wrong and ends with status 1.
"""

import html.parser
import sys
from pathlib import Path
from urllib.parse import unquote, urlparse

LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src"}


class _Page(html.parser.HTMLParser):
    """Links, ids and loaded resources of one page."""

    def __init__(self, text: str):
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.ids |= {values[key] for key in ("id", "name") if values.get(key)}
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])
        if tag == "link" and values.get("rel") in ("stylesheet", "preconnect", "icon"):
            self.loaded.append(values.get("href") or "")
        if values.get(LOADED.get(tag, "")):
            self.loaded.append(values[LOADED[tag]])


def problems(site: Path) -> list[str]:
    """Return one line per broken link and per resource of another host."""
    pages = {path: _Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        name = path.relative_to(site)
        found += [f"{name} loads {url}" for url in page.loaded if urlparse(url).netloc]
        if name.name == "404.html":  # its links are absolute: it is served at any depth
            continue
        for link in page.links:
            url = urlparse(link)
            if url.scheme or url.netloc:
                continue
            target = (path.parent / unquote(url.path)).resolve() if url.path else path
            target = target / "index.html" if target.is_dir() else target
            anchor = unquote(url.fragment)
            known = not anchor or target not in pages or anchor in pages[target].ids
            if not target.exists() or not known:
                found.append(f"{name}: {link}")
    return found


if __name__ == "__main__":
    lines = problems(Path(sys.argv[1]).resolve())
    print("\n".join(lines) or "Every link leads somewhere.")
    sys.exit(bool(lines))
