"""Several processes for one run: who they are, and how weights, checkpoints and exports are divided among them."""
