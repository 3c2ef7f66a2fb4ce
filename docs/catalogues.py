"""List the messages of translated pages that are stale: missing, fuzzy, obsolete, or with other code or links.

After `sphinx-build -b gettext docs build/gettext`, which writes the messages of all pages, `python docs/catalogues.py
build/gettext` compares the catalogues in `docs/locales` with them; its status is 1 where one is stale.
"""

import re
import sys
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

from babel.messages.catalog import Catalog
from babel.messages.pofile import read_po

LOCALES = Path(__file__).parent / "locales"
CODE_OR_LINK = re.compile(r"`[^`]+`|\]\([^)]+\)|<[^>]+>")


def read_catalog(path: Path) -> Catalog:
    with path.open("rb") as file:
        return read_po(file)


def stale(catalogue: Path, template: Path) -> Iterator[str]:
    """Yield a line for each message of the page, or of its catalogue, that needs a translator."""
    translated, page = read_catalog(catalogue), read_catalog(template)
    for message in filter(attrgetter("id"), page):  # not the header
        translation = translated.get(message.id)
        if translation is None or not translation.string:
            yield f"missing: {message.id}"
        elif translation.fuzzy:
            yield f"fuzzy: {message.id}"
        elif code_of(message.id) != code_of(str(translation.string)):
            yield f"other code or links: {message.id}"
    kept = [
        message.id for message in translated if message.id and message.id not in page
    ]
    yield from (f"obsolete: {text}" for text in [*kept, *translated.obsolete])


def code_of(text: str) -> list[str]:
    """Return the code, links and tags of a message, in whatever order a language puts them."""
    return sorted(CODE_OR_LINK.findall(text))


def main(templates: Path) -> int:
    lines = [
        f"{catalogue.relative_to(LOCALES.parent)}: {line.strip()}"
        for catalogue in sorted(LOCALES.glob("*/LC_MESSAGES/**/*.po"))
        for line in stale(catalogue, templates / f"{catalogue.stem}.pot")
    ]
    print(*lines, sep="\n", end="\n" if lines else "")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
