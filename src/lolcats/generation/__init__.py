"""Text from a model: prompts through `generate()`, or many requests at once through the engine."""
