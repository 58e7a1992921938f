"""The model: arguments, layers, generation; ``model.checkpoint`` converts, verifies and describes its shards."""
