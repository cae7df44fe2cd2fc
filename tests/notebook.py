"""recall_lab from Python, step by step. Each `# %%` begins a cell, for an editor or Jupyter; or run the whole file."""

# %% A model, trained without Hydra
from functools import partial

import numpy as np
import torch

from recall_lab.mixer.delta_rule import DeltaRule
from recall_lab.mixer.linear import Linear
from recall_lab.model import Model
from recall_lab.probe.base import run, trace_model
from recall_lab.probe.effective_attention import effective_attention
from recall_lab.task.mqar import MQAR
from recall_lab.train import Training, evaluate, train

STEPS = 200
cpu = torch.device("cpu")
task = MQAR(length=32, pairs=4, vocab=64)
models = {}
for name, mixer in {"linear": Linear, "delta_rule": partial(DeltaRule, heads=2)}.items():
    torch.manual_seed(0)
    models[name] = Model(task.vocab, mixer, d_model=32)
    curve = train(models[name], task, Training(steps=STEPS, cells=[{"length": 32}]), data_seed=0, device=cpu)
    print(f"{name}: validation accuracy {curve[-1]['accuracy']:.2f} after {curve[-1]['step']} steps")

# %% Scores in other cells of the task's grid
for name, model in models.items():
    for length in (32, 64):
        scores = evaluate(model, task, {"length": length}, data_seed=0, split="test", sequences=64, device=cpu)
        print(f"{name}, length {length}: accuracy {scores['accuracy']:.2f}, chance {task.chance:.2f}")

# %% What a layer has computed: q, k, v, gates, outputs, and A with o = A v
batch = task.sample(2, np.random.default_rng(0))
model = models["delta_rule"]
first, second = trace_model(model, batch)
attention = second.mixer.effective_attention(second.q, second.k, second.gates)  # b h t s
print(f"A is {tuple(attention.shape)}; |A v - o| is {float((attention @ second.v - second.o).abs().max()):.0e}")

# %% A probe, on both layers
rows = run([partial(effective_attention, matrix=False)], model, batch, np.random.default_rng(0))
for row in rows:
    if row["metric"] == "target_share" and row["statistic"] == "mean":
        print(f"layer {row['layer']}, head {row['head']}: {row['value']:.2f} of the weight is on the answer")
