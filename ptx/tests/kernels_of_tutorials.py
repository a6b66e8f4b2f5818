"""Kernels of the kind that tutorials of Triton begin with: softmax, layer norm, and a product of matrices."""

import pytest
import torch
import triton
import triton.language as tl

DEVICE = triton.runtime.driver.active.get_active_torch_device()


@triton.jit
def softmax_kernel(out_ptr, x_ptr, columns, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    row = tl.program_id(0) * columns
    x = tl.load(x_ptr + row + at, at < columns, -float("inf"))
    e = tl.exp(x - tl.max(x, 0))
    tl.store(out_ptr + row + at, e / tl.sum(e, 0), at < columns)


@triton.jit
def layer_norm_kernel(y_ptr, x_ptr, weight_ptr, bias_ptr, columns, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0) * columns
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + row + at, at < columns, 0.0)
    mean = tl.sum(total, 0) / columns
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row + at, at < columns, 0.0)
        x = tl.where(at < columns, x - mean, 0.0)
        squares += x * x
    scale = 1 / tl.sqrt(tl.sum(squares, 0) / columns + eps)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < columns
        x = tl.load(x_ptr + row + at, inside, 0.0)
        w, b = tl.load(weight_ptr + at, inside), tl.load(bias_ptr + at, inside)
        tl.store(y_ptr + row + at, (x - mean) * scale * w + b, inside)


@triton.jit
def matmul_kernel(a_ptr, b_ptr, c_ptr, m, n, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, TF32: tl.constexpr):
    rows = tl.program_id(0) * M + tl.arange(0, M)
    columns = tl.program_id(1) * N + tl.arange(0, N)
    inner = tl.arange(0, K)
    total = tl.zeros([M, N], tl.float32)
    for start in range(0, k, K):
        a_at = rows[:, None] * k + (start + inner)[None, :]
        b_at = (start + inner)[:, None] * n + columns[None, :]
        a = tl.load(a_ptr + a_at, (rows[:, None] < m) & ((start + inner)[None, :] < k), 0.0)
        b = tl.load(b_ptr + b_at, ((start + inner)[:, None] < k) & (columns[None, :] < n), 0.0)
        total = tl.dot(a, b, total, input_precision=TF32)
    inside = (rows[:, None] < m) & (columns[None, :] < n)
    tl.store(c_ptr + rows[:, None] * n + columns[None, :], total.to(c_ptr.dtype.element_ty), inside)


@pytest.mark.parametrize("columns", [1, 100, 128])
def test_softmax(columns):
    x = torch.randn(5, columns, device=DEVICE)
    out = torch.empty_like(x)
    softmax_kernel[(5,)](out, x, columns, BLOCK=triton.next_power_of_2(columns))
    torch.testing.assert_close(out, torch.softmax(x, 1))


def test_layer_norm():
    x, w, b = torch.randn(4, 300, device=DEVICE), torch.randn(300, device=DEVICE), torch.randn(300, device=DEVICE)
    y = torch.empty_like(x)
    layer_norm_kernel[(4,)](y, x, w, b, 300, 1e-5, BLOCK=128)
    torch.testing.assert_close(y, torch.nn.functional.layer_norm(x, (300,), w, b))


@pytest.mark.parametrize(
    "dtype, precision",
    [(torch.float16, "tf32"), (torch.bfloat16, "tf32"), (torch.float32, "ieee"), (torch.float32, "tf32")],
)
def test_matmul(dtype, precision):
    a, b = torch.randn(50, 70, device=DEVICE, dtype=dtype), torch.randn(70, 40, device=DEVICE, dtype=dtype)
    c = torch.empty(50, 40, device=DEVICE, dtype=dtype)
    matmul_kernel[(2, 2)](a, b, c, 50, 40, 70, M=32, N=32, K=32, TF32=precision)
    torch.testing.assert_close(c, a @ b, atol=1e-2, rtol=2e-2)
