"""Lets torchvision be imported beside a CPU build of torch; an engine's venv takes it as its `sitecustomize`.

The registry's torchvision is built for CUDA: its own library can not be loaded, and it then fails to describe operators
that do not exist. This names them just before it is imported. Engines resize images with it, which is plain torch; none
calls these detection operators, so their signatures do not matter.
"""

import sys

OPERATORS = (
    "nms", "qnms", "roi_align", "_roi_align_backward", "qroi_align", "ps_roi_align", "_ps_roi_align_backward",
    "roi_pool", "_roi_pool_backward", "ps_roi_pool", "_ps_roi_pool_backward", "deform_conv2d",
    "_deform_conv2d_backward",
)  # fmt: skip


class _NameOperators:
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            from torch.library import Library

            self.library = Library("torchvision", "DEF")
            for operator in OPERATORS:
                self.library.define(f"{operator}(Tensor input) -> Tensor")
            sys.modules["torchvision_operators"] = (
                self  # a library that is collected takes its operators with it
            )


sys.meta_path.insert(0, _NameOperators())
