"""Model families: a file has a family's options, its core or sublayer, how it is built, and its row of the table."""
