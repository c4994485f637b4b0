"""The notebook that torch users start from runs from top to bottom.

pip install torch pytest && python -m pytest tests/test_notebook.py
"""

import json
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[1] / "examples" / "start.ipynb"


def test_every_cell_of_the_notebook_runs(capsys):
    pytest.importorskip("torch")
    notebook = json.loads(NOTEBOOK.read_text("utf-8"))
    assert notebook["nbformat"] == 4
    names, ran = {}, 0
    for at, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "code":
            assert not cell["outputs"], "outputs are not kept in the repository"
            exec(compile("".join(cell["source"]), f"cell {at}", "exec"), names)
            ran += 1
    assert ran == 8
    printed = capsys.readouterr().out
    assert "from torch's own attention" in printed and "sm_margin = 8: kernels use all SMs" in printed
