"""Experts, from the store or freshly trained, and the pool of them that a cell is given."""

from __future__ import annotations

from mergetta.adapters.backprop.expert_training import Training
from mergetta.bench.cells import Cell, members, same_run
from mergetta.bench.inputs import family_of, training_of
from mergetta.bench.keys import cell_key, expert_key
from mergetta.bench.online import online
from mergetta.bench.store import Store
from mergetta.bench.suite import Suite
from mergetta.expert import Expert
from mergetta.runtimes.torch_runtime import TorchRuntime


def make_expert(suite: Suite, method: str, domain: str, seed: int, store: Store) -> Expert:
    """The expert of a domain, from the store or freshly trained; on the way, the results of the method itself."""
    key = expert_key(suite, method, domain, seed)
    expert = store.expert(key)
    if expert is None:
        runtime = TorchRuntime(family_of(suite))
        training = Training(runtime, method, seed, **suite.experts[method])
        cell = same_run(suite, method, domain, seed)
        if cell:
            record = online(suite, cell, training.adapter, runtime, training.observe)
            store.put_result(cell_key(suite, cell), record)
        else:
            for images, _ in training_of(suite, domain).stream(seed, suite.training_batch_size):
                training.adapter.predict(images)
                training.observe(images)
        expert = training.expert(domain)
        store.put_expert(key, expert)
    return expert


def pool(suite: Suite, cell: Cell, store: Store) -> list[Expert]:
    assert cell.expert is not None
    return [make_expert(suite, cell.expert, domain, seed, store) for domain, seed in members(suite, cell)]
