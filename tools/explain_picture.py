"""Writes `docs/pictures/explain.png`: the page of `mgpu_core.explain` in Chromium, in the middle of a scatter.

python tools/explain_picture.py            # needs playwright and a Chromium on the path
"""

import shutil
import tempfile
from pathlib import Path

import torch
from playwright.sync_api import sync_playwright

import mgpu_core

PICTURE = Path(__file__).parent.parent / "docs" / "pictures" / "explain.png"


def main() -> None:
    """Records three steps of the drop-in on four CPU ranks, and takes a screenshot of the last one's scatter."""
    torch.set_num_threads(1)  # four ranks at once would wait for each other's threads
    net = torch.nn.Sequential(torch.nn.Linear(784, 400), torch.nn.ReLU(), torch.nn.Linear(400, 10))
    model = mgpu_core.DataParallel(net, ["cpu"] * 4)
    with mgpu_core.explain(skip=2, steps=1) as trace:
        for _ in range(3):
            loss = torch.nn.functional.cross_entropy(model(torch.randn(62, 784)), torch.randint(0, 10, (62,)))
            loss.backward()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        trace.save_html(Path(folder) / "page.html")
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1000, "height": 1030}, color_scheme="light")
        page.goto((Path(folder) / "page.html").as_uri())
        page.evaluate("go(0, 0.5)")
        page.screenshot(path=PICTURE, clip={"x": 0, "y": 0, "width": 1000, "height": 1020})
        browser.close()


if __name__ == "__main__":
    main()
