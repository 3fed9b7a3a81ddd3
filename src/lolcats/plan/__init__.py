"""What a linearization will cost on given GPUs, from a model's configuration alone.

`shape` counts a model's parts, `work` its FLOPs, `memory` the bytes on a GPU, `modes` puts them together for every
way of training, and `recommend` chooses and writes the command.
"""
