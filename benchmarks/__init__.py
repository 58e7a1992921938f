"""Speed of the parts of shardflow: each module prints a table and can write JSON."""
