"""Write lessons, a guide and examples as notebooks: `python tools/notebooks.py build/notebooks`; needs jupytext.

The pages and scripts are the sources.  A notebook has their text and code in order; a lesson's output is left out,
because running the notebook makes it.
"""

import argparse
import re
from pathlib import Path

import jupytext

ROOT = Path(__file__).resolve().parent.parent
LESSONS = sorted((ROOT / "docs" / "lessons").glob("[01]*.md"))
GUIDES = [ROOT / "docs" / "notebook_two_gpus.md"]
EXAMPLES = [ROOT / "docs" / "examples" / name for name in ("image_classifier.py", "gpt.py", "tensor_parallel_gpt.py")]


def from_page(text: str):
    """A cell per python block; other blocks, such as commands, stay text."""
    return jupytext.reads(_without_other_blocks(text), "md")


def from_lesson(text: str, picture: str):
    """The same, without outputs; the lesson's picture is shown at the end."""
    text = re.sub(r"^```text\n.*?^```\n", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^!\[.*\]\(pictures/.*\)\n|^</?details>\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"<summary>(.*)</summary>", r"\1:", text)
    title, rest = _without_other_blocks(text).split("\n", 1)
    lesson, summary = rest.split("\n## What to remember\n")
    begin = f'```python\nfrom pathlib import Path\n\npicture = Path("{picture}")  # is drawn below\n```'
    end = "```python\nfrom IPython.display import Image\n\nImage(picture)\n```"
    return jupytext.reads("\n\n".join([title, begin, lesson, end, f"## What to remember\n{summary}"]), "md")


def _without_other_blocks(text: str) -> str:
    return re.sub(r"^```(?!python$)\w+\n(.*?)^```$", _indented, text, flags=re.MULTILINE | re.DOTALL)


def _indented(match: re.Match[str]) -> str:
    return re.sub(r"^", "    ", match[1].rstrip(), flags=re.MULTILINE)


def from_script(text: str):
    """Its docstring becomes text, and its last line a call on two CPU ranks."""
    _, docstring, code = text.split('"""', 2)
    code = re.sub(r'^if __name__ == "__main__":\n    main\(\)$', 'main(["--ranks", "2"])', code, flags=re.MULTILINE)
    code = code.replace("__doc__.splitlines()[0]", "None")
    notebook = jupytext.reads(code.lstrip(), "py:light")
    notebook.cells.insert(0, jupytext.reads(f"# {docstring}", "md").cells[0])
    return notebook


def write_all(folder: Path) -> list[Path]:
    """Write all notebooks; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    notebooks = {path.stem: from_lesson(path.read_text(), f"{path.stem}.png") for path in LESSONS}
    notebooks |= {path.stem: from_page(path.read_text()) for path in GUIDES}
    notebooks |= {path.stem: from_script(path.read_text()) for path in EXAMPLES}
    paths = []
    for stem, notebook in notebooks.items():
        notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
        paths.append(folder / f"{stem}.ipynb")
        jupytext.write(notebook, paths[-1])
    return paths


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    for written in write_all(parser.parse_args().folder):
        print(written)
