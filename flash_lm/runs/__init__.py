"""The folder of a run and what stands in it: names, config.json, lines of results, provenance, hosts."""
