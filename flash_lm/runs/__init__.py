"""The folder of a run and its contents: names, config.json, lines of results, provenance, hosts."""
