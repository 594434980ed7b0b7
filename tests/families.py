"""Values that make a result say which keys were seen: one-hot positions, and the direction all queries point in."""

import math

import torch

LOW = "low"  # for bf16: float32's own rounding of such scores is more than float32's bounds allow
RISING = "rising"  # for bf16, whose range its values span: scores that rise by more than 8, base 2, a tile
SM_SCALE = 192**-0.5  # of a model with 128 + 64 dimensional heads, whatever the width of the latent row
NEEDLE_SCORE = 30.0
LOW_SCORE = -96.0  # below where float32 ends, e^-87
RISE = 9.0  # base 2, in a tile of 64 tokens: more than the kernels let a row's scores be above its reference
MOST_RISES = 12  # the last tiles'; values shrink as weights grow, so that every tile counts; 2^-108 is still a float32


def position_code(n: int, tree_tokens: int, device: torch.device) -> torch.Tensor:
    """[n + T, 512]: with equal weights each output column says which tokens were seen, divided by how many.

    One-hot for the tree (columns 0..63), the first and the last 64 committed tokens (64..191), then the bits of the
    token's index. All values are 0 or 1, so the mean is exact but for its one rounding.
    """
    index = torch.arange(n + tree_tokens, device=device)
    code = torch.zeros(n + tree_tokens, 512, device=device)
    code[n + torch.arange(tree_tokens), torch.arange(tree_tokens)] = 1
    near = torch.arange(min(64, n))
    code[near, 64 + near] = 1
    code[n - 1 - near, 128 + near] = 1
    code[:, 192:] = (index[:, None] >> torch.arange(320, device=device) % 20) & 1
    return code


def needle_direction(device: torch.device) -> torch.Tensor:
    return 1.0 - 2.0 * (torch.arange(64, device=device) % 3 == 0)


def kv_rows(family: str, n: int, tree_tokens: int, needle: int | None, random: torch.Generator) -> torch.Tensor:
    """[n + T, 576] float32: a request's latent rows in token order. needle: the token that outweighs all others."""
    rows = torch.randn(n + tree_tokens, 576, generator=random, device=random.device)
    device = rows.device
    if family == "mean":
        rows[:, :512] = position_code(n, tree_tokens, device)
    if family == LOW:
        rows[:, 512:] = LOW_SCORE / (64 * SM_SCALE) * needle_direction(device)
    if family == RISING:
        tile = torch.arange(len(rows), device=device)[:, None] // 64
        rises = (tile - tile[-1] + MOST_RISES).clamp(min=0)
        rows[:, 512:] = rises * RISE * math.log(2) / (64 * SM_SCALE) * needle_direction(device)
        rows[:, :512] *= 2.0 ** (RISE * (MOST_RISES // 2 - rises))
    if needle is not None:
        rows[needle, :512] = 8.0
        rows[needle, 512:] = NEEDLE_SCORE / (64 * SM_SCALE) * needle_direction(device)
    return rows
