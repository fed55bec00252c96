"""PyTorch's own tests of its masked tensors, run against this library: what passes, and what contradicts the contract.

Set TORCH_SOURCE to a source tree of pytorch: the file is not in its wheels, and none of it is here. The table is in
docs/results/torch_masked_tests.md.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from repository import HELPERS, ROOT

SHIM = HELPERS / "torch_maskedtensor_shim.py"
DOCUMENT = ROOT / "docs" / "results" / "torch_masked_tests.md"
SOURCE = os.environ.get("TORCH_SOURCE", "")
FILE = Path(SOURCE) / "test" / "test_maskedtensor.py"

# Tests that hold to what the contract says otherwise, and why; each of them has to fail, for that reason.
CONTRADICTS = {
    "test_add": "operands with different masks are refused",
    "test_masks_match": "operands with different masks are refused",
    "test_max_not_implemented": "max is refused",
    "test__is_any_true_false": "`any` of a slice without valid elements is False, and valid",
    "test_any_true_dtype": "the text of an error: a boolean tensor is expected",
    "test_mean_grad_case_1e": "a plain tensor gets a masked gradient",
    "test_grad_warning": "a warning whenever a masked tensor is made from data that requires grad",
    "test_mean_grad_case_1a": "a warning whenever a masked tensor is made from data that requires grad",
    "test_mean_grad_case_1c": "a warning whenever a masked tensor is made from data that requires grad",
    "test_invalid_tensor_inputs": "only tensors are taken as data and mask",
    "test_diff_layouts": "sparse data with a dense mask is refused",
    "test_diff_dim": "the text of an error: the mask must have exactly the data's shape",
    "test_diff_sizes": "the text of an error: the mask must have exactly the data's shape",
}
SPARSE = "a sparse mask"
SPARSE_ERROR = re.compile(r"the mask has layout torch\.sparse_\w+; pass mask\.to_dense\(\)")


def method(name: str) -> str:
    """The method that a test stands for, without class, device and parameters."""
    found = name.rpartition(".")[2].removesuffix("_cpu")
    return max(
        (known for known in CONTRADICTS if re.fullmatch(rf"{known}(_fn_name_.*)?", found)), key=len, default=found
    )


def reason(name: str, outcome: str) -> str | None:
    """Why a test that does not pass is right not to; None where nobody knows."""
    return CONTRADICTS.get(method(name)) or (SPARSE if SPARSE_ERROR.search(outcome) else None)


# Tests that pass a sparse mask, and expect a restriction of the prototype that there is not here.
UNRESTRICTED = {
    "test_contiguous",
    "test_invalid_sparse_layout",
    "test_invalid_sparse_coo_values",
    "test_invalid_sparse_csr_values",
}


def ran(*options: str) -> dict[str, str]:
    """The outcome of each test, by its name."""
    shim = [sys.executable, str(SHIM), SOURCE, *options]
    found: dict[str, str] = json.loads(subprocess.run(shim, capture_output=True, text=True, check=True).stdout)
    return found


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    if not SOURCE:
        pytest.skip(
            "test/test_maskedtensor.py is not in the installed torch; set TORCH_SOURCE to a source tree of pytorch"
        )
    if not FILE.is_file():
        pytest.skip(f"TORCH_SOURCE is {SOURCE}, which has no test/test_maskedtensor.py")
    return ran()


def test_what_fails_contradicts_the_contract(outcomes: dict[str, str]) -> None:
    failing = {name: outcome for name, outcome in outcomes.items() if outcome not in ("pass", "skip")}
    unexplained = {name: outcome for name, outcome in failing.items() if reason(name, outcome) is None}
    assert not unexplained, "\n".join(f"{name}: {outcome}" for name, outcome in unexplained.items())


def test_what_contradicts_the_contract_fails(outcomes: dict[str, str]) -> None:
    passing = [name for name, outcome in outcomes.items() if method(name) in CONTRADICTS and outcome == "pass"]
    assert not passing, passing


def test_most_pass(outcomes: dict[str, str]) -> None:
    counts = Counter(
        outcome if outcome in ("pass", "skip") else reason(name, outcome) for name, outcome in outcomes.items()
    )
    assert counts["pass"] >= 824, counts


def test_what_passes_a_sparse_mask_passes_with_a_dense_one(outcomes: dict[str, str]) -> None:
    with_dense = ran("--dense-masks")
    refused = [name for name, outcome in outcomes.items() if SPARSE_ERROR.search(outcome)]
    assert {method(name) for name in refused if with_dense[name] != "pass"} == UNRESTRICTED


def test_the_document_gives_each_reason() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    for name in UNRESTRICTED:
        assert f"`{name}`" in text
    for name, why in CONTRADICTS.items():
        assert f"`{name}`" in text
        assert why in text
