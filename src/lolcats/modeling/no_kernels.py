"""Takes the place of the GPU kernels in the code that a model's folder carries, which runs in plain PyTorch."""

from transformers.utils import logging


def missing() -> str:
    """Why no kernel can run here."""
    logging.get_logger(__name__).warning_once("running without GPU kernels, which lolcats brings")
    return "This folder's code has no kernels: pip install lolcats."
