"""The README is short and complete, links lead to existing targets, and pages list existing modules and extras."""

from __future__ import annotations

import json
import re
from pathlib import Path

from protonet.commands.options import ServeOptions
from tests.docs.blocks import NAMES, ROOT, read_extras

README = (ROOT / "README.md").read_text(encoding="utf-8")
#: Maximal lines of the README, and maximal words of a page.
MAX_LINES, MAX_WORDS = 170, 1800


def headings(path: Path) -> set[str]:
    """Return the anchors of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= MAX_LINES


def list_modules() -> list[str]:
    """Return the modules and packages directly in protonet, packages with a slash."""
    entries = [
        path for path in (ROOT / "protonet").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    ]
    names = [path.name + "/" * path.is_dir() for path in entries]
    return sorted(name for name in names if not name.startswith("__"))


def test_every_module_is_in_the_table_of_the_architecture() -> None:
    for module in list_modules():
        assert f"| `{module}` |" in (ROOT / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8"), (
            module
        )


def test_the_tree_of_the_readme_has_every_package_and_no_module_that_is_gone() -> None:
    tree = re.search(r"```\nprotonet/\n(.*?)^solution/", README, re.DOTALL | re.MULTILINE)
    assert tree is not None
    listed = [name for line in tree[1].splitlines() for name in re.findall(r"[\w/.]+(?= )", line[:27])]
    assert len(listed) == len(set(listed))
    assert set(listed) <= set(list_modules())
    assert {name for name in list_modules() if name.endswith("/")} <= set(listed)


def test_no_page_is_long() -> None:
    for name in [name for name in NAMES if name.startswith("docs/")]:
        assert len((ROOT / name).read_text(encoding="utf-8").split()) <= MAX_WORDS, name


def test_links_lead_somewhere() -> None:
    for name in NAMES:
        page = ROOT / name
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            if re.match(r"[a-z]+:", link):
                continue
            place, _, anchor = link.partition("#")
            target = (page.parent / place).resolve() if place else page
            assert target.exists(), f"{name}: {link}"
            if anchor:
                assert anchor in headings(target), f"{name}: {link}"


def test_every_extra_is_in_the_table_of_installs() -> None:
    for extra in read_extras():
        assert f"| `{extra}` |" in (ROOT / "docs" / "start" / "install.md").read_text(encoding="utf-8"), extra


def test_the_dockerfile_holds_what_it_names() -> None:
    """A lint for machines without a builder: the files, the extras and the port exist, and root serves nothing."""
    text = re.sub(r"\\\n\s*", " ", (ROOT / "Dockerfile").read_text(encoding="utf-8"))
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    values = {name: [value for other, value in lines if other == name] for name, _ in lines}
    assert set(values) <= {*["FROM", "WORKDIR", "COPY", "RUN", "USER", "ENV", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT"]}
    assert lines[0][0] == "FROM"
    assert re.fullmatch(r"python:3\.\d+-slim", values["FROM"][0])
    copied = [name for value in values["COPY"] for name in value.split()[:-1]]
    assert all((ROOT / name).exists() for name in copied)
    assert {name for name in ("constraints.txt",) if name in values["RUN"][0]} <= set(copied)
    extras = re.findall(r"\.\[([\w,]+)\]", values["RUN"][0])
    assert extras
    assert set(",".join(extras).split(",")) <= set(read_extras())
    (user,) = values["USER"]
    assert f"--uid {user} " in values["RUN"][0]
    assert int(user) > 0
    assert json.loads(values["ENTRYPOINT"][0])[:2] == ["protonet", "serve"]
    (port,) = values["EXPOSE"]
    assert f":{port}/healthz" in values["HEALTHCHECK"][0]
    assert ServeOptions.port == int(port)
