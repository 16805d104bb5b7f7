"""The core runs without torch: on a device there is none."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import mergetta

PACKAGE = Path(mergetta.__file__).parent
TORCH_FREE = (
    "adapters", "adapters.forward_only", "arrays", "bench.evaluation", "bundle", "data.images", "data.labelled",
    "data.lazy", "data.styles.filters", "device", "errors", "expert", "family_file", "files", "groups", "losses",
    "merging", "runtimes.base", "runtimes.onnx_runtime", "seeds", "streams", "zeroth_order",
)  # fmt: skip
BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "timm", "scipy", "cv2", "matplotlib", "fastapi"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Block())
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BLOCK + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
    )


def test_core_imports_without_torch() -> None:
    modules = [
        ".".join(("mergetta", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
        for name in TORCH_FREE
        for base in [PACKAGE / name.replace(".", "/")]
        for path in ([base.with_suffix(".py")] if not base.is_dir() else sorted(base.rglob("*.py")))
        if "backprop" not in path.parts
    ]
    assert len(modules) > 25
    result = run("import importlib\n" + "\n".join(f"importlib.import_module({module!r})" for module in modules))
    assert result.returncode == 0, result.stderr


def test_core_does_not_import_hub_bench_or_models() -> None:
    core = ("adapters.forward_only.zo_merge", "merging.scatter", "device.agent", "device.hub_link", "family_file")
    code = "import sys, " + ", ".join(f"mergetta.{module}" for module in core) + "\n"
    code += "print([m for m in sys.modules if m.startswith(('mergetta.hub', 'mergetta.bench', 'mergetta.models'))])"
    assert run(code).stdout.strip() == "[]"


def test_bundle_and_zo_merge_without_torch() -> None:
    result = run(
        """
        import numpy as np
        from mergetta import Bundle, Expert, ZOMerge, build_bundle, list_adapters, create_adapter
        from tests_numpy_runtime import NumpyRuntime
        runtime = NumpyRuntime()
        rng = np.random.default_rng(0)
        moved = [{n: v + rng.normal(size=v.shape) for n, v in runtime.groups.items()} for _ in range(3)]
        experts = [Expert(groups, runtime.family) for groups in moved]
        bundle = Bundle.from_bytes(build_bundle(runtime.groups, experts).to_bytes())
        adapter = ZOMerge(runtime, bundle, loss="roid")
        logits = [adapter.predict(rng.random((8, 1, 6, 6)).astype(np.float32)) for _ in range(3)]
        assert adapter.steps == 3 and np.isfinite(logits).all()
        try:
            create_adapter("tent", runtime)
        except ValueError as error:
            print(error)
        """.replace("from tests_numpy_runtime", "sys.path.insert(0, 'tests'); from numpy_runtime")
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("Back-propagation needs PyTorch: pip install ")


@pytest.mark.parametrize("name", ["TorchRuntime", "load_family"])
def test_what_needs_torch_says_so(name: str) -> None:
    result = run(f"import mergetta\ntry:\n    mergetta.{name}\nexcept ValueError as error:\n    print(error)")
    assert result.stdout.startswith(f"{name} needs PyTorch: pip install ")


def test_public_names() -> None:
    for name in mergetta.__all__:
        assert getattr(mergetta, name) is not None
    with pytest.raises(AttributeError):
        _ = mergetta.nothing
    assert set(mergetta.__all__) <= set(dir(mergetta))
