"""Checkpoints: headers, names, plans, conversion and proof. No Prefect, Triton, GPU or process group."""
