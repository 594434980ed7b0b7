"""Imported before sglang: beside a CPU build of torch, a torchvision built for CUDA cannot load its operators.

torchvision's own import then fails on naming two of them, and SGLang imports torchvision.
"""

import torch

if torch.version.cuda is None:
    LIBRARY = torch.library.Library("torchvision", "FRAGMENT")
    LIBRARY.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    LIBRARY.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
