"""GFLOP/s of PyTorch's product for `cargo xtask bench kernels`: prints a list, one number per product.

    products.py '{"threads": 1, "rounds": 5, "products": [{"form": "y", "m": 256, "n": 256, "k": 256}, ...]}'

Forms: y = x w^T, dx = dy w, dw += dy^T x.
"""

import json
import statistics
import sys
import time

import torch

asked = json.loads(sys.argv[1])
torch.set_num_threads(asked["threads"])


def seconds(call):
    """Mean time of a call, over at least 20 ms, after one that warms up."""
    call()
    began, calls = time.perf_counter(), 0
    while time.perf_counter() - began < 0.02:
        call()
        calls += 1
    return (time.perf_counter() - began) / calls


def rate(form, m, n, k):
    a = torch.randn(k, m).t() if form == "dw" else torch.randn(m, k)
    b = torch.randn(n, k).t() if form == "y" else torch.randn(k, n)
    c = torch.zeros(m, n)
    call = (lambda: c.addmm_(a, b)) if form == "dw" else (lambda: torch.mm(a, b, out=c))
    return statistics.median(2e-9 * m * n * k / seconds(call) for _ in range(asked["rounds"]))


with torch.no_grad():
    print(json.dumps([rate(**product) for product in asked["products"]]))
