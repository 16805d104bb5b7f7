#!/bin/sh
# A fleet on this machine: a hub, two strong devices that share what they learn, and a weak device that they help.
# `sh examples/fleet.sh [PORT [MODEL]]`. MODEL is what `mergetta export --out MODEL` wrote, if that was done before.
# All files are in a temporary folder, which is removed in the end. Needs the extras torch, export, hub and bench.
set -eu
port=${1:-8321}
url=http://127.0.0.1:$port
model=${2:+$(realpath "$2")}
folder=$(mktemp -d)
hub=
trap 'kill $hub 2>/dev/null || true; wait; rm -rf "$folder"' EXIT
trap 'exit 1' INT TERM
cd "$folder"

echo "== A hub."
mergetta hub serve --folder hub --port "$port" >hub.log 2>&1 &
hub=$!

echo "== What three places look like: fog, frost, and snow; and a few clean photos."
python - <<'PYTHON'
import numpy as np
from mergetta.data.corruptions import corrupt
from mergetta.data.fashion import load_fashion

images, labels = load_fashion()
for place, first in (("fog", 0), ("frost", 1000), ("snow", 2000)):
    chosen = slice(first, first + 1000)
    np.savez(f"{place}.npz", images=corrupt(images[chosen], place), labels=labels[chosen])
np.savez("clean.npz", images=images[3000:3032])
PYTHON

until python -c "import urllib.request; urllib.request.urlopen('$url/v1/health')" 2>/dev/null; do
    kill -0 $hub 2>/dev/null || { cat hub.log; exit 1; }
    sleep 0.5
done

echo "== The operator registers the model, and gives photos on which the hub tries what it is sent."
test -n "$model" || { model=model.onnx; mergetta export --out $model; }
mergetta hub probe clean.npz --model "$model" --folder hub
yard=$(mergetta hub token create yard --role contribute --approved --folder hub 2>/dev/null)
shed=$(mergetta hub token create shed --role contribute --approved --folder hub 2>/dev/null)
camera=$(mergetta hub token create camera --role consume --folder hub 2>/dev/null)

echo "== Two strong devices adapt, one in fog and one in frost, and share a few kilobytes each."
mergetta adapt fog.npz --out fog.safetensors --hub "$url" --token "$yard"
mergetta adapt frost.npz --out frost.safetensors --hub "$url" --token "$shed"

echo "== A weak device, without PyTorch, predicts in snow, where nobody has been before."
mergetta run --model "$model" --hub "$url" --token "$camera" --images snow.npz --hub-folder bundles

echo "== What that is worth, by labels that no device has seen."
bundle=$(ls -t bundles/bundle-*.safetensors | head -n 1)
mergetta evaluate --model "$model" --bundle "$bundle" --images snow.npz --json >score.json
python - <<'PYTHON'
import json

score = json.load(open("score.json"))
print(f"error in snow: {score['before']['error']:.1f} % as deployed, {score['after']['error']:.1f} % with the fleet")
PYTHON
