"""The Jacobian of a layer's outputs with respect to its inputs, by reverse-mode differentiation, for any layer."""

import torch

from recall_lab.mixer.layer import LayerTrace
from recall_lab.shapes import Attention


def influence_of_inputs(trace: LayerTrace, chunk: int = 1 << 20) -> Attention:
    """‖∂y_t/∂x_s‖_F/√d_model (b 1 t s), the norm of the derivative of an output by an input.

    Every element of the output needs a backward pass: n d_model passes per sequence. They are computed in batches of
    at most `chunk` elements of input, but at least one pass.
    """
    b, t, m = trace.x.shape
    found = trace.x.new_zeros(b, 1, t, t, dtype=torch.float32)
    outputs = torch.arange(t * m, device=trace.x.device)
    for sequence, x in enumerate(trace.x.detach()):
        for some in outputs.split(max(1, chunk // (t * m))):
            copies = x.expand(len(some), t, m).clone().requires_grad_()
            # cuDNN differentiates a recurrence in training mode only.
            with torch.enable_grad(), torch.backends.cudnn.flags(enabled=False):
                y = trace.mixer(copies)[0]
                (slope,) = torch.autograd.grad(y.flatten(1).gather(1, some[:, None]).sum(), copies)  # c t m
            found[sequence, 0].index_add_(0, some // m, slope.float().square().sum(-1))
    return (found / m).sqrt()
