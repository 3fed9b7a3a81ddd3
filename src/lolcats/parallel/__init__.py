"""One run in several processes (group, launch, sharding), and attention transfer block by block."""
