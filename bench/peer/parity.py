"""Models of transformers for `cargo xtask parity`: saves random ones, and compares what came back.

parity.py save DIR           writes DIR/CASE/{model/, batch.json, expected.safetensors} for every case
parity.py compare DIR CASE   reads DIR/CASE/{evaluated.safetensors, exported/}; prints one JSON object
"""

import json
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

VOCAB, BATCH, SEQ = 320, 4, 64
SHAPE = dict(
    vocab_size=VOCAB, hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=128, rms_norm_eps=1e-5,
)
CASES = {
    "llama": dict(kind="Llama", dtype=torch.float32, shard="10GB", tied=False),
    "llama-bf16-shards": dict(kind="Llama", dtype=torch.bfloat16, shard="100KB", tied=False),
    "qwen3-tied": dict(kind="Qwen3", dtype=torch.float32, shard="10GB", tied=True),
    "qwen3-bf16-shards": dict(kind="Qwen3", dtype=torch.bfloat16, shard="100KB", tied=False),
    "mixtral": dict(kind="Mixtral", dtype=torch.float32, shard="10GB", tied=False, num_local_experts=6),
    "qwen3-moe": dict(
        kind="Qwen3Moe", dtype=torch.float32, shard="100KB", tied=False, num_experts=6, num_experts_per_tok=3,
        moe_intermediate_size=48, norm_topk_prob=False, decoder_sparse_step=1,
    ),
    # The auxiliary loss is part of the loss.
    "mixtral-aux": dict(
        kind="Mixtral", dtype=torch.float32, shard="10GB", tied=False, num_local_experts=6, output_router_logits=True,
        router_aux_loss_coef=0.02,
    ),
    "qwen3-moe-aux": dict(
        kind="Qwen3Moe", dtype=torch.float32, shard="10GB", tied=False, num_experts=6, num_experts_per_tok=3,
        moe_intermediate_size=48, norm_topk_prob=True, decoder_sparse_step=1, output_router_logits=True,
        router_aux_loss_coef=0.1,
    ),
}
# What the folders call the parts of experts that transformers holds in one tensor.
EXPERTS = {"Mixtral": ("block_sparse_moe", "w1", "w3", "w2"), "Qwen3Moe": ("mlp", "gate_proj", "up_proj", "down_proj")}


def model_of(case, seed):
    torch.manual_seed(seed)
    config_class = getattr(transformers, case["kind"] + "Config")
    model_class = getattr(transformers, case["kind"] + "ForCausalLM")
    more = {key: value for key, value in case.items() if key not in ("kind", "dtype", "shard", "tied")}
    config = config_class(**SHAPE, **more, tie_word_embeddings=case["tied"], attn_implementation="eager")
    model = model_class(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Norms that are not one show a forgotten or doubled norm.
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.1 if "norm" in name else 0.08)
    return model.to(case["dtype"])


def load(folder):
    # Grouped products do not exist in float64.
    how = dict(dtype=torch.float32, attn_implementation="eager", experts_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **how)
    return model.eval()


def on_disk(kind, name, tensor):
    """A tensor of a model in memory under the names of its folder."""
    if kind not in EXPERTS or ".mlp." not in name:
        return {name: tensor}
    block, gate, up, down = EXPERTS[kind]
    name = name.replace(".mlp.", f".{block}.")
    if not name.endswith(("gate_up_proj", "down_proj")):
        return {name: tensor}
    stem, fused = name.rsplit(".", 1)
    parts = {}
    for e, matrix in enumerate(tensor):
        both = matrix.chunk(2) if fused == "gate_up_proj" else (matrix,)
        for part, values in zip((gate, up) if fused == "gate_up_proj" else (down,), both):
            parts[f"{stem}.{e}.{part}.weight"] = values
    return parts


def save(root):
    for seed, (name, case) in enumerate(CASES.items()):
        folder = root / name
        folder.mkdir(parents=True)
        model_of(case, seed).save_pretrained(folder / "model", max_shard_size=case["shard"])
        ids = torch.randint(VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(seed))
        (folder / "batch.json").write_text(json.dumps({"input_ids": ids.tolist()}))
        # The stored weights, computed in float64 throughout but for what transformers does in float32.
        model = load(folder / "model").double()
        out = model(input_ids=ids, labels=ids)
        out.loss.backward()
        expected = {"logits": out.logits.float().contiguous(), "loss": out.loss.float().reshape(1)}
        for parameter_name, parameter in model.named_parameters():
            for stored, grad in on_disk(case["kind"], parameter_name, parameter.grad).items():
                expected["grad." + stored] = grad.float().contiguous()
        save_file({key: value.detach() for key, value in expected.items()}, folder / "expected.safetensors")


def compare(root, name):
    folder = root / name
    expected, got = load_file(folder / "expected.safetensors"), load_file(folder / "evaluated.safetensors")
    assert expected.keys() == got.keys(), sorted(expected.keys() ^ got.keys())
    relative = lambda key: ((got[key] - expected[key]).abs().max() / expected[key].abs().max()).item()
    gradients = max(relative(key) for key in expected if key.startswith("grad."))
    ids = torch.tensor(json.loads((folder / "batch.json").read_text())["input_ids"])
    with torch.no_grad():
        logits = [load(folder / part)(input_ids=ids).logits for part in ("model", "exported")]
    print(json.dumps({
        "transformers": transformers.__version__, "torch": torch.__version__,
        "loss": abs((got["loss"] - expected["loss"]).item()), "logits": relative("logits"), "gradients": gradients,
        "exported_equal": torch.equal(*logits),
    }))


if __name__ == "__main__":
    action, root = sys.argv[1], Path(sys.argv[2])
    if action == "save":
        save(root)
    else:
        compare(root, sys.argv[3])
