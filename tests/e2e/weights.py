"""Random weights whose greedy text depends on every head's attention, by a margin that rounding rarely bridges.

SGLang's dummy weights are so small that attention hardly moves a logit. Here a token names three possible successors,
far ahead of all others, and what attention found decides between them: so n-gram trees branch, second and third
children are accepted, and a row that saw a wrong token changes log-probabilities and soon the text.
"""

import math
import zlib

import torch

SUCCESSORS = 3
LEAD = 9.0  # logits by which a successor is ahead, before attention has spoken
CHOICE = 1.5  # standard deviation of the logits that attention adds
SHARPNESS = (1.0, 1.5, 2.0, 2.5, 3.0, 3.5)  # of the scores, one after another over the heads: diffuse and peaked
ATTENTION_SHARE = 0.5  # of a layer's output in the residual stream, beside an embedding of 1
MLP_SHARE = 0.05  # small: a routing that flips by rounding must not look like a fault


def fill(model: torch.nn.Module) -> None:
    """Overwrite every floating-point weight of a DeepSeek or Llama model, in place; the same at every call."""
    held = model.state_dict()
    heads = {name: module.num_local_heads for name, module in model.named_modules() if hasattr(module, "w_kc")}
    for name, weight in held.items():
        if torch.is_floating_point(weight) and "rotary" not in name:
            fill_one(name, weight, heads.get(name.partition(".q_b_proj")[0], 1))


def fill_one(name: str, weight: torch.Tensor, heads: int) -> None:
    """heads: of the attention that `weight` belongs to; of q_b_proj alone."""
    if name.endswith("embed_tokens.weight"):
        weight.copy_(embedding(*weight.shape))
    elif name.endswith("lm_head.weight"):
        weight.copy_(head(*weight.shape))
    elif "norm" in name:
        weight.fill_(1)
    elif name.endswith("bias"):
        weight.zero_()
    else:
        weight.normal_(generator=generator(name, weight.device))
        weight.mul_(gain(name) / math.sqrt(weight.shape[-1]))
        if name.endswith("q_b_proj.weight"):
            scale = [SHARPNESS[head % len(SHARPNESS)] for head in range(heads)]
            weight.view(heads, -1, weight.shape[-1]).mul_(torch.tensor(scale).to(weight)[:, None, None])


def gain(name: str) -> float:
    if name.endswith("o_proj.weight"):
        return ATTENTION_SHARE
    return MLP_SHARE if name.endswith(("down_proj.weight", "w2_weight")) else 1.0


def embedding(vocabulary: int, hidden: int) -> torch.Tensor:
    return torch.randn(vocabulary, hidden, generator=generator("embedding", torch.device("cpu")))


def successors(vocabulary: int) -> list[torch.Tensor]:
    """Permutations of the tokens: element i at t is the i-th token that may follow t."""
    seed = generator("successors", torch.device("cpu"))
    return [torch.randperm(vocabulary, generator=seed) for _ in range(SUCCESSORS)]


def head(vocabulary: int, hidden: int) -> torch.Tensor:
    """Row v reads the embeddings of the tokens that v may follow, and a direction of its own."""
    own = torch.randn(vocabulary, hidden, generator=generator("head", torch.device("cpu")))
    rows = own * (CHOICE / math.sqrt(hidden))
    tokens = embedding(vocabulary, hidden)
    for follows in successors(vocabulary):
        rows[follows] += tokens * (LEAD / hidden)
    return rows


def generator(name: str, device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
