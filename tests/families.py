"""Values that make a result say which keys were seen: one-hot positions, and the direction all queries point in."""

import torch


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
