"""What a failure costs under torchrun with distributed checkpoints (DCP): the peer of `cargo xtask bench resilience`.

    restart.py '{"shape": {...}, "folder": "FOLDER", "ranks": 2}'

starts `torchrun --max-restarts` over ranks under FSDP2 that train a plain Llama and save with `dcp.async_save` at every
second step. In the middle of a step rank 1 ends itself by SIGKILL; torchrun starts all ranks again and they load the
newest whole checkpoint. Prints one object, seconds unless named otherwise: `restart_s` from the signal to the next new
committed step, `steps_lost`, `ready_s` until all ranks had their state again, `step_s` of plain steps, `step_async_s` of
steps that each begin an asynchronous checkpoint, `blocked_s` of one, `save_bytes_per_s` of a synchronous one.
"""

import json
import os
import pathlib
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time

PLAIN, ASYNC, SAVES, KILL_AFTER, END = 6, 4, 3, 5, 9
LIMIT_S = 100


def log(folder, rank, **fields):
    with open(folder / f"log-{rank}.jsonl", "a") as file:
        file.write(json.dumps({"t": time.time(), **fields}) + "\n")


def die(folder, rank):
    log(folder, rank, kind="kill")
    os.kill(os.getpid(), signal.SIGKILL)


def worker(spec):
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    import model as llama
    import train

    folder, shape = pathlib.Path(spec["folder"]), spec["shape"]
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    # A save beside the steps in their own group would wait for ever: its exchanges and theirs come in another order on each rank.
    saving = dist.new_group(backend="gloo")
    net = llama.Llama(shape)
    net.init_weights(train.SEED)
    mesh = dist.device_mesh.init_device_mesh("cpu", (ranks,))
    for block in net.layers.values():
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    ids, labels = llama.batch_of(shape, train.SEED)
    ids, labels = ids.chunk(ranks)[rank], labels.chunk(ranks)[rank]
    trainer = train.Trainer(net, lambda: llama.mean_loss(net(ids), labels))

    def state():
        weights, moments = get_state_dict(net, trainer.optimizer)
        return {"net": weights, "optimizer": moments}

    def wait(future):
        if future is not None:
            future.result()

    first, pending = 1, None
    whole = sorted(int(p.parent.name) for p in folder.glob("steps/*/.metadata"))
    if attempt > 0 and whole:
        trainer.step()  # makes the moments that are loaded into
        here = state()
        dcp.load(here, checkpoint_id=str(folder / "steps" / str(whole[-1])))
        set_state_dict(net, trainer.optimizer, model_state_dict=here["net"], optim_state_dict=here["optimizer"])
        first = whole[-1] + 1
    log(folder, rank, kind="ready", attempt=attempt, first=first)
    for step in range(first, END + 1):
        if rank == 1 and attempt == 0 and step == KILL_AFTER + 1:
            # In the middle of the step, as far as a clock can say.
            threading.Timer(0.5 * seconds, die, (folder, rank)).start()
        seconds, _ = train.timed(trainer.step)
        log(folder, rank, kind="step", step=step, attempt=attempt, seconds=seconds)
        if step % 2 == 0:
            wait(pending)
            pending = dcp.async_save(state(), checkpoint_id=str(folder / "steps" / str(step)), process_group=saving)
    wait(pending)
    plain = [train.timed(trainer.step)[0] for _ in range(PLAIN)]
    blocked, steps, pending = [], [], None
    for i in range(ASYNC):
        began = time.perf_counter()
        trainer.step()
        wait(pending)
        asked = time.perf_counter()
        pending = dcp.async_save(state(), checkpoint_id=str(folder / f"async-{i}"), process_group=saving)
        blocked.append(time.perf_counter() - asked)
        steps.append(time.perf_counter() - began)
    wait(pending)
    saves = []
    for i in range(SAVES):
        began = time.perf_counter()
        dcp.save(state(), checkpoint_id=str(folder / f"save-{i}"))
        saves.append(time.perf_counter() - began)
    size = sum(p.stat().st_size for p in (folder / "save-0").iterdir())
    middle = {"step_s": plain, "step_async_s": steps[1:], "blocked_s": blocked, "save_s": saves}
    log(folder, rank, kind="end", bytes=size, **{name: statistics.median(values) for name, values in middle.items()})
    dist.barrier()
    # Without destructors: gloo's threads now and then abort a process that takes them down in order.
    os._exit(0)


def main():
    spec = json.loads(sys.argv[1])
    if "RANK" in os.environ:
        return worker(spec)
    folder = pathlib.Path(spec["folder"])
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    here = pathlib.Path(__file__)
    command = [sys.executable, "-B", "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={spec['ranks']}"]
    command += ["--max-restarts=3", str(here), sys.argv[1]]
    # A session of its own: what does not come back is ended with all of its ranks.
    run = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, start_new_session=True)
    try:
        if run.wait(timeout=LIMIT_S):
            return run.returncode
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)
        run.wait()
        print(f"torchrun did not come back within {LIMIT_S} s", file=sys.stderr)
        return 1
    logs = [[json.loads(line) for line in open(folder / f"log-{rank}.jsonl")] for rank in range(spec["ranks"])]
    lines = sorted((line for log in logs for line in log), key=lambda line: line["t"])
    killed = next(line["t"] for line in lines if line["kind"] == "kill")
    before = max(line["step"] for line in lines if line["kind"] == "step" and line["t"] < killed)
    again = next(line["t"] for line in lines if line["kind"] == "step" and line["t"] > killed and line["step"] > before)
    first = next(line["first"] for line in lines if line["kind"] == "ready" and line["attempt"] > 0)
    end = next(line for line in lines if line["kind"] == "end")
    print(
        json.dumps(
            {
                "restart_s": again - killed,
                "steps_lost": before + 1 - first,
                "ready_s": next(line["t"] for line in lines if line["kind"] == "ready" and line["attempt"] > 0) - killed,
                "step_s": end["step_s"],
                "step_async_s": end["step_async_s"],
                "blocked_s": end["blocked_s"],
                "save_bytes_per_s": end["bytes"] / end["save_s"],
            }
        )
    )
    return 0


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    sys.exit(main())
