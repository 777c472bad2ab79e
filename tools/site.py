"""Build the documentation as a site that loads nothing from other hosts: `make site`.

    python -m tools.site              # into out/site/public
    python -m tools.site --publish    # and push it to the branch gh-pages of the remote origin

The pages are the Markdown files of the repository, which a code host shows as they are. They are copied into
one folder, notebooks as pages with their outputs, and their links follow them there. A link that leads to no
page fails the build. Zensical writes the site (docs/zensical.toml). Versions of Fovea lie beside each other:

    out/site/public/index.html      leads to the newest version
    out/site/public/versions.json   lists them, for the menu of every page
    out/site/public/0.1/            the site of one version
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from tools.notebooks import read, source

ROOT = Path(__file__).resolve().parent.parent
CONFIGURATION = ROOT / "docs" / "zensical.toml"
SINGLE = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security-policy.md",
    "benchmarks/LOG.md": "measured/log.md",
    "src/fovea/assets/fovea-tiny/README.md": "measured/fovea-tiny.md",
}
"""Pages outside of the folders below, and where the site has them."""
FOLDERS = {"docs": ".", "benchmarks/results": "measured", "examples/notebooks": "notebooks"}
"""Folders of pages, and where the site has them."""
OTHER_NAMES = {"README.md": "index.md", "docs": "index.md", "examples/notebooks": "notebooks/ask.md"}
"""Targets of links for which the site has another page."""
KINDS = (".md", ".png", ".svg", ".ipynb", ".css")
LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
CODE_IN_TABLE = re.compile(r"`[^`\n]*\\\|[^`\n]*`")
"""Code with a bar as code hosts want it in tables; here it would keep the backslash."""
FENCE = re.compile(r"^(```.*?^```)$", re.M | re.S)
FOREIGN = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*?(?:src|href)=[\"']?(?:https?:)?//[^\"' >]+")
BRANCH = "gh-pages"
REDIRECT = '<!doctype html><title>Fovea</title><meta http-equiv="refresh" content="0; url={0}/index.html">\n'


class SiteError(Exception):
    """The site cannot be built; the message names the page and its fault."""


def places(root: Path = ROOT) -> dict[str, str]:
    """Return where the site has each file, by its path in the repository."""
    found = dict(SINGLE)
    for folder, target in FOLDERS.items():
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in KINDS and ".ipynb_checkpoints" not in path.parts:
                name = PurePosixPath(target, path.relative_to(root / folder).as_posix())
                found[path.relative_to(root).as_posix()] = str(name).replace(".ipynb", ".md")
    return found


def moved(text: str, page: str, where: Mapping[str, str]) -> str:
    """Return the text of a page with links that lead to the same pages on the site.

    page: its path in the repository. where: what `places` returns. Raises SiteError for a link to a file
    that the site does not have.
    """

    def follow(match: re.Match[str]) -> str:
        target = os.path.normpath(PurePosixPath(page).parent / match[1])
        if (place := OTHER_NAMES.get(target) or where.get(target)) is None:
            raise SiteError(f"{page}: the link to {match[1]} leads to no page of the site")
        return os.path.relpath(place, PurePosixPath(where[page]).parent) + (match[2] or "")

    text = CODE_IN_TABLE.sub(lambda code: code[0].replace(r"\|", "|"), text)
    parts = FENCE.split(text)
    return "".join(part if part.startswith("```") else LINK.sub(follow, part) for part in parts)


def notebook_page(path: Path) -> tuple[str, dict[str, bytes]]:
    """Return a notebook as Markdown, and the pictures that it shows by their file names."""
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in read(path)["cells"]:
        if cell["cell_type"] == "markdown":
            parts.append(source(cell))
            continue
        parts.append(f"```python\n{source(cell)}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                name = f"{path.stem}-{len(pictures) + 1}.png"
                pictures[name] = base64.b64decode(data["image/png"])
                parts.append(f"![What the cell shows]({name})")
            else:
                text = "".join(output.get("text") or data["text/plain"])
                parts.append(f"```text\n{text.rstrip()}\n```")
    file = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    parts.append(f"This page is the notebook `{file}`.")
    return "\n\n".join(parts) + "\n", pictures


def stage(folder: Path, root: Path = ROOT) -> None:
    """Copy all pages and pictures into a folder, as the site has them."""
    where = places(root)
    shutil.rmtree(folder, ignore_errors=True)
    for name, place in where.items():
        file = folder / place
        file.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".ipynb"):
            text, pictures = notebook_page(root / name)
            for picture, content in pictures.items():
                (file.parent / picture).write_bytes(content)
            own = {f"{PurePosixPath(name).parent}/{picture}": f"notebooks/{picture}" for picture in pictures}
            file.write_text(moved(text, name, {**where, **own}), encoding="utf-8")
        elif name.endswith(".md"):
            file.write_text(moved((root / name).read_text(encoding="utf-8"), name, where), encoding="utf-8")
        else:
            shutil.copyfile(root / name, file)


def versions(public: Path) -> list[str]:
    """Return the versions in a folder of sites, the newest first."""
    names = [path.name for path in public.iterdir() if re.fullmatch(r"\d+(\.\d+)+", path.name)]
    return sorted(names, key=lambda name: [int(part) for part in name.split(".")], reverse=True)


def publish(built: Path, public: Path, version: str) -> None:
    """Move a built site to its version's folder, and list all versions that are there."""
    public.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(public / version, ignore_errors=True)
    built.rename(public / version)
    names = versions(public)
    listed = [{"version": name, "title": name, "aliases": []} for name in names]
    (public / "versions.json").write_text(json.dumps(listed, indent=1) + "\n")
    (public / "index.html").write_text(REDIRECT.format(names[0]))


def check(built: Path) -> None:
    """Raise SiteError if a page loads anything from another host."""
    for page in sorted(built.rglob("*.html")):
        if found := FOREIGN.search(page.read_text(encoding="utf-8")):
            raise SiteError(f"{page.name} loads from another host: {found[0]}")


def git(folder: Path, *arguments: str) -> str:
    """Run git in a folder and return what it prints. Raises SiteError with what it says if it fails."""
    done = subprocess.run(["git", *arguments], cwd=folder, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SiteError(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def fetch_published(public: Path, root: Path = ROOT) -> None:
    """Make `public` a work tree of what is published already; an empty one at first. Raises SiteError."""
    shutil.rmtree(public, ignore_errors=True)
    git(root, "worktree", "prune")
    if git(root, "ls-remote", "--heads", "origin", BRANCH):
        git(root, "fetch", "--depth", "1", "origin", BRANCH)
        git(root, "worktree", "add", "--detach", str(public), "FETCH_HEAD")
        return
    git(root, "worktree", "add", "--detach", str(public), "HEAD")
    git(public, "checkout", "--orphan", f"new-{BRANCH}")
    git(public, "rm", "-r", "--force", ".")


def push(public: Path, version: str) -> None:
    """Commit the sites of all versions and push them. Raises SiteError."""
    (public / ".nojekyll").touch()  # GitHub Pages would leave out files that begin with an underscore
    git(public, "add", "--all")
    name = ("-c", "user.name=make site", "-c", "user.email=site@localhost")
    git(public, *name, "commit", "--allow-empty", "--message", f"Publish the site of version {version}")
    git(public, "push", "origin", f"HEAD:refs/heads/{BRANCH}")


def build(folder: Path) -> Path:
    """Build the site of this version and return its folder. Raises SiteError."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    stage(folder / "pages")
    shutil.copy(CONFIGURATION, folder)
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    if subprocess.run(command, cwd=folder, check=False).returncode:
        raise SiteError("Zensical found the errors above")
    check(folder / "html")
    name = ".".join(version.split(".")[:2])
    publish(folder / "html", folder / "public", name)
    return folder / "public" / name


def main() -> int:
    """Build the site and print where it is. Returns the exit status."""
    parser = argparse.ArgumentParser(description="Build the documentation as a site.")
    parser.add_argument("--publish", action="store_true", help=f"push it to origin's branch {BRANCH}")
    arguments = parser.parse_args()
    folder = ROOT / "out" / "site"
    try:
        if arguments.publish:
            fetch_published(folder / "public")
        built = build(folder)
        if arguments.publish:
            push(folder / "public", built.name)
    except SiteError as error:
        print(f"site: {error}", file=sys.stderr)
        return 1
    print(f"{built}/index.html; with search: python -m http.server --directory {built.parent}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
