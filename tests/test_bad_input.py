"""Whatever is given by mistake: exit code 2, one sentence that says what is wrong, no traceback, no file changed."""

from __future__ import annotations

import json
import shlex
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mergetta import Expert, TorchRuntime, build_bundle, load_family
from mergetta.device import hub_client

from .test_cli import mergetta

onnx = pytest.importorskip("onnx")

RUN = "run --model m.onnx --bundle b.safetensors --images x.npz"
EVALUATE = "evaluate --model m.onnx --bundle b.safetensors"
BAD_INPUT = {
    # a path that is not there
    "adapt none.npz --out o": "Cannot read none.npz: No such file",
    "adapt nowhere/ --out o": "Cannot read nowhere: No such file",
    "adapt x.npz --out o --family resnet-20 --checkpoint none.pt": "Cannot read the checkpoint none.pt: No such file",
    "upload none.safetensors --hub http://127.0.0.1:1": "Cannot read none.safetensors: No such file",
    "upload e.safetensors --hub http://127.0.0.1:1 --ca none.pem": "no file of certificate authorities 'none.pem'",
    "build none.safetensors --out o": "Cannot read none.safetensors: No such file",
    "calibrate --model none.onnx --bundle b.safetensors --images x.npz": "Cannot read none.onnx: No such file",
    "run --model none.onnx --bundle b.safetensors --images x.npz": "Cannot read none.onnx: No such file",
    "run --model m.onnx --bundle none --images x.npz": "Cannot read none: No such file",
    "run --model m.onnx --bundle b.safetensors --images none": "Cannot read none: No such file",
    "run --model m.onnx --bundle b.safetensors --images none.mp4": "There is no file none.mp4",
    f"{EVALUATE} --images none": "Cannot read none: No such file",
    f"{EVALUATE} --images photos --labels none.csv": "Cannot read the labels none.csv: No such file",
    "inspect nowhere/b.safetensors": "There is no file nowhere/b.safetensors",
    "inspect none.onnx": "There is no file none.onnx",
    "bench none.yaml": "There is no suite 'none.yaml'",
    "report none": "There is no folder none",
    "corrupt none.npz --out c": "There is no file or folder none.npz",
    "hub serve --folder h --signing-key none.pem": "Cannot read none.pem: No such file",
    "hub serve --folder h --certificate none.pem": "Cannot read none.pem: No such file",
    # a hub that is not there is not made
    "hub token create me --role admin --folder typo": "There is no hub in the folder typo",
    "hub token list --folder typo": "There is no hub in the folder typo",
    "hub token revoke me --folder typo": "There is no hub in the folder typo",
    "hub audit --folder typo": "There is no hub in the folder typo",
    "hub check --folder typo": "There is no hub in the folder typo",
    "hub backup copy --folder typo": "There is no hub in the folder typo",
    "hub restore typo --folder new": "There is no hub in the folder typo",
    # a file of another kind
    "adapt a.png --out o": "a.png is not an npz file: it is a PNG image",
    "adapt text.txt --out o": "text.txt is not an npz file",
    "adapt empty --out o": "empty is not an npz file: it is empty",
    "adapt zip.npz --out o": "Cannot read zip.npz as an npz file",
    "adapt e.safetensors --out o": "e.safetensors is not an npz file: it is a safetensors file",
    "adapt x.npz --out o --family resnet-20 --checkpoint a.png": "no checkpoint of PyTorch",
    "upload b.safetensors --hub http://127.0.0.1:1": "is a 'mergetta.bundle' file",
    "build a.png --out o": "a.png is not a safetensors file: it is a PNG image",
    "build x.npz --out o": "x.npz is not a safetensors file: it is a zip file",
    "run --model a.png --bundle b.safetensors --images x.npz": "a.png is not an ONNX model: it is a PNG image",
    "run --model text.txt --bundle b.safetensors --images x.npz": "text.txt is damaged, or not an ONNX model",
    "run --model m.onnx --bundle a.png --images x.npz": "it is a PNG image",
    "run --model m.onnx --bundle e.safetensors --images x.npz": "is a 'mergetta.expert' file",
    f"{RUN} --state a.png": "it is a PNG image",
    f"{EVALUATE} --images x.npz": "x.npz has no array named 'labels' or 'y'",
    f"{EVALUATE} --images photos --labels text.txt": "must be a CSV file with the columns",
    "inspect a.png": "it is a PNG image",
    "inspect cut.safetensors": "cut.safetensors is truncated, or not a safetensors file.",
    "inspect bad.json": "bad.json is not JSON",
    "inspect table.csv": "does not hold predictions",
    "bench bad.yaml": "bad.yaml is not a valid suite",
    "bench odd.yaml": "it does not say which family",
    "bench a.png": "a.png is not a valid suite",
    "report photos": "There are no studies in photos",
    "corrupt a.png --out c": "a.png is not an npz file: it is a PNG image",
    "hub serve --folder h --signing-key text.txt": "is not an unencrypted private key",
    "hub serve --folder h --certificate text.txt": "no TLS certificate",
    "hub serve --folder h --certificate-key text.txt": "--certificate-key goes with --certificate",
    # a folder where a file is wanted, and the reverse
    "adapt x.npz --out folder": "'folder' is a directory",
    "adapt x.npz --out text.txt/o": "Cannot write text.txt/o",
    "adapt folder --out o": "folder has no images",
    "adapt x.npz --out o --family folder": "folder is a folder, not a checkpoint file",
    "build folder --out o": "Cannot read folder: Is a directory",
    "export --out folder": "'folder' is a directory",
    "run --model folder --bundle b.safetensors --images x.npz": "Cannot read folder: Is a directory",
    f"{RUN} --out folder": "'folder' is a directory",
    f"{RUN} --state folder": "'folder' is a directory",
    "bench fashion-bn --json folder": "'folder' is a directory",
    "bench fashion-bn --cache text.txt": "'text.txt' is a file",
    "corrupt x.npz --out text.txt": "'text.txt' is a file",
    "report text.txt": "There is no folder text.txt",
    "hub key folder": "'folder' is a directory",
    "hub serve --folder text.txt": "'text.txt' is a file",
    "hub serve --folder text.txt/h": "Cannot write text.txt/h",
    # numbers that are none
    "adapt x.npz --out o --lr inf": "lr must be finite",
    "adapt x.npz --out o --lr nan": "Invalid value for '--lr'",
    "adapt x.npz --out o --batch-size 0": "Invalid value for '--batch-size'",
    "build e.safetensors --family fashion-bn --out o --keep nan": "keep must be a share",
    "build e.safetensors --family fashion-bn --out o --initial inf": "initial must be one finite number",
    f"{RUN} --method zo-merge --option lr=inf": "lr must be finite",
    f"{RUN} --method zo-merge --option lr=fast": "The option lr of zo-merge must be a number, not 'fast'",
    f"{RUN} --method zo-merge --option budget=low": "The option budget of zo-merge must be a number, not 'low'",
    f"{RUN} --max-wait nan": "Invalid value for '--max-wait'",
    f"{RUN} --frame 3by4": "--frame must be HEIGHTxWIDTH",
    "hub serve --folder h --keep nan": "--keep",
    # names that there are not
    "adapt fashion:rain --out o": "There is no corruption 'rain'",
    "adapt fashion:fog@9 --out o": "must be 1 to 5",
    "adapt x.npz --out o --method magic": "There is no adapter 'magic'",
    "adapt x.npz --out o --family nothing:there": "There is no family 'nothing:there'",
    "adapt x.npz --out o --family own_bad:three": "must return a Family",
    "adapt x.npz --out o --family own_bad:broken": "own_bad:broken fails in line 5",
    "adapt x.npz --out o --family own_syntax:family": "own_syntax:family fails",
    f"{RUN} --method magic": "A device runs race-merge or zo-merge, not 'magic'",
    f"{RUN} --option colour=red": "race-merge has no option 'colour'",
    f"{RUN} --method zo-merge --option loss=3": "There is no loss 3",
    f"{EVALUATE} --images photos": "has the label 'cat', which is no class of the model",
    "bench fashion-bn --order upside-down": "order: Input should be 'mixed', 'sorted' or 'correlated'",
    "demo --domains rain": "There is no domain 'rain'",
    "reproduce magic": "There is no study 'magic'",
    "magic": "No such command 'magic'",
    # addresses
    "adapt x.npz --out o --hub nowhere": "must look like https://hub.example, not 'nowhere'",
    "upload e.safetensors --hub http://127.0.0.1:1": "Cannot reach the hub at http://127.0.0.1:1",
    "run --model m.onnx --bundle b.safetensors --images camera:x": "A camera has a number",
    "hub serve --folder h --port TAKEN": "Cannot listen on port TAKEN of 127.0.0.1: Address already in use",
    "hub serve --folder h --host nowhere.invalid": "Cannot listen on port 8321 of nowhere.invalid",
    "hub demo --port TAKEN": "Cannot listen on port TAKEN",
    "hub serve --folder h --database mysql://a/b": "SQLite or PostgreSQL, not in 'mysql'",
    "hub serve --folder h --blobs what://x": "Blobs cannot be kept at 'what://x'",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a little of everything."""
    folder = tmp_path_factory.mktemp("place")
    for name in ("folder", "photos/cat"):
        (folder / name).mkdir(parents=True)
    for name, text in {
        "text.txt": "hello\n",
        "empty": "",
        "zip.npz": "PK\x03\x04 and no more",
        "bad.json": "{",
        "table.csv": "a;b\n1;2\n",
        "bad.yaml": "a: [1\n",
        "odd.yaml": "colour: red\n",
        "own_bad.py": "def three():\n    return 3\n\ndef broken():\n    raise KeyError('x')\n",
        "own_syntax.py": "def family(:\n",
    }.items():
        (folder / name).write_text(text)
    np.savez(folder / "x.npz", images=np.zeros((20, 28, 28), np.uint8))
    for name in ("a.png", "photos/cat/a.png"):
        Image.fromarray(np.zeros((28, 28), np.uint8)).save(folder / name)
    runtime = TorchRuntime(load_family("fashion-bn"))
    Expert(dict(runtime.groups), runtime.family).save(folder / "e.safetensors")
    (folder / "cut.safetensors").write_bytes((folder / "e.safetensors").read_bytes()[:99])
    device_model(folder)
    return folder


def device_model(folder: Path) -> None:
    """A model that can be opened, and its bundle: exporting one takes longer than all that is tested here."""
    from mergetta.runtimes.onnx_metadata import FORMAT, OUTPUTS, VERSION

    helper, value, real = onnx.helper, onnx.helper.make_tensor_value_info, onnx.TensorProto.FLOAT
    scale = np.ones(4, np.float32)
    graph = helper.make_graph(
        [helper.make_node("Identity", ["norm.weight"], [name]) for name in OUTPUTS],
        "device",
        [value("images", real, ["n", 1, 28, 28]), value("norm.weight", real, [4])],
        [value(name, real, [4]) for name in OUTPUTS],
        [onnx.numpy_helper.from_array(scale, "norm.weight")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    header = {"format": FORMAT, "version": VERSION, "family": "tiny", "groups": [["norm.weight", 4, 0, "scale"]]}
    known = {**header, "channels": 1, "size": 28, "classes": list("abcd")}
    helper.set_model_props(model, {"mergetta": json.dumps(known)})
    onnx.save(model, folder / "m.onnx")
    expert = Expert({"norm.weight": 2 * scale}, "tiny")
    build_bundle({"norm.weight": scale}, [expert], family="tiny").save(folder / "b.safetensors")


@pytest.fixture(scope="module")
def taken() -> Iterator[str]:
    """A port in use."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield str(server.getsockname()[1])


def contents(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
        if "__pycache__" not in path.parts
    }


@pytest.mark.parametrize("command", BAD_INPUT)
def test_bad_input(command: str, place: Path, taken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_client, "BACKOFF", 0.001)
    before = contents(place)
    result = mergetta(*shlex.split(command.replace("TAKEN", taken)), cwd=place)
    said = " ".join(word for word in result.stderr.split() if word.strip("│╭╮╰╯─"))
    assert result.returncode == 2, result
    assert BAD_INPUT[command].replace("TAKEN", taken) in said
    assert "Traceback" not in said
    assert len(said) < 700
    assert "token" not in result.stdout and "http" not in result.stdout  # nothing is promised before
    assert contents(place) == before
