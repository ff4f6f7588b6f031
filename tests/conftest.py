"""One thread per test process; Triton's kernels in its interpreter where there is no GPU."""

from __future__ import annotations

import os

import torch

torch.set_num_threads(1)  # the suite runs one process per core
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are first imported
