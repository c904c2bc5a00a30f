"""A plain Llama in PyTorch: what a user would write without a framework."""

import json
import struct

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, shape):
        super().__init__()
        hidden, self.head_dim = shape["hidden"], shape["hidden"] // shape["heads"]
        kv_width = shape["kv_heads"] * self.head_dim
        self.grouped = shape["heads"] != shape["kv_heads"]
        self.q_proj = nn.Linear(hidden, hidden, bias=False)
        self.k_proj = nn.Linear(hidden, kv_width, bias=False)
        self.v_proj = nn.Linear(hidden, kv_width, bias=False)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)

    def heads(self, y):
        # Their number is left open: under tensor parallelism a rank has a part of them.
        return y.view(*y.shape[:2], -1, self.head_dim).transpose(1, 2)

    def forward(self, x, cos, sin):
        q = rotate(self.heads(self.q_proj(x)), cos, sin)
        k = rotate(self.heads(self.k_proj(x)), cos, sin)
        v = self.heads(self.v_proj(x))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        y = y.transpose(1, 2)
        return self.o_proj(y.reshape(*y.shape[:2], -1))


class Mlp(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.gate_proj = nn.Linear(shape["hidden"], shape["ffn"], bias=False)
        self.up_proj = nn.Linear(shape["hidden"], shape["ffn"], bias=False)
        self.down_proj = nn.Linear(shape["ffn"], shape["hidden"], bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Expert(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.w1 = nn.Linear(shape["hidden"], shape["expert_ffn"], bias=False)
        self.w2 = nn.Linear(shape["expert_ffn"], shape["hidden"], bias=False)
        self.w3 = nn.Linear(shape["hidden"], shape["expert_ffn"], bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Experts(nn.Module):
    """Mixtral's layer: a loop over the experts, each on the rows that chose it."""

    def __init__(self, shape):
        super().__init__()
        self.per_token = shape["experts_per_token"]
        self.gate = nn.Linear(shape["hidden"], shape["experts"], bias=False)
        self.experts = nn.ModuleList(Expert(shape) for _ in range(shape["experts"]))

    def forward(self, x):
        rows = x.reshape(-1, x.shape[-1])
        weights, chosen = F.softmax(self.gate(rows), dim=-1).topk(self.per_token, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        out = torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            row, choice = torch.where(chosen == e)
            out.index_add_(0, row, expert(rows[row]) * weights[row, choice, None])
        return out.reshape(x.shape)


class Block(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape["hidden"], eps=1e-5)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape["hidden"], eps=1e-5)
        if shape.get("experts", 0) > 0:
            self.block_sparse_moe = Experts(shape)
        else:
            self.mlp = Mlp(shape)

    def forward(self, x, cos, sin):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        feed_forward = self.mlp if hasattr(self, "mlp") else self.block_sparse_moe
        return x + feed_forward(self.post_attention_layernorm(x))


def rotate(x, cos, sin):
    """Rotary embedding in the rotate-half form."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


class Llama(nn.Module):
    """Layers `part` of `parts`: the first has the embedding, the last the norm and the head."""

    def __init__(self, shape, part=0, parts=1):
        super().__init__()
        hidden, layers = shape["hidden"], shape["layers"]
        first, last = part == 0, part == parts - 1
        stages = shape.get("stages") or [layers * (i + 1) // parts - layers * i // parts for i in range(parts)]
        mine = range(sum(stages[:part]), sum(stages[: part + 1]))
        self.embed_tokens = nn.Embedding(shape["vocab"], hidden) if first else None
        self.layers = nn.ModuleDict({str(i): Block(shape) for i in mine})
        self.norm = nn.RMSNorm(hidden, eps=1e-5) if last else None
        self.lm_head = nn.Linear(hidden, shape["vocab"], bias=False) if last else None
        half = hidden // shape["heads"] // 2
        angles = torch.outer(torch.arange(shape["seq"]).double(), 10000.0 ** -(torch.arange(half).double() / half))
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def forward(self, x):
        if self.embed_tokens is not None:
            x = self.embed_tokens(x)
        for block in self.layers.values():
            x = block(x, self.cos, self.sin)
        return x if self.lm_head is None else self.lm_head(self.norm(x))

    def init_weights(self, seed):
        """The same weights for the same seed, however the layers are split."""
        for name, weight in self.named_parameters():
            if weight.dim() == 1:
                nn.init.ones_(weight)
            else:
                generator = torch.Generator().manual_seed(seed + sum(i * ord(c) for i, c in enumerate(name, 1)))
                nn.init.normal_(weight, std=0.02, generator=generator)


def mean_loss(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batch_of(shape, seed):
    """Token ids and labels, [sequence, position]."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(shape["vocab"], (shape["batch"], shape["seq"] + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def save(model, shape, folder, ids, labels):
    """Writes a Hugging Face folder and `batch.json` beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape["hidden"],
        "intermediate_size": shape["ffn"],
        "num_hidden_layers": shape["layers"],
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["kv_heads"],
        "vocab_size": shape["vocab"],
        "max_position_embeddings": shape["seq"],
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    if shape.get("experts", 0) > 0:
        config |= {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "intermediate_size": shape["expert_ffn"],
            "num_local_experts": shape["experts"],
            "num_experts_per_tok": shape["experts_per_token"],
        }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    batch = {"input_ids": ids.tolist(), "labels": labels.tolist()}
    (folder / "batch.json").write_text(json.dumps(batch))
    header, blobs, at = {}, [], 0
    for name, weight in model.named_parameters():
        name = name if name.startswith("lm_head") else f"model.{name}"
        blob = weight.detach().numpy().tobytes()
        header[name] = {"dtype": "F32", "shape": list(weight.shape), "data_offsets": [at, at + len(blob)]}
        blobs.append(blob)
        at += len(blob)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.writelines(blobs)
