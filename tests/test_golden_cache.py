"""Cache policies versus golden arrays, which other code computed: outputs and gradients, parallel and step by step."""

import pytest
import torch
from conftest import golden, ratio

from recall_lab.mixer.deltaformer import DeltaFormer
from recall_lab.mixer.dsa import DSA
from recall_lab.mixer.forgetting import Forgetting
from recall_lab.mixer.path_attn import PathAttn
from recall_lab.mixer.softmax import Softmax
from recall_lab.mixer.stickbreaking_attn import StickbreakingAttn
from recall_lab.mixer.window import Window

LIMIT = {torch.float64: (1e-10, 1e-10), torch.float32: (1e-5, 5e-5)}
"""Tolerances of outputs and of gradients."""
MECHANISMS = {
    "softmax": Softmax,
    "window": Window,
    "forgetting": Forgetting,
    "stickbreaking": StickbreakingAttn,
    "dsa": DSA,
    "path": PathAttn,
    "deltaformer": DeltaFormer,
}
CASES = {
    "softmax": ("softmax_attn", "o", {}),
    "softmax, learned sink": ("softmax_attn", "o_sink", {"learned_sink": True}),
    "window": ("softmax_attn", "o_window5", {"budget": 5}),
    "forgetting": ("forgetting_attn", "o", {}),
    "forgetting, long": ("forgetting_attn__long", "o", {}),
    "stickbreaking": ("stickbreaking_attn", "o", {}),
    "dsa": ("dsa", "o", {"budget": 6, "index_heads": 6, "index_width": 5}),
    "path": ("path_attn", "o", {"forget": True}),
    "path, long": ("path_attn__long", "o", {"forget": True}),
    "deltaformer": ("deltaformer_attn", "o", {}),
}
GATES = {
    "g": "log_forget",
    "w": "path",
    "beta": "beta",
    "q_idx": "index_query",
    "k_idx": "index_key",
    "w_idx": "index_weight",
}
"""Name in the golden files → name of the gate."""


@pytest.mark.parametrize("dtype", LIMIT, ids=str)
@pytest.mark.parametrize("how", ["parallel", "run_recurrence", "split"])
@pytest.mark.parametrize("case", CASES)
def test_golden(case, how, dtype):
    file, output, options = CASES[case]
    arrays = golden(file)
    heads = arrays["q"].shape[2]
    mixer = MECHANISMS[case.split(",")[0]](d_model=8, heads=heads, **options)
    if "k_idx" in arrays:
        arrays["k_idx"] = arrays["k_idx"][:, :, None]  # one key for all heads of the indexer
    x = {
        name: arrays[name].to(dtype).transpose(1, 2).requires_grad_()
        for name in ("q", "k", "v", *GATES)
        if name in arrays
    }
    gates = {GATES[name]: x[name] for name in GATES if name in x}
    if options.get("learned_sink"):
        gates["sink_logit"] = arrays["sink_bias"].to(dtype)[:, None].expand(x["q"].shape[:3])
    if how == "split":
        cut = x["q"].shape[2] // 3
        parts, state = [], None
        for span in (slice(cut), slice(cut, None)):
            here = {name: part[:, :, span] for name, part in gates.items()}
            o, state = mixer.parallel(x["q"][:, :, span], x["k"][:, :, span], x["v"][:, :, span], here, state)
            parts.append(o)
        o = torch.cat(parts, dim=2)
    else:
        o, _ = getattr(mixer, how)(x["q"], x["k"], x["v"], gates)
    assert ratio(o.detach().transpose(1, 2), arrays[output]) < LIMIT[dtype][0]
    if output == "o" and "do" in arrays:
        given = [name for name in x if f"grad_{name}" in arrays]
        grads = torch.autograd.grad((o.transpose(1, 2) * arrays["do"].to(dtype)).sum(), [x[name] for name in given])
        for name, grad in zip(given, grads, strict=True):
            assert ratio(grad.transpose(1, 2), arrays[f"grad_{name}"]) < LIMIT[dtype][1], name


@pytest.mark.parametrize("dtype", LIMIT, ids=str)
def test_the_remainder_of_stickbreaking(dtype):
    """It is the part of the weight that the golden array states, and it goes to the token's own value."""
    arrays = {name: x.transpose(1, 2).to(dtype) for name, x in golden("stickbreaking_attn").items()}
    mixer = StickbreakingAttn(d_model=8, heads=2, remainder=True)
    o, _ = mixer.parallel(arrays["q"], arrays["k"], arrays["v"], {})
    expected = golden("stickbreaking_attn")
    assert ratio(o.transpose(1, 2), expected["o"] + expected["rem"][..., None] * expected["v"]) < LIMIT[dtype][0]
    own = mixer.effective_attention(arrays["q"], arrays["k"], {}).diagonal(dim1=2, dim2=3)
    assert ratio(own.transpose(1, 2), expected["rem"]) < LIMIT[dtype][0]
