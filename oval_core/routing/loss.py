"""What a router is trained to: the attention of the next steps as a soft target, hard pages first.

Shapes: G layer groups, P pages; leading dimensions are steps.
"""

from __future__ import annotations

import torch


def routing_loss(
    scores: torch.Tensor, target: torch.Tensor, candidates: torch.Tensor, gamma: float = 2.0
) -> torch.Tensor:
    """Returns the focal cross-entropy with soft targets, mean over steps and groups.

    -sum y (1 - p)^gamma log p over the candidates, p = softmax(scores), y the target scaled to sum 1 (focal loss: arXiv
    1708.02002). A page that the router already expects counts little. Rows without a candidate of any weight count 0.

    Args:
        scores: [..., G, P] log mass up to a constant.
        target: [..., G, P] attention mass or another weight, from full attention; at least 0.
        candidates: bool, broadcasts to [..., G, P]: pages that can be chosen; always-kept ones cannot.
        gamma: 0 is plain cross-entropy.
    """
    candidates = candidates.expand(scores.shape)
    weight = target * candidates
    total = weight.sum(-1, keepdim=True)
    wanted = weight / total.clamp(min=torch.finfo(weight.dtype).tiny)
    log_p = scores.masked_fill(~candidates, float("-inf")).log_softmax(-1)
    log_p = log_p.masked_fill(~candidates, 0.0)
    # at least a little: the slope of x^gamma at 0 is not finite for a gamma below 1
    doubt = (1.0 - log_p.exp()).clamp(min=torch.finfo(log_p.dtype).eps)
    terms = wanted * doubt**gamma * log_p
    counted = (total[..., 0] > 0) & candidates.any(-1)
    rows = torch.where(counted, -terms.sum(-1), torch.zeros_like(total[..., 0]))
    return rows.sum() / counted.sum().clamp(min=1)


def mean_ahead(values: torch.Tensor, lead: int) -> torch.Tensor:
    """Returns the mean [T - lead + 1, ...] of values [T, ...] over each step and the `lead - 1` after it."""
    total = values.cumsum(0)
    total = torch.cat([torch.zeros_like(total[:1]), total])
    return (total[lead:] - total[:-lead]) / lead
