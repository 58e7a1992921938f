"""Fast generation: weights laid out for fused kernels, a paged cache, prompts at once, a graph for each batch size."""
