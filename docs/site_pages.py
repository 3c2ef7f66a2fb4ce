"""What the site needs besides its own files: the benchmark results as pages, links that lead out of it as words, and
translated summaries of folded blocks."""

import re
import shutil
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.locale import init
from sphinx.transforms import SphinxTransform
from sphinx.util.i18n import docname_to_domain

HERE = Path(__file__).parent
CODE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(
    r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])+)\]\((?!https?:|#|mailto:)([^)\s#]+)(#[^)\s]*)?\)"
)


def copy_results(results: Path, target: Path) -> None:
    """The pages of each machine, with their pictures, and an index of them."""
    folders = sorted(path.parent for path in results.glob("*/README.md"))
    target.mkdir(parents=True)
    for folder in folders:
        shutil.copytree(
            folder,
            target / folder.name,
            ignore=shutil.ignore_patterns("*.json", "*.xml", "*.txt"),
        )
    lines = [
        "# Results",
        "",
        "Tables and pictures as the benchmarks wrote them, by machine.",
        "",
    ]
    pages = [
        f"{folder.name}/{page.stem}"
        for folder in folders
        for page in sorted(folder.glob("*.md"))
    ]
    (target / "index.md").write_text(
        "\n".join([*lines, "```{toctree}", *pages, "```", ""])
    )


def links_out_of_the_docs(app: Any, name: str, source: list[str]) -> None:
    """A link to a file of the repository that is no page becomes its text and path: the site has no other home."""
    folder = (HERE / name).parent

    def replaced(match: re.Match[str]) -> str:
        text, path = match[1], match[2]
        there = (folder / path).resolve()
        if there.suffix == ".md" and there.is_relative_to(HERE) and there.exists():
            return match[0]
        if there.is_relative_to(HERE) and there.is_file():
            return match[0]
        return (
            text
            if path.strip("./") in text
            else f"{text} (`{there.relative_to(HERE.parent)}`)"
        )

    pieces = CODE.split(source[0])  # blocks of code are every second one
    pieces[::2] = [LINK.sub(replaced, text) for text in pieces[::2]]
    source[0] = "".join(pieces)


class TranslatedSummaries(SphinxTransform):
    """Take the HTML of folded blocks from the catalogues: Sphinx writes it there, and would read it as Markdown."""

    default_priority = (
        19  # before Sphinx's own, which finds no message of the translated text
    )

    def apply(self, **_: Any) -> None:
        folders = [HERE / name for name in self.config.locale_dirs]
        domain = docname_to_domain(self.env.docname, self.config.gettext_compact)
        catalogue, is_there = init(folders, self.config.language, domain)
        for node in self.document.findall(nodes.raw) if is_there else ():
            text = catalogue.gettext(node.astext())
            node.replace_self(nodes.raw(text, text, **node.attributes))
