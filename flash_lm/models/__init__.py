"""The language model: embedding, a stack of layers, output heads, and the state of decoding."""
