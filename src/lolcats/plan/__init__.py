"""What a linearization will cost on given GPUs, from a model's configuration alone.

`shape` counts a model's parts, `costs` their FLOPs and bytes, `gpus` how fast they go, `ways` puts them together for
every way of training and chooses one.
"""
