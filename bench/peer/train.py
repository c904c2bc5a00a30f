"""Trains a plain Llama with PyTorch: the peer of `cargo xtask bench train`.

    train.py '{"shape": {...}, "variant": "ddp", "ranks": 2, "threads": 1, "seconds": 3, "warmup": 3, "steps_min": 3}'

makes the model, warms up and prints an object with the first loss. Then every line on standard input makes it train
for about that many seconds and print an object with the measurement, until the input ends: rounds of both sides can
take turns without starting and compiling again.

    train.py --save FOLDER '{"shape": {...}}'      writes the weights and tokens that every variant starts from
    train.py --versions                            says what is installed, and what importing it takes

Variants: eager, compiled (one rank); ddp; zero (DDP with ZeroRedundancyOptimizer); fsdp2; dtensor (tensor and sequence
parallel); gpipe, 1f1b (a pipeline of two stages). Ranks are processes joined by gloo.
"""

import contextlib
import ctypes
import json
import math
import os
import pathlib
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn

import model as llama

SEED = 1
MICROBATCHES = 4
CLIP = 1.0
PR_SET_PDEATHSIG = 1


def adamw(net, kind=torch.optim.AdamW, **options):
    """AdamW with decay on matrices only, in its fused form (the faster one here)."""
    parameters = list(net.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    return kind(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, fused=True, **options)


class Trainer:
    """A step over a fixed batch; `forward` gives the mean loss of this rank's sequences."""

    def __init__(self, net, forward, optimizer=None, context=contextlib.nullcontext):
        self.net, self.forward, self.context = net, forward, context
        self.optimizer = optimizer or adamw(net)

    def step(self):
        with self.context():
            loss = self.forward()
            loss.backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def whole_loss(self, loss):
        """The mean loss of the whole batch, on every rank."""
        if hasattr(loss, "full_tensor"):
            return loss.full_tensor().item()
        loss = loss.clone()
        if dist.is_initialized():
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        return loss.item()


class Pipeline:
    """A step of a two-stage pipeline over MICROBATCHES microbatches."""

    def __init__(self, shape, variant, rank, ranks, ids, labels):
        from torch.distributed import pipelining as pp

        self.net = llama.Llama(shape, rank, ranks)
        self.net.init_weights(SEED)
        self.first, self.last = rank == 0, rank == ranks - 1
        self.ids, self.labels = ids, labels
        stage = pp.PipelineStage(self.net, rank, ranks, torch.device("cpu"))
        schedule = {"gpipe": pp.ScheduleGPipe, "1f1b": pp.Schedule1F1B}[variant]
        self.schedule = schedule(stage, MICROBATCHES, loss_fn=llama.mean_loss)
        self.optimizer = adamw(self.net)

    def step(self):
        losses = []
        inputs = (self.ids,) if self.first else ()
        targets = {"target": self.labels, "losses": losses} if self.last else {}
        self.schedule.step(*inputs, **targets)
        parameters = list(self.net.parameters())
        square = nn.utils.get_total_norm(p.grad for p in parameters).square()
        dist.all_reduce(square)
        nn.utils.clip_grads_with_norm_(parameters, CLIP, square.sqrt())
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.stack(losses).mean().detach() if self.last else torch.zeros(())

    def whole_loss(self, loss):
        loss = loss.clone()
        dist.all_reduce(loss)
        return loss.item()


def tensor_parallel(net, ranks, ids, labels):
    """Megatron's split through DTensor: column then row, norms and residuals by sequence, vocabulary-parallel ends."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import parallel as tp

    def gathered(others):
        none = (None,) * others
        return tp.PrepareModuleInput(
            input_layouts=(Shard(1), *none), desired_input_layouts=(Replicate(), *none)
        )

    plan = {
        "embed_tokens": tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": tp.SequenceParallel(),
        "lm_head": tp.ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    for i in net.layers:
        block = {
            "input_layernorm": tp.SequenceParallel(),
            "self_attn": gathered(others=2),
            "self_attn.o_proj": tp.RowwiseParallel(output_layouts=Shard(1)),
            "post_attention_layernorm": tp.SequenceParallel(),
            "mlp": gathered(others=0),
            "mlp.down_proj": tp.RowwiseParallel(output_layouts=Shard(1)),
        }
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            block[name] = tp.ColwiseParallel()
        plan.update({f"layers.{i}.{name}": style for name, style in block.items()})
    tp.parallelize_module(net, dist.device_mesh.init_device_mesh("cpu", (ranks,)), plan)
    return Trainer(net, lambda: llama.mean_loss(net(ids), labels), context=tp.loss_parallel)


def build(spec, rank):
    shape, variant, ranks = spec["shape"], spec["variant"], spec["ranks"]
    ids, labels = llama.batch_of(shape, SEED)
    if variant in ("gpipe", "1f1b"):
        return Pipeline(shape, variant, rank, ranks, ids, labels)
    net = llama.Llama(shape)
    net.init_weights(SEED)
    if variant == "dtensor":
        return tensor_parallel(net, ranks, ids, labels)
    if variant in ("eager", "compiled"):

        def forward():
            return llama.mean_loss(net(ids), labels)

        # With the loss inside it is faster than the model alone.
        return Trainer(net, torch.compile(forward) if variant == "compiled" else forward)
    ids, labels = ids.chunk(ranks)[rank], labels.chunk(ranks)[rank]
    if variant == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        mesh = dist.device_mesh.init_device_mesh("cpu", (ranks,))
        for block in net.layers.values():
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
        return Trainer(net, lambda: llama.mean_loss(net(ids), labels))
    replica = nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True, static_graph=True)
    optimizer = None
    if variant == "zero":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer = adamw(net, ZeroRedundancyOptimizer, optimizer_class=torch.optim.AdamW)
    return Trainer(net, lambda: llama.mean_loss(replica(ids), labels), optimizer)


def timed(step):
    began = time.perf_counter()
    loss = step()
    return time.perf_counter() - began, loss


def most(value):
    """The largest over the ranks."""
    tensor = torch.tensor(value, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.item()


def peak_bytes():
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def run_rank(spec, rank, rendezvous):
    if spec["ranks"] > 1:
        # A rank ends with the process that started it.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(spec["threads"])
    if spec["ranks"] > 1:
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=spec["ranks"])
    trainer = build(spec, rank)
    first = [timed(trainer.step) for _ in range(spec["warmup"])]
    loss = trainer.whole_loss(first[0][1])
    steps = max(spec["steps_min"], math.ceil(spec["seconds"] / most(first[-1][0])))
    if rank == 0:
        print(json.dumps({"loss": loss}), flush=True)
    while go_on(rank):
        # The other side used the caches meanwhile.
        trainer.step()
        seconds = most(statistics.median(timed(trainer.step)[0] for _ in range(steps)))
        peak = int(most(peak_bytes()))
        if rank == 0:
            tokens = spec["shape"]["batch"] * spec["shape"]["seq"]
            print(json.dumps({"tokens_per_s": tokens / seconds, "peak_bytes": peak, "steps": steps}), flush=True)
    if dist.is_initialized():
        dist.barrier()
        # Without destructors: gloo's threads now and then abort a process that takes them down in order.
        sys.stdout.flush()
        os._exit(0)


def go_on(rank):
    """Whether rank 0 was asked for one more round; the others wait for its word."""
    word = torch.tensor(1 if rank == 0 and sys.stdin.readline() else 0)
    if dist.is_initialized():
        dist.broadcast(word, 0)
    return bool(word.item())


def run_ranks(text, ranks):
    """Starts a process per rank; ends all of them with the first that fails."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, text]
        children = [
            subprocess.Popen(
                [*command, str(rank), f"{folder}/rendezvous"], stdin=None if rank == 0 else subprocess.DEVNULL
            )
            for rank in range(ranks)
        ]
        try:
            while any(child.poll() is None for child in children):
                if any(child.poll() for child in children):
                    break
                time.sleep(0.02)
        finally:
            for child in children:
                if child.poll() is None:
                    child.kill()
        return max(abs(child.wait()) for child in children)


def main():
    arguments = sys.argv[1:]
    if arguments == ["--versions"]:
        versions = {"python": platform.python_version(), "torch": torch.__version__, "import_bytes": peak_bytes()}
        print(json.dumps(versions))
        return 0
    if arguments[0] == "--save":
        shape = json.loads(arguments[2])["shape"]
        net = llama.Llama(shape)
        net.init_weights(SEED)
        llama.save(net, shape, pathlib.Path(arguments[1]), *llama.batch_of(shape, SEED))
        return 0
    spec = json.loads(arguments[0])
    if len(arguments) == 1 and spec["ranks"] > 1:
        return run_ranks(arguments[0], spec["ranks"])
    rank, rendezvous = (int(arguments[1]), arguments[2]) if len(arguments) > 1 else (0, None)
    run_rank(spec, rank, rendezvous)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    sys.exit(main())
