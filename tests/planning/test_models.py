"""The models that can be planned by name without other libraries."""

from __future__ import annotations

from thunder_fsdp_sched.planning import MODELS, dry_run_step, find_model

import profiles
import pytest
import torch

# Published numbers of parameters.
SIZES = {"Llama-3-8B": 8_030_261_248, "Llama-3-70B": 70_553_706_496, "Mixtral-8x7B": 46_702_792_704}


@pytest.mark.parametrize("name", MODELS)
def test_models_by_name_have_the_published_size_and_can_be_planned(name: str, monkeypatch: pytest.MonkeyPatch):
    make = find_model(name, batch=2, length=16, dtype=torch.float32)
    module, (tokens, _) = make()
    assert sum(param.numel() for param in module.parameters()) == SIZES[name]
    assert tokens.shape == (2, 16) and {param.device.type for param in module.parameters()} == {"meta"}
    if name == "Llama-3-70B":  # another size of Llama-3-8B
        return
    if name == "Llama-3-8B" and not profiles.LONG:  # `examples/plan_llama.py` plans it in `test_examples`
        return
    small = MODELS[name]._replace(blocks=2, width=32, heads=4, kv_heads=2, hidden=64, vocabulary=64)
    monkeypatch.setitem(MODELS, name, small)
    step = dry_run_step(find_model(name, batch=2, length=16, dtype=torch.float32), world_size=4, on="h100-sxm")
    assert step.compiled.backward is not None and step.seconds > 0
    buckets = {bucket.name.partition(".blocks.")[2][:1] for bucket in step.transform.plan}
    assert {"0", "1"} <= buckets
