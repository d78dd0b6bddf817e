"""Model families: one file per family with its options, core or sublayer, and registration."""
