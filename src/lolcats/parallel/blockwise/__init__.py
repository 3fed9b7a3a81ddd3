"""Attention transfer block by block: some decoder layers in memory at a time (arXiv:2410.10254, section 3.3)."""
