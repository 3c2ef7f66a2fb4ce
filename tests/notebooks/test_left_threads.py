"""A cell that is run twice, and one that is interrupted, leave no thread of ours once their objects are gone."""

import pytest

pytestmark = pytest.mark.slow

pytest.importorskip("ipykernel")
nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")

BEGIN = """
import _thread, gc, threading, time
import torch
import mgpu_core

def ours():
    return [each.name for each in threading.enumerate() if each.name.startswith("mgpu")]

def wait_for_no_thread():
    gc.collect()
    until = time.monotonic() + 20
    while ours() and time.monotonic() < until:
        time.sleep(0.05)
    return ours()

def train(model, x, y):
    torch.nn.functional.mse_loss(model(x), y).backward()

net = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4))
x, y = torch.randn(24, 8), torch.randn(24, 4)
"""
MAKE = {
    "step": """
optimizer = mgpu_core.optim.SGD(net.parameters(), lr=0.01)
step = mgpu_core.TrainStep(net, torch.nn.functional.mse_loss, optimizer, ["cpu"] * 3, workers="threads")
work = lambda: step(x, y)
work(); print(len(ours()))
""",
    "model": """
model = mgpu_core.DataParallel(net, ["cpu"] * 3, workers="threads")
work = lambda: train(model, x, y)
work(); print(len(ours()))
""",
    "predict": """
predict = mgpu_core.Predictor(net, ["cpu"] * 3)
work = lambda: predict(x)
work(); print(len(ours()))
""",
}
INTERRUPTED = """
threading.Timer(0.5, _thread.interrupt_main).start()
while True:
    work()
"""
AFTERWARDS = "work(); print('works again')"
END = {
    "step": "step.close(); del step, work; print(wait_for_no_thread())",
    "model": "model.close(); del model, work; print(wait_for_no_thread())",
    "predict": "predict.close(); print(wait_for_no_thread())",
}


def run(tmp_path, *cells, failing=()):
    """Run cells in a new kernel; return the text that each printed, or the name of the error that was expected."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    for index in failing:
        notebook.cells[index].metadata["tags"] = ["raises-exception"]
    nbclient.NotebookClient(notebook, timeout=60, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [cell.outputs for cell in notebook.cells]
    return ["".join(each.get("text", each.get("ename", "")) for each in output) for output in outputs]


@pytest.mark.parametrize("name", MAKE)
def test_a_cell_run_twice_leaves_no_thread(name, tmp_path):
    _, first, second, left = run(tmp_path, BEGIN, MAKE[name], MAKE[name], END[name])
    assert 3 <= int(first) <= int(second)
    assert left == "[]\n"


@pytest.mark.parametrize("name", MAKE)
def test_an_interrupted_cell_leaves_no_thread(name, tmp_path):
    cells = BEGIN, MAKE[name], INTERRUPTED, AFTERWARDS, END[name]
    _, _, interrupted, again, left = run(tmp_path, *cells, failing=[2])
    assert interrupted == "KeyboardInterrupt"
    assert again == "works again\n"
    assert left == "[]\n"
