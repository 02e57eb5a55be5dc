"""Every example in README.md and docs/ runs: page by page, in order, each page in a process of its own."""

import doctest
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGES = {str(page.relative_to(ROOT)): page for page in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")))}
RUN = {"python", "pycon"}
# What a page may hold without it being run. Any other word after a fence is a mistake, or an example missed.
SHOWN = {"console", "bash", "text", "toml", "ini"}
_FENCE = re.compile(r"(?m)^ *(?:`{3,}|~{3,})(.*)$")
_BLOCK = re.compile(rf"(?m)^```(?:{'|'.join(RUN)})\n(?P<source>(?:.*\n)*?)^```$")


def blocks(text: str) -> list[tuple[int, str]]:
    """Return the examples of a page, each with the number of lines before it."""
    return [(text.count("\n", 0, m.start("source")), m["source"]) for m in _BLOCK.finditer(text)]


@pytest.mark.parametrize("name", PAGES)
def test_no_example_is_missed(name: str) -> None:
    text = PAGES[name].read_text()
    opened = [word.strip() for word in _FENCE.findall(text)[::2]]
    assert [word for word in opened if word not in RUN | SHOWN and not word.startswith("{")] == []
    assert len(blocks(text)) == sum(word in RUN for word in opened)


@pytest.mark.parametrize("name", [name for name, page in PAGES.items() if blocks(page.read_text())])
def test_examples_run(name: str) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "GMM_REGISTRY_BACKEND"}
    child = subprocess.run(
        [sys.executable, __file__, name], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert child.returncode == 0, child.stdout + child.stderr


def test_every_public_name_is_in_the_api_page() -> None:
    import gmm_registry
    from gmm_registry import layers, testing

    page = PAGES["docs/api.md"].read_text()
    documented = set(re.findall(r"(?m)^\.\. (?:auto\w+|py:data):: (\S+)", page))
    modules = (gmm_registry, layers, testing)
    public = {f"{module.__name__}.{name}" for module in modules for name in module.__all__}
    assert public <= documented


def _run(name: str) -> bool:
    """Run a page's examples in one namespace; say whether every output was as printed."""
    import gmm_registry  # noqa: F401  # what torch's import warns of is no fault of a page

    warnings.simplefilter("error")
    namespace: dict[str, Any] = {"__name__": name}
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for line, source in blocks(PAGES[name].read_text()):
        if source.startswith(">>>"):
            test = doctest.DocTestParser().get_doctest(source, {}, name, name, line)
            test.globs = namespace
            runner.run(test, clear_globs=False)
        else:
            # With the page's own line numbers, so that a traceback points into the page.
            exec(compile("\n" * line + source, PAGES[name], "exec"), namespace)
    return not runner.failures


if __name__ == "__main__":
    sys.exit(not _run(sys.argv[1]))
