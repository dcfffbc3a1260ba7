"""Schemathesis calls every path with what the OpenAPI description admits, and with what it does not: nothing found."""

import os
import re
import subprocess
import sysconfig
from pathlib import Path

import pytest
from torch import nn

import mixlab
from mixlab.dense.segmenter import create_segmenter

pytest.importorskip("fastapi")
pytest.importorskip("schemathesis")

from mixlab.deploy.serve import serving

ROOT, HERE = Path(__file__).parents[2], Path(__file__).parent
TOKEN = "open-sesame"


def small(task: str) -> nn.Module:
    if task == "segmentation":
        return create_segmenter("caformer_pico", num_classes=3, width=16, image_size=32)
    return mixlab.create_model("caformer_pico", num_classes=3, image_size=32)


@pytest.mark.parametrize(("task", "token"), [("segmentation", None), ("classification", TOKEN)])
def test_the_server_keeps_what_its_description_promises(task: str, token: str | None, tmp_path: Path) -> None:
    command = [
        str(Path(sysconfig.get_path("scripts")) / "schemathesis"),
        "--config-file",
        str(HERE / "schemathesis.toml"),
    ]
    options = ["--max-examples", "10", "--seed", "1", "--no-color"]
    known = [] if token is None else ["--header", f"Authorization: Bearer {token}"]
    hooks = {"SCHEMATHESIS_HOOKS": "tests.deploy.schemathesis_hooks", "PYTHONPATH": str(ROOT)}
    with serving(small(task), token=token) as address:  # type: ignore[arg-type]
        done = subprocess.run(
            [*command, "run", f"{address}/openapi.json", *options, *known],
            capture_output=True, text=True, errors="replace", cwd=tmp_path, env={**os.environ, **hooks},
        )  # fmt: skip
    found = "\n".join(line[:200] for line in done.stdout.splitlines()[-60:])
    assert done.returncode == 0, found + done.stderr[-2000:]
    assert re.search(r"Tested: +5", done.stdout), found
    assert "warning" not in done.stdout, found
