"""Prefect flows: the pipeline and its parameters, and the `shardflow` command."""
