"""The short convolution equals torch's, gradients included, however its channels are divided and its input is split."""

import pytest
import torch
import torch.nn.functional as F

from recall_lab.mixer.short_conv import ShiftedProducts, ShortConv


def by_torch(x, weight, cache=None):
    """y by torch.nn.functional.conv1d: b t c."""
    width = weight.shape[2]
    before = x.new_zeros(len(x), x.shape[2], width - 1) if cache is None else cache
    return F.conv1d(torch.cat([before, x.transpose(1, 2)], dim=2), weight, groups=len(weight)).transpose(1, 2)


@pytest.mark.parametrize("width", [1, 2, 4, 7])
@pytest.mark.parametrize("length", [1, 2, 5, 33])
@pytest.mark.parametrize("sizes", [[6], [1, 2, 3]])
def test_it_equals_the_convolution_of_torch(width, length, sizes):
    torch.manual_seed(0)
    conv = ShortConv(6, width).double()
    x, cache = torch.randn(2, length, 6).double(), torch.randn(2, 6, width - 1).double()
    inputs = (x.requires_grad_(), cache.requires_grad_(), conv.weight)
    outputs, last = conv(x.split(sizes, dim=2), cache)
    y, expected = torch.cat(outputs, dim=2), by_torch(x, conv.weight, cache)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-14)
    torch.testing.assert_close(last, torch.cat([cache, x.transpose(1, 2)], dim=2)[:, :, length:], rtol=0, atol=0)
    g = torch.randn_like(y)
    for found, wanted in zip(torch.autograd.grad(y, inputs, g), torch.autograd.grad(expected, inputs, g), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-13)


def test_outputs_are_contiguous():
    """Otherwise scaled_dot_product_attention takes a slower path."""
    outputs, _ = ShortConv(12, 4)(torch.randn(2, 9, 12).split([4, 4, 4], dim=2))
    assert all(part.is_contiguous() for part in outputs)


def test_derivatives():
    x, taps = torch.randn(2, 7, 3).double().requires_grad_(), torch.randn(4, 3).double().requires_grad_()
    assert torch.autograd.gradcheck(ShiftedProducts.apply, (x, taps), check_batched_grad=True)
    assert torch.autograd.gradgradcheck(ShiftedProducts.apply, (x, taps))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_inputs_keep_their_dtype(dtype):
    outputs, last = ShortConv(4, 4)([torch.randn(1, 5, 4, dtype=dtype)])
    assert outputs[0].dtype == last.dtype == dtype
