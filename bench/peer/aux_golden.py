"""Golden values of the auxiliary loss of experts, as transformers adds it to the loss: writes
crates/train/tests/data/auxiliary.json for crates/train/tests/auxiliary.rs, which makes the same weights.

aux_golden.py OUT
"""

import json
import sys

import torch
import transformers

VOCAB, BATCH, SEQ, COEFFICIENT = 48, 4, 8, 0.1
SHAPE = dict(
    vocab_size=VOCAB, hidden_size=16, intermediate_size=12, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=4, max_position_embeddings=32, rms_norm_eps=1e-5, tie_word_embeddings=False,
    output_router_logits=True, router_aux_loss_coef=COEFFICIENT, num_experts_per_tok=2,
)
CASES = {
    "mixtral": dict(kind="Mixtral", num_local_experts=4),
    "qwen3_moe": dict(
        kind="Qwen3Moe", num_experts=4, moe_intermediate_size=12, norm_topk_prob=False, decoder_sparse_step=1
    ),
}
# What folders call the parts of experts that transformers holds in one tensor.
EXPERTS = {"Mixtral": ("block_sparse_moe", "w1", "w3", "w2"), "Qwen3Moe": ("mlp", "gate_proj", "up_proj", "down_proj")}


def stored(kind, name, tensor):
    """A tensor of the model in memory under the names of a folder."""
    if ".mlp." not in name:
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


def weights(name, count):
    """Numbers that any language makes alike: of a tensor's name and an element's place, in sixteen bits."""
    seed = 0
    for byte in name.encode():
        seed = (seed * 131 + byte) % 2**32
    norm = "norm" in name
    # Routers that are far from balance.
    scale = 2**18 if norm else 2**15 if name.endswith("gate.weight") else 2**16
    for at in range(count):
        bits = ((seed + at * 2654435761) % 2**32 * 2246822519 % 2**32) >> 16
        yield (1.0 if norm else 0.0) + (bits - 32768) / scale


def golden(case):
    more = {key: value for key, value in case.items() if key != "kind"}
    config = getattr(transformers, case["kind"] + "Config")(**SHAPE, **more, attn_implementation="eager")
    config._experts_implementation = "eager"
    model = getattr(transformers, case["kind"] + "ForCausalLM")(config).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            for on_disk, part in stored(case["kind"], name, parameter).items():
                part.copy_(torch.tensor(list(weights(on_disk, part.numel())), dtype=torch.float64).reshape(part.shape))
    ids = torch.tensor([[(row * 7 + at * at * 5 + 3) % VOCAB for at in range(SEQ)] for row in range(BATCH)])
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        for on_disk, part in stored(case["kind"], name, parameter.grad).items():
            flat = part.reshape(-1)
            # Its norm, its largest entry and its first two.
            numbers = [flat.norm(), flat.abs().max(), flat[0], flat[1]]
            gradients[on_disk] = [float(f"{number.item():.9e}") for number in numbers]
    config.architectures = [case["kind"] + "ForCausalLM"]
    keys = config.to_diff_dict() | {key: SHAPE[key] for key in SHAPE} | more
    drop = ("transformers_version", "_experts_implementation", "_attn_implementation", "attn_implementation")
    return dict(
        config={key: value for key, value in keys.items() if key not in drop}, input_ids=ids.tolist(),
        loss=out.loss.item(), aux_loss=out.aux_loss.item(), gradients=gradients,
    )


if __name__ == "__main__":
    made = {name: golden(case) for name, case in CASES.items()}
    with open(sys.argv[1], "w") as file:
        versions = dict(transformers=transformers.__version__, torch=torch.__version__.split("+")[0])
        # A gradient a line.
        text = json.dumps(dict(**versions, cases=made)).replace('], "', '],\n"').replace('{"', '{\n"')
        file.write(text + "\n")
