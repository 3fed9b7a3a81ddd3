"""One run in several processes (group, launch, errors, sharding), and attention transfer block by block."""
