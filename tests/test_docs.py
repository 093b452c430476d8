"""The documentation builds without a broken link, and its pages fetch nothing from another server."""

from __future__ import annotations

import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
OUTSIDE = [*ROOT.glob("*.md"), ROOT / "benchmarks" / "README.md", *ROOT.glob("examples/*/README.md")]


def test_the_site_builds_strictly_and_fetches_nothing_from_elsewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = [*tmp_path.rglob("*.html")]
    assert len(pages) > 50
    for page in pages:
        if moved := re.search(r'http-equiv="refresh" content="0; url=([^"#]+)#?([^"]*)"', page.read_text()):
            target = (page.parent / moved[1] / "index.html").read_text()
            assert not moved[2] or re.search(rf'id="?{moved[2]}\b', target), f"{page.parent.name} moved to {moved[0]}"
        fetched = re.findall(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"?(?:https?:)?//[^>]*", page.read_text())
        fetched += re.findall(r"<link\b[^>]*rel=\"?(?:stylesheet|preconnect|icon)[^>]*https?://[^>]*", page.read_text())
        assert not fetched, f"{page.name} fetches {fetched}"
    for sheet in tmp_path.rglob("*.css"):
        assert not re.search(r"url\([\"']?(?:https?:)?//", sheet.read_text()), sheet.name


TOPS = ("vitrine", "serve_app", "deployments", "evals", "benchmarks")
CODE = [path for top in TOPS for path in (ROOT / top).rglob("*.py")]


def test_every_file_and_object_that_a_page_names_is_there() -> None:
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        if page.name == "CHANGELOG.md":
            continue  # history
        for name in re.findall(
            r"`((?:vitrine|serve_app|deployments|evals|benchmarks|tests|examples|docs)/[\w./]*)`", page.read_text()
        ):
            assert (ROOT / name).exists(), f"{page.name} names {name}"
        for name in re.findall(
            r"`(?:python -m )?((?:vitrine|deployments|evals|benchmarks)(?:\.\w+)+)", page.read_text()
        ):
            assert pkgutil.resolve_name(name.removesuffix(".NAME")), f"{page.name} names {name}"


def test_every_name_that_contributing_gives_is_in_its_file() -> None:
    named = re.findall(r"`([\w.]+)` in `([\w/]+\.py)`", (ROOT / "CONTRIBUTING.md").read_text())
    assert len(named) > 10
    for name, file in named:
        for part in name.split("."):
            assert re.search(rf"(?:def|class) {part}\b", (ROOT / file).read_text()), f"{file} has no {name}"


def test_every_page_that_the_code_names_is_there() -> None:
    for path in [*CODE, ROOT / "cluster.yaml", ROOT / "serve_config.yaml"]:
        for name in re.findall(r"docs/[\w-]+\.md", path.read_text()):
            assert (ROOT / name).exists(), f"{path.relative_to(ROOT)} names {name}"


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", OUTSIDE, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_outside_docs_has_no_broken_link(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        if "://" in target:
            continue
        name, _, anchor = unquote(target).partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(file), f"{page.name} links to {target}: no such heading"
