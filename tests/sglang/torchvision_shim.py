"""Imported before sglang, which imports torchvision: beside a CPU build of torch, a torchvision built for CUDA cannot
load its operators, and its own import then fails on naming two of them.
"""

import torch

try:
    import torchvision
except RuntimeError as error:
    if "torchvision::nms" not in str(error):
        raise
    LIBRARY = torch.library.Library("torchvision", "FRAGMENT")
    LIBRARY.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    LIBRARY.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import torchvision  # noqa: F401 # SGLang's import finds it loaded
