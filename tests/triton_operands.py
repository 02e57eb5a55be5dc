"""Operands of grouped products, and what the products are in fp64, for the tests of the Triton kernels."""

import torch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def operands(counts, k, n, dtype, device, trans_b=False):
    generator = torch.Generator().manual_seed(0)
    rows, groups = sum(counts), len(counts)
    x, grad_out = torch.randn(rows, k, generator=generator), torch.randn(rows, n, generator=generator)
    weight = torch.randn(groups, *((n, k) if trans_b else (k, n)), generator=generator) / k**0.5
    return tuple(t.to(device, dtype) for t in (x, weight, grad_out))


def product(x, weight, counts, trans_b=False):
    matrices = weight.double().cpu()
    parts = zip(x.double().cpu().split(counts), matrices.mT if trans_b else matrices, strict=True)
    return torch.cat([rows @ matrix for rows, matrix in parts])


def outer(x, grad_out, counts):
    parts = zip(x.double().cpu().split(counts), grad_out.double().cpu().split(counts), strict=True)
    return torch.stack([a.T @ b for a, b in parts])


def dirty(*shape, dtype, device):
    return torch.full(shape, torch.nan, dtype=dtype, device=device)
