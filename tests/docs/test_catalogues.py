"""The list of stale messages of translated pages, and the code and links of all translations that there are."""

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("babel", reason="translations are checked with the extra docs")
DOCS = Path(__file__).parents[2] / "docs"
spec = importlib.util.spec_from_file_location("catalogues", DOCS / "catalogues.py")
catalogues = importlib.util.module_from_spec(spec)
spec.loader.exec_module(catalogues)

HEAD = 'msgid ""\nmsgstr "Content-Type: text/plain; charset=utf-8\\n"\n\n'
PAGE = ["Kept", "Changed", "New", "With `code` and [a link](run.md)"]
RIGHT = 'msgid "Kept"\nmsgstr "保留"\n\n'


def stale(folder, catalogue):
    (folder / "page.pot").write_text(HEAD + "".join(f'msgid "{text}"\nmsgstr ""\n\n' for text in PAGE))
    (folder / "page.po").write_text(HEAD + catalogue)
    return list(catalogues.stale(folder / "page.po", folder / "page.pot"))


def test_a_whole_catalogue_is_not_stale(tmp_path):
    others = 'msgid "Changed"\nmsgstr "改过"\n\nmsgid "New"\nmsgstr "新"\n\n'
    swapped = f'msgid "{PAGE[-1]}"\nmsgstr "[链接](run.md)和 `code`"\n'
    assert stale(tmp_path, RIGHT + others + swapped) == []


def test_stale_messages_are_listed(tmp_path):
    fuzzy = '#, fuzzy\nmsgid "Changed"\nmsgstr "以前"\n\nmsgid "New"\nmsgstr ""\n\n'
    other = f'msgid "{PAGE[-1]}"\nmsgstr "[链接](walk.md)和 `code`"\n\n'
    gone = 'msgid "Gone"\nmsgstr "没了"\n\n#~ msgid "Long gone"\n#~ msgstr "早没了"\n'
    assert stale(tmp_path, RIGHT + fuzzy + other + gone) == [
        "fuzzy: Changed",
        "missing: New",
        f"other code or links: {PAGE[-1]}",
        "obsolete: Gone",
        "obsolete: Long gone",
    ]


@pytest.mark.parametrize("name", ["run", "train_step", "fine_tuning", "device_map"])
def test_the_guides_are_translated_whole(name):
    """What a page says today is compared by ci/docs."""
    catalogue = catalogues.read_catalog(catalogues.LOCALES / "zh_CN" / "LC_MESSAGES" / f"{name}.po")
    messages = [message for message in catalogue if message.id]
    assert [message.id for message in messages if not message.string or message.fuzzy] == []
    title = (DOCS / f"{name}.md").read_text().splitlines()[0].removeprefix("# ")
    assert messages[0].id == title
