"""Make torchvision importable beside a CPU build of torch.

It is the `sitecustomize` module of an engine's venv.

The torchvision of the package registry is built for CUDA. Its library cannot be loaded, so its operators are
not defined, and its import fails. This module defines the operators just before the import. Engines only
resize images with torchvision, which is plain torch. No engine calls these detection operators, so their
signatures do not matter.
"""

import sys

OPERATORS = (
    "nms", "qnms", "roi_align", "_roi_align_backward", "qroi_align", "ps_roi_align", "_ps_roi_align_backward",
    "roi_pool", "_roi_pool_backward", "ps_roi_pool", "_ps_roi_pool_backward", "deform_conv2d",
    "_deform_conv2d_backward",
)  # fmt: skip


class _DefineOperators:
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            from torch.library import Library

            self.library = Library("torchvision", "DEF")
            for operator in OPERATORS:
                self.library.define(f"{operator}(Tensor input) -> Tensor")
            sys.modules["torchvision_operators"] = (
                self  # keep the library alive, because its operators are deleted with it
            )


sys.meta_path.insert(0, _DefineOperators())
