"""The peer of `cargo xtask bench collectives`: PyTorch's collectives over gloo, one process per rank.

    python collectives.py SPEC

SPEC is a JSON object: ranks, cores (to hold ranks on, one each in turn), operations, sizes (bytes of
the whole vector), warmup, and iterations by size. Rank 0 prints a JSON object per operation and size.
"""

import json
import os
import socket
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def operation(name, numbers, ranks):
    """The operation on a vector of `numbers`; raises where gloo has none."""
    whole = torch.ones(numbers)
    part = torch.ones(numbers // ranks)
    if name == "all_reduce":
        return lambda: dist.all_reduce(whole)
    if name == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, part)
    if name == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(part, whole)
    if name == "all_to_all":
        received = torch.zeros(numbers)
        return lambda: dist.all_to_all_single(received, whole)
    raise ValueError(f"unknown operation {name}")


def rank_main(rank, spec, port):
    os.sched_setaffinity(0, {spec["cores"][rank % len(spec["cores"])]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=spec["ranks"])
    for name in spec["operations"]:
        for size, iterations in zip(spec["sizes"], spec["iterations"]):
            run = operation(name, size // 4, spec["ranks"])
            try:
                run()
            except RuntimeError as error:
                if rank == 0:
                    print(json.dumps({"operation": name, "missing": str(error).splitlines()[0]}), flush=True)
                break
            for _ in range(spec["warmup"]):
                run()
            dist.barrier()
            began = time.perf_counter()
            for _ in range(iterations):
                run()
            seconds = (time.perf_counter() - began) / iterations
            if rank == 0:
                print(json.dumps({"operation": name, "bytes": size, "seconds": seconds}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main():
    if sys.argv[1] == "--versions":
        print(json.dumps({"torch": torch.__version__}))
        return
    spec = json.loads(sys.argv[1])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(rank_main, args=(spec, port), nprocs=spec["ranks"])


if __name__ == "__main__":
    main()
