"""What the conversion did to the model: perplexity, agreement with a reference, expert load, and the record of it."""
