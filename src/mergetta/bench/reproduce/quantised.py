"""Table 5: int8 models, which cannot be back-propagated through."""

from __future__ import annotations

from mergetta.bench.reproduce import paper
from mergetta.bench.reproduce.corruption_table import figure
from mergetta.bench.reproduce.setting import Records, Setting, per_domain
from mergetta.bench.runner import Part
from mergetta.bench.sheets import Drawing, Sheet, rows_of
from mergetta.bench.store import Store

TITLE = "Quantised models (Table 5 of the paper)"
DELTA = 0.1
"""The paper's for int8: a smaller difference would be lost in rounding."""
METHODS = ("source", "bn-stats", "cola", "merge")
NOTES = (
    "int8 by ONNX Runtime, norm layers left adjustable: transformers with dynamic quantisation as in the paper, CNNs "
    "with static quantisation calibrated on 200 clean images. Experts are made on the float model.",
    f"zo-merge has δ = {DELTA} on int8, as in the paper, and the suite's own on float.",
)


def parts(setting: Setting) -> dict[str, Part]:
    int8 = {"runtime": "int8"}
    methods = {f"{name}, int8": setting.method(name).model_copy(update=int8) for name in METHODS}
    methods[f"zo-merge, int8, δ {DELTA}"] = setting.zo(delta=DELTA).model_copy(update=int8)
    exact = {name: setting.method(name) for name in (*METHODS, "zo-merge")}
    return {"int8": setting.part(methods), "float": setting.part(exact)}


def outcome(setting: Setting, records: Records, store: Store) -> tuple[list[Sheet], list[Drawing]]:
    rows = per_domain(records["int8"], setting.domains)
    exact = {f"{name}, float32": v for name, v in per_domain(records["float"], setting.domains).items()}
    theirs = paper.rows("imagenet-c", "vit-b-16-int8-dynamic", setting.domains)
    columns = ("error, %", *(d.replace("_", " ") for d in setting.domains), "average")
    caption = (
        "Mean over seeds ± standard deviation; bold among int8, and among float; italics: the paper's, on ImageNet-C."
    )
    return [Sheet(caption, columns, (*rows_of(rows), *rows_of(exact), *theirs))], [figure({**rows, **exact})]
