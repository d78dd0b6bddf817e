"""Scripts for one GPU: what each part measures, and in what time."""
