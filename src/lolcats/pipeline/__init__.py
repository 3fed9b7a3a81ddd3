"""The whole story: a pretrained model in, a linearized one out.

    load -> data -> convert -> stage 1 (transfer) -> stage 2 (adjust) -> export

The output folder holds the model; its `run/` folder holds what a killed run needs to go on.
"""

from __future__ import annotations

from lolcats.pipeline.run import linearize

__all__ = ["linearize"]
