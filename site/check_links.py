"""Checks the links and anchors within a built site: python site/check_links.py build/site/html

Prints each one that leads nowhere, and returns 1 if there is one. Links to other hosts are not followed.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The anchors and links of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors = {"", "__top"}
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.anchors.add(value)
            elif name in ("href", "src") and value:
                self.links.append(value)


def dead_links(site: Path) -> list[str]:
    """Returns "page: link" for each link of a page that leads to no file, or to no anchor of one."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    dead = []
    for path, page in pages.items():
        if path.name == "404.html":  # its links are those of the place where it is put
            continue
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            to = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            found = pages[to].anchors if to in pages else {"", *([parts.fragment] if to.suffix != ".html" else [])}
            if not to.exists() or unquote(parts.fragment) not in found:
                dead.append(f"{path.relative_to(site)}: {link}")
    return dead


def main() -> int:
    site = Path(sys.argv[1]).resolve()
    dead = dead_links(site)
    for each in dead:
        print(each, file=sys.stderr)
    print(f"{site}: {len(dead)} links lead nowhere")
    return 1 if dead else 0


if __name__ == "__main__":
    sys.exit(main())
