"""Hooks of mkdocs: pages that are outside of docs/, links to them, and formulas as MathML, which needs no script."""

from __future__ import annotations

import html
import posixpath
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": "quickstart.md"} | {name: name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
SHIM = "https://unpkg.com/iframe-worker/shim"  # what mkdocs-material's search needs when pages are opened as files
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_files(files: Any, config: Any) -> Any:
    """Add the README, the other pages of the root, and the measured results."""
    for page in (*map(Path, PAGES), *_results()):
        place = site_place(page)
        if page.suffix == ".md":
            text = with_site_links((ROOT / page).read_text(), page)
            files.append(File.generated(config, place, content=text))
        else:
            files.append(File.generated(config, place, abs_src_path=str(ROOT / page)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links of pages in docs/ lead to where the site has their targets."""
    source = Path("docs", page.file.src_uri)
    return with_site_links(markdown, source) if (ROOT / source).is_file() else markdown


def on_page_content(content: str, **_: Any) -> str:
    """Draw formulas."""

    def as_mathml(match: re.Match[str]) -> str:
        if match[1] == "span":
            return convert(html.unescape(match[2]), display="inline")
        # A long formula scrolls on a phone; otherwise it would widen the whole page.
        return f'<div style="overflow-x: auto">{convert(html.unescape(match[2]), display="block")}</div>'

    return FORMULA.sub(as_mathml, content)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Take the script for searching from the site itself."""
    return output.replace(SHIM, posixpath.relpath("assets/iframe-worker.js", posixpath.dirname(page.url) or "."))


def on_post_template(output_content: str, **_: Any) -> str:
    """Do the same for the page of missing addresses, which a server shows at any address."""
    return output_content.replace(SHIM, "/assets/iframe-worker.js")


def _results() -> list[Path]:
    found = sorted((ROOT / "benchmarks" / "results").iterdir())
    return [path.relative_to(ROOT) for path in found if path.suffix in (".md", ".png")]


def site_place(path: Path) -> str | None:
    """Return where the site has a file of the repository; None if it has not."""
    if path.parts[0] == "docs":
        return path.relative_to("docs").as_posix()
    if path.parts[:2] == ("benchmarks", "results") and path.suffix in (".md", ".png"):
        return posixpath.join("results", path.name)
    return PAGES.get(path.as_posix())


def with_site_links(text: str, source: Path) -> str:
    """Return Markdown of a file of the repository with links for the site; a link to source code becomes plain text."""
    here = posixpath.dirname(site_place(source) or "")

    def rewritten(match: re.Match[str]) -> str:
        mark, label, target, anchor = match[1], match[2], match[3], match[4] or ""
        path = ROOT / source.parent / target
        if "://" in target or not path.exists():
            return match[0]
        place = site_place(path.resolve().relative_to(ROOT))
        return label if place is None else f"{mark}[{label}]({posixpath.relpath(place, here or '.')}{anchor})"

    return LINK.sub(rewritten, text)
