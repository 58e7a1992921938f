"""Prefect tasks: one thin task a stage, and the reports that people read."""
